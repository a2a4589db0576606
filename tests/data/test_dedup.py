import json
import random

import pytest

from kit.data.sources import open_source
from kit.errors import InputError, KitError

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install 'finetune-kit[dedup]'")

from kit.data.dedup import deduplicate


def rows_of(folder):
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_source(str(path))


def near(row, seed):
    """The row with another id, other case, white space and punctuation, and one word in 100 replaced.

    One word breaks five shingles, so at least 90 in 100 words' shingles are shared: s >= 91 / 101, found in 99.97%.
    """
    rng = random.Random(seed)
    texts = [[word.rstrip(".,!?") for word in m["content"].upper().split()] for m in row["messages"]]
    places = [(i, j) for i, text in enumerate(texts) for j in range(len(text))]
    for i, j in rng.sample(places, len(places) // 100):
        texts[i][j] = "something"
    messages = [m | {"content": "  ".join(t)} for m, t in zip(row["messages"], texts, strict=True)]
    return {"id": row["id"] + "-near", "messages": messages}


@pytest.fixture(scope="session")
def planted(real_trees, tmp_path_factory):
    """The best paths of the 100 real trees and near-duplicates of 20 of them of 100 words or more, shuffled."""
    source = open_source(str(real_trees))
    rows = [{"id": c.id, "messages": list(c.messages)} for _, c in source.read("", lambda *_: None)]
    long = [r for r in rows if sum(len(m["content"].split()) for m in r["messages"]) >= 100][:20]
    mixed = rows + [near(row, i) for i, row in enumerate(long)]
    random.Random(0).shuffle(mixed)
    assert len(mixed) == 120
    return mixed, {row["id"] for row in long}


def check(out, mixed, copied):
    """Of each planted pair one row stays; all else stays, unchanged."""
    kept, removed = rows_of(out / "kept"), rows_of(out / "removed")
    assert sorted(r["id"].removesuffix("-near") for r in removed) == sorted(copied)
    assert sorted(r["id"] for r in kept + removed) == sorted(r["id"] for r in mixed)
    assert {r["id"]: r["messages"] for r in kept + removed} == {r["id"]: r["messages"] for r in mixed}
    cluster = {r["cluster"]: r["id"] for r in kept if "cluster" in r}
    assert all(cluster[r["cluster"]].removesuffix("-near") == r["id"].removesuffix("-near") for r in removed)
    assert len(cluster) == len(copied)


@pytest.mark.slow
def test_planted_near_duplicates_are_removed_and_nothing_else(tmp_path, planted, capfd):
    mixed, copied = planted
    report = deduplicate(write(tmp_path / "mixed.jsonl", mixed), tmp_path / "out")
    assert report.as_dict() == {"documents": 120, "kept": 100, "removed": 20, "rejected": {}}
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report.as_dict()
    check(tmp_path / "out", mixed, copied)
    assert {p.name for p in tmp_path.iterdir()} >= {"mixed.jsonl", "out"}
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert capfd.readouterr().err == ""


def test_kept_rows_are_a_source_with_the_same_ids_groups_and_splits(tmp_path):
    turns = [{"role": "user", "content": "Name a fruit that is red."}, {"role": "assistant", "content": "Apple."}]
    (tmp_path / "data").mkdir()
    for name in ("train", "validation"):
        other = [turns[0], {"role": "assistant", "content": f"Of those in the {name} set, cherry and currant."}]
        write(tmp_path / "data" / f"{name}.jsonl", [{"id": name, "group": "g", "lang": "en", "messages": other}])
    before = open_source(str(tmp_path / "data"))
    deduplicate(before, tmp_path / "out")
    after = open_source(str(tmp_path / "out" / "kept"))
    read = [sorted((c for _, c in s.read("", lambda *_: None)), key=lambda c: c.id) for s in (before, after)]
    assert read[0] == read[1]
    assert [c.split for c in read[1]] == ["train", "eval"]


def test_short_texts_and_texts_without_spaces(tmp_path):
    chinese = "今天天气很好我们一起去公园散步然后回家吃饭看书睡觉明天再去学校上课学习数学和英语还要打扫教室"
    texts = ["yes", "yes", "what?", "!!!", chinese, chinese.replace("天气", "天色"), "10 + 4 is 14, says he", ""]
    texts += ["20 + 9 is 29, says he"]
    report = deduplicate(write(tmp_path / "t.jsonl", [{"text": t} for t in texts]), tmp_path / "out")
    assert report.as_dict() == {"documents": 8, "kept": 7, "removed": 1, "rejected": {"empty message": 1}}
    kept = [row["text"] for row in rows_of(tmp_path / "out" / "kept")]
    assert kept == [t for i, t in enumerate(texts) if i not in (5, 7)]  # numbers are not blurred


def test_invalid_calls_are_errors_and_leave_no_folder(tmp_path):
    source = write(tmp_path / "t.jsonl", [{"text": "one two three four five six"}])
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already"):
        deduplicate(source, tmp_path / "out")
    with pytest.raises(KitError, match=r"no document to keep; rows rejected: \{'other language': 1\}"):
        write(tmp_path / "t.jsonl", [{"text": "one two three four five six", "lang": "de"}])
        deduplicate(source, tmp_path / "new", lang="en")
    (tmp_path / "t.jsonl").write_bytes(b'{"text": "a"}\n' * 2000 + b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match="UTF-8"):
        deduplicate(source, tmp_path / "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "t.jsonl"]
