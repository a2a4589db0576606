import json
import time
from concurrent.futures import ProcessPoolExecutor

import pytest

from kit.data import Dataset, prepare, preview
from kit.encode import IGNORE
from kit.errors import InputError, KitError


@pytest.fixture
def dataset(recipe):
    return prepare(recipe)


def test_the_ledger_accounts_for_every_token(dataset):
    ledger, splits = dataset.manifest["ledger"], dataset.manifest["splits"]
    assert ledger["read_tokens"] == ledger["kept_tokens"] + sum(ledger["dropped"].values())
    assert ledger["kept_tokens"] == sum(s["tokens"] for s in splits.values())
    for name, sizes in splits.items():
        rows = dataset.rows(name)
        assert sum(map(len, rows["input_ids"])) == sizes["tokens"]
        assert sum(label != IGNORE for labels in rows["labels"] for label in labels) == sizes["loss_tokens"]


def test_rows_hold_whole_documents_and_fit(dataset):
    for row in dataset.rows("train"):
        assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"]) <= 128
        assert all(label in (IGNORE, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))


def test_a_reply_that_is_cut_keeps_its_end_token(dataset, smollm2):
    row = next(r for r in dataset.rows("train") if r["seq_lengths"] == [128])
    assert row["labels"][-1] == 2  # <|im_end|>, or the model learns that long replies never stop


def test_the_same_inputs_are_a_hit_in_under_a_second(recipe, dataset):
    before = {p: p.stat().st_mtime_ns for p in dataset.path.rglob("*")}
    start = time.perf_counter()
    again = prepare(recipe)
    assert time.perf_counter() - start < 1
    assert {p: p.stat().st_mtime_ns for p in again.path.rglob("*")} == before


def test_another_setting_gives_another_folder_and_a_forecast_size_does_not(recipe, dataset):
    assert prepare(recipe.override(**{"data.loss": "all"})).path != dataset.path
    assert prepare(recipe.override(**{"data.tokens": 5})).path == dataset.path


def test_many_starters_build_once(recipe):
    with ProcessPoolExecutor(4) as pool:
        made = list(pool.map(prepare, [recipe] * 4))
    assert len({d.path for d in made}) == 1
    assert len([p for p in made[0].path.parent.iterdir() if p.is_dir()]) == 1


def test_a_tree_never_stands_on_both_sides_and_additions_move_nothing(tmp_path, recipe):
    def sides(rows):
        (tmp_path / "chat.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
        from kit.conversations import read
        from kit.data import _side

        return {c.id: _side(c, recipe) for c in read(str(tmp_path / "chat.jsonl"))[0]}

    rows = [{"id": str(i), "group": f"g{i // 2}", "messages": [{"role": "user", "content": "x"}]} for i in range(200)]
    first, more = sides(rows), sides([*rows[::-1], dict(rows[0], id="new", group="new")])
    assert all(first[str(i)] == first[str(i + 1)] for i in range(0, 200, 2))
    assert {k: more[k] for k in first} == first
    assert 0.05 < sum(s == "eval" for s in first.values()) / 200 < 0.3


def test_dropped_rows_are_counted_by_reason(tmp_path, recipe):
    good = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    bad = {
        "empty message": [good[0], {"role": "assistant", "content": None}],
        "no reply": [good[0]],
        "unknown role": [*good, {"role": "tool", "content": "x"}],
        "two messages of one role in a row": [good[0], good[0], good[1]],
    }
    rows = [{"id": str(i), "messages": good} for i in range(20)] + [{"messages": m} for m in bad.values()]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(r) for r in rows))
    manifest = prepare(recipe.override(**{"data.source": str(tmp_path / "c.jsonl")})).manifest
    assert manifest["dropped_rows"] == dict.fromkeys(bad, 1)


def test_nothing_left_to_train_on_is_said(tmp_path, recipe):
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    with pytest.raises(KitError, match="Nothing is left to train on"):
        prepare(recipe.override(**{"data.source": str(tmp_path / "c.jsonl")}))
    assert not [p for p in (tmp_path / "prepared").iterdir() if p.is_dir()]


def test_a_model_that_is_nowhere_says_where_it_was_looked_for(recipe):
    with pytest.raises(InputError, match=r"no folder .*nobody/nothing.*hub's cache.*Set model.name"):
        prepare(recipe.override(**{"model.name": "nobody/nothing"}))


def test_the_preview_marks_what_the_loss_counts(dataset):
    page = preview(dataset)
    assert "background:#dbeafe" in page and "&lt;|im_end|&gt;" in page


def test_real_trees_give_a_hundred_conversations(recipe, real_trees):
    made = prepare(recipe.override(**{"data.source": str(real_trees), "data.seq_len": 2048}))
    splits = made.manifest["splits"]
    assert sum(s["conversations"] for s in splits.values()) == 100
    assert Dataset(made.path).manifest == made.manifest
