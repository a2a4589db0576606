import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kit.config.models import load_tokenizer
from kit.config.recipe import Recipe
from kit.data import dataset as data
from kit.data import publish
from kit.data.dataset import Dataset, find_prepared, merge, prepare
from kit.data.documents import encode_part, is_eval
from kit.data.encode import IGNORE
from kit.data.engine import PROBE_TEXTS, Engine
from kit.data.ledger import Ledger
from kit.data.sources import Part, open_source
from kit.errors import InputError, KitError
from tests.llama31 import llama31  # noqa: F401 - a fixture


@pytest.fixture
def dataset(recipe):
    return prepare(recipe)


def chat(*contents):
    return [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]


@pytest.fixture
def from_rows(recipe, tmp_path):
    """A recipe for chat rows written to a file; nothing goes to eval unless a change says so."""

    def make(rows, name="chat.jsonl", **changes):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return recipe.override(**{"data.source": str(tmp_path / name), "data.eval_fraction": 0.0, **changes})

    return make


def good(count):
    return [{"id": f"g{i}", "messages": chat(f"Question {i}?", f"Answer {i}.")} for i in range(count)]


def digest_of(folder):
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def adds_up(manifest):
    ledger, splits = manifest["ledger"], manifest["splits"].values()
    assert ledger["read_tokens"] == ledger["kept_tokens"] + sum(ledger["dropped"].values())
    assert ledger["kept_tokens"] == sum(s["tokens"] for s in splits)
    return ledger


def test_the_ledger_accounts_for_every_token(dataset):
    adds_up(dataset.manifest)
    for name, sizes in dataset.manifest["splits"].items():
        rows = dataset.rows(name)
        assert len(rows) == sizes["rows"]
        assert sum(map(len, rows["input_ids"])) == sizes["tokens"]
        assert sum(label != IGNORE for labels in rows["labels"] for label in labels) == sizes["loss_tokens"]
        assert sizes["fill"] == pytest.approx(sizes["tokens"] / (sizes["rows"] * 128), abs=1e-6)
        assert sizes["bound"] <= sizes["rows"]


def test_a_ledger_that_does_not_add_up_is_an_error(recipe, monkeypatch):
    monkeypatch.setattr(Ledger, "drop", lambda self, row, reason, tokens=0: None)
    with pytest.raises(KitError, match="does not add up"):
        prepare(recipe.override(**{"data.overlong": "drop"}))
    assert not list((data.Path("prepared")).glob("tiny-*"))


def test_rows_have_complete_documents_and_fit_seq_len(dataset):
    for row in dataset.rows("train"):
        assert len(row["input_ids"]) == len(row["labels"]) == sum(row["seq_lengths"]) <= 128
        assert all(label in (IGNORE, token) for token, label in zip(row["input_ids"], row["labels"], strict=True))
        starts = np.cumsum([0, *row["seq_lengths"][:-1]])
        assert all(row["labels"][start] == IGNORE for start in starts)  # nothing predicts a first token


def test_a_truncated_reply_keeps_its_end_token(from_rows):
    # transformers#34494: a reply that truncation cut was not trained at all.
    made = prepare(from_rows([{"messages": chat("Count.", "one two " * 200)}]))
    (row,) = made.rows("train")
    reply = [label for label in row["labels"] if label != IGNORE]
    assert len(row["input_ids"]) == 128 and row["labels"][-1] == 2  # <|im_end|>, or long replies never stop
    assert len(reply) > 80 and row["labels"][-len(reply) :] == reply
    assert adds_up(made.manifest)["dropped"] == {"cut at seq_len": adds_up(made.manifest)["read_tokens"] - 128}
    assert made.manifest["changed_rows"] == {"cut at seq_len": 1}


def test_overlong_drop_counts_the_dropped_documents(from_rows):
    rows = [*good(3), {"id": "long", "messages": chat("Count.", "one two " * 200)}]
    manifest = prepare(from_rows(rows, **{"data.overlong": "drop"})).manifest
    assert manifest["dropped_rows"] == {"longer than seq_len": 1}
    assert manifest["dropped_examples"] == {"longer than seq_len": ["long"]}
    adds_up(manifest)


def test_overlong_split_makes_documents_of_complete_turns_with_the_system_message(from_rows, smollm2):
    turns = [f"{who} {i} " + "word " * 20 for i in range(6) for who in ("ask", "reply")]
    rows = [{"id": "many", "messages": [{"role": "system", "content": "Be brief."}, *chat(*turns)]}]
    made = prepare(from_rows(rows, **{"data.overlong": "split", "data.packing": False}))
    tokenizer = load_tokenizer(str(smollm2))
    texts = [tokenizer.decode(row["input_ids"]) for row in made.rows("train")]
    assert len(texts) == 3
    assert all(t.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nask") for t in texts)
    assert [t.count("reply") for t in texts] == [2, 2, 2]
    assert made.manifest["splits"]["train"]["conversations"] == 1
    assert made.manifest["changed_rows"] == {"split": 1}
    head = len(tokenizer("<|im_start|>system\nBe brief.<|im_end|>\n")["input_ids"])
    assert adds_up(made.manifest)["repeated_tokens"] == 2 * head


def test_overlong_split_truncates_a_single_long_turn(from_rows):
    rows = [{"messages": chat("Hi", "Hello.", "Count.", "one two " * 200)}]
    manifest = prepare(from_rows(rows, **{"data.overlong": "split"})).manifest
    assert manifest["changed_rows"] == {"split": 1, "cut at seq_len": 1}
    assert adds_up(manifest)["dropped"]["cut at seq_len"] > 0


def test_plain_text_is_split_without_losing_tokens(from_rows, smollm2):
    made = prepare(from_rows([{"text": "one two three " * 200}], **{"data.overlong": "split", "data.packing": False}))
    rows = made.rows("train")
    assert [len(row["input_ids"]) for row in rows][:-1] == [128] * (len(rows) - 1)
    text = load_tokenizer(str(smollm2)).decode([token for row in rows for token in row["input_ids"]])
    assert text == "one two three " * 200 + "<|im_end|>"
    assert made.manifest["splits"]["train"]["loss_tokens"] == sum(len(row["input_ids"]) - 1 for row in rows)
    assert not adds_up(made.manifest)["dropped"]


def test_equal_inputs_reuse_the_folder_in_less_than_a_second(recipe, dataset):
    # datasets#6179: a tokenizer that was used hashes differently, so that everything ran again.
    load_tokenizer(recipe.model.name)("a call between")
    before = {p: p.stat().st_mtime_ns for p in dataset.path.rglob("*")}
    start = time.perf_counter()
    again = prepare(recipe)
    assert time.perf_counter() - start < 1
    assert again.path == dataset.path
    assert {p: p.stat().st_mtime_ns for p in dataset.path.rglob("*")} == before
    assert [p for p in dataset.path.parent.iterdir() if p.is_dir()] == [dataset.path]


def test_inputs_are_hashed_once_until_they_change(from_rows, tmp_path, monkeypatch):
    recipe = from_rows(good(5))
    source = tmp_path / "chat.jsonl"
    os.utime(source, (1e9, 1e9))  # long ago: what changed just now may change again under the same time stamp
    first, read = prepare(recipe), []
    whole = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda stream, kind: read.append(stream.name) or whole(stream, kind))
    assert prepare(recipe).path == first.path and str(source) not in read
    source.write_text(source.read_text().replace("Answer 1.", "Answer 9."))  # the same size
    assert prepare(recipe).path != first.path and str(source) in read


def test_data_settings_change_the_folder_and_forecast_sizes_do_not(recipe, dataset):
    assert prepare(recipe.override(**{"data.loss": "all"})).path != dataset.path
    assert prepare(recipe.override(**{"data.tokens": 5})).path == dataset.path


def test_bytes_do_not_depend_on_workers_or_the_hash_seed(recipe, dataset, tmp_path):
    code = (
        "import sys; from kit.data.dataset import prepare; from kit.config.recipe import Recipe\n"
        "prepare(Recipe.load(sys.argv[1]), workers=2)"
    )
    (tmp_path / "tiny.toml").write_text(recipe.toml())
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(data.files.REPOSITORY)}
    (tmp_path / "other").mkdir()
    command = [sys.executable, "-c", code, tmp_path / "tiny.toml"]
    subprocess.run(command, cwd=tmp_path / "other", env=environment, check=True)
    assert digest_of(tmp_path / "other" / dataset.path) == digest_of(dataset.path)


def test_eight_separate_parts_merge_into_the_same_folder(recipe, dataset, tmp_path):
    source = open_source(recipe.data.source)
    parts = [encode_part(recipe, source, tmp_path / "parts", Part(i, 8), "auto") for i in range(8)]
    merged = merge(recipe, parts[::-1], tmp_path / "merged")
    assert digest_of(merged.path) == digest_of(dataset.path)


def test_missing_parts_and_parts_of_another_recipe_are_errors(recipe, tmp_path):
    source = open_source(recipe.data.source)
    parts = [encode_part(recipe, source, tmp_path / "parts", Part(i, 2)) for i in range(2)]
    with pytest.raises(InputError, match=r"Parts \[1\] of 0 to 1 are here"):
        merge(recipe, parts[1:])
    with pytest.raises(InputError, match="made from other inputs or settings"):
        merge(recipe.override(**{"data.loss": "all"}), parts)


def test_sixty_four_concurrent_processes_build_once(recipe):
    # huggingface/trl#7223: 57 of 64 ranks prepared the same data again.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["kit.data.dataset"])
    with ProcessPoolExecutor(64, context) as pool:
        made = list(pool.map(prepare, [recipe] * 64))
    assert len({d.path for d in made}) == 1
    assert [p for p in made[0].path.parent.iterdir() if p.is_dir()] == [made[0].path]


def test_without_file_locks_two_builders_leave_one_complete_folder_and_warn(recipe, monkeypatch):
    def no_locks(stream, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    write = publish.write_split

    def overtaken(*args):  # another starter finishes while this one writes
        monkeypatch.setattr(publish, "write_split", write)
        prepare(recipe)
        return write(*args)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(publish, "write_split", overtaken)
    with pytest.warns(RuntimeWarning, match=r"No file locks in prepared \(No locks available\)"):
        made = prepare(recipe)
    assert [p for p in made.path.parent.iterdir() if p.is_dir()] == [made.path]
    adds_up(made.manifest)


def test_an_incomplete_folder_of_a_killed_process_is_not_used(recipe, tmp_path):
    (tmp_path / "tiny.toml").write_text(recipe.toml())
    code = (
        "import os, signal, sys; from kit import files; from kit.data import dataset as data\n"
        "from kit.config.recipe import Recipe\n"
        "write = files.write_json\n"
        "def die(path, value):\n"
        "    write(path, value)\n"
        "    if path.name == 'manifest.json': os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.write_json = die\n"
        "data.prepare(Recipe.load(sys.argv[1]))"
    )
    environment = os.environ | {"PYTHONPATH": str(data.files.REPOSITORY)}
    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "tiny.toml"], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "prepared").glob("*/manifest.json"))  # whole but for its name
    assert find_prepared(recipe) is None
    made = prepare(recipe)
    assert find_prepared(recipe).path == made.path


def test_trees_are_never_divided_and_added_rows_do_not_move_others(recipe, from_rows):
    def sides(rows):
        source = from_rows(rows).data.source
        return {c.id: is_eval(c, recipe) for _, c in open_source(source).read("", lambda row, reason: None)}

    rows = [dict(row, group=f"group {i // 2}") for i, row in enumerate(good(200))]
    first, more = sides(rows), sides([*rows[::-1], dict(rows[0], id="new", group="new")])
    assert all(first[f"g{i}"] == first[f"g{i + 1}"] for i in range(0, 200, 2))
    assert {k: more[k] for k in first} == first
    assert 0.05 < sum(first.values()) / 200 < 0.3


def test_dropped_rows_are_counted_by_reason_with_examples(from_rows):
    bad = {
        "empty message": chat("Hi", None),
        "no reply": chat("Hi"),
        "unknown role 'narrator'": [*chat("Hi", "Hello."), {"role": "narrator", "content": "x"}],
        "two messages of one role in a row": [*chat("Hi"), *chat("Hi", "Hello.")],
    }
    rows = good(20) + [{"id": f"{reason} {i}", "messages": m} for i in range(7) for reason, m in bad.items()]
    manifest = prepare(from_rows(rows)).manifest
    assert manifest["dropped_rows"] == dict.fromkeys(bad, 7)
    assert manifest["dropped_examples"] == {reason: [f"{reason} {i}" for i in range(5)] for reason in bad}


def test_a_reply_that_begins_after_seq_len_is_dropped_with_its_reason(from_rows):
    manifest = prepare(from_rows([*good(2), {"id": "late", "messages": chat("word " * 200, "Yes.")}])).manifest
    assert manifest["dropped_examples"] == {"no reply inside seq_len": ["late"]}
    adds_up(manifest)


def test_rows_refused_by_the_template_are_counted_by_reason(from_rows, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "strict")
    template = tmp_path / "strict" / "chat_template.jinja"
    refuse = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template.write_text(refuse + template.read_text())
    rows = [*good(2), {"id": "s", "messages": [{"role": "system", "content": "Be brief."}, *chat("a", "b")]}]
    manifest = prepare(from_rows(rows, **{"model.name": str(tmp_path / "strict")})).manifest
    assert manifest["dropped_examples"] == {"refused by the chat template: no system role": ["s"]}


def test_what_is_not_trained_on_is_counted_in_the_manifest_and_shown(from_rows, tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "endless")
    (tmp_path / "endless" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [row | {"tools": [{"name": "f"}], "score": 0} for row in good(3)]
    rows[1]["messages"][1]["reasoning_content"] = "because"
    rows.append({"messages": [*chat("Hi", "Wrong."), *chat("Hi", "Right.")]})
    rows[3]["messages"][1]["weight"] = 0
    made = prepare(from_rows(rows, **{"model.name": str(tmp_path / "endless")}))
    assert made.manifest["unused_keys"] == {"message.reasoning_content": 1, "score": 3, "tools": 3}
    assert made.manifest["changed_rows"] == {"reply of weight 0": 1}
    assert list(made.manifest["warnings"].values()) == [4]
    shown = str(made)
    assert "reasoning_content" in shown and "will not learn to stop" in shown
    assert "Changed rows: reply of weight 0 (1)" in shown


def test_other_files_of_a_folder_are_named(from_rows, tmp_path):
    (tmp_path / "d").mkdir()
    job = from_rows(good(3), "d/a.jsonl")
    for name in ("b.ndjson", "c.csv", ".hidden", "dataset_info.json"):
        (tmp_path / "d" / name).write_text("{}")
    made = prepare(job.override(**{"data.source": str(tmp_path / "d")}))
    assert made.manifest["files_not_read"] == ["b.ndjson", "c.csv"]
    assert "Files that are not read: b.ndjson, c.csv" in str(made)


def test_conversations_that_differ_in_weights_alone_are_no_duplicates(from_rows):
    rows = [{"id": str(i), "messages": [*chat("Hi", "One."), *chat("Hi", "Two.")]} for i in range(3)]
    for row, reply in zip(rows, (1, 3, 3), strict=True):
        row["messages"][reply]["weight"] = 0
    assert prepare(from_rows(rows)).manifest["dropped_examples"] == {"duplicate": ["2"]}


def test_a_piece_of_a_conversation_without_a_reply_in_the_loss_is_counted(from_rows):
    messages = [*chat("Hi", "one two " * 40), *chat("Hi", "three four " * 40)]
    messages[1]["train"] = False
    manifest = prepare(from_rows([{"id": "m", "messages": messages}], **{"data.overlong": "split"})).manifest
    assert manifest["dropped_examples"] == {"no reply in the loss": ["m"]}
    adds_up(manifest)


def test_of_exact_duplicates_the_first_is_kept(from_rows):
    rows = [*good(4), *(dict(row, id=f"again {i}") for i, row in enumerate(good(2)))]
    manifest = prepare(from_rows(rows)).manifest
    assert manifest["dropped_rows"] == {"duplicate": 2}
    assert manifest["dropped_examples"] == {"duplicate": ["again 0", "again 1"]}
    assert adds_up(manifest)["dropped"]["duplicate"] == manifest["splits"]["train"]["tokens"] / 2


def test_a_prompt_in_both_splits_is_reported(from_rows, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    from_rows(good(5), "both/train.jsonl")
    from_rows([{"id": "leak", "messages": chat("Question 1?", "Another answer.")}, *good(0)], "both/validation.jsonl")
    manifest = prepare(from_rows(good(1)).override(**{"data.source": str(folder)})).manifest
    assert manifest["leaks"] == {"prompts": 1, "examples": ["leak"]}


def test_languages_are_counted(from_rows):
    rows = [dict(row, lang="de" if i % 3 else "en") for i, row in enumerate(good(9))]
    manifest = prepare(from_rows(rows, **{"data.lang": ""})).manifest
    assert {lang: sizes["conversations"] for lang, sizes in manifest["languages"].items()} == {"de": 6, "en": 3}
    assert sum(s["tokens"] for s in manifest["languages"].values()) == manifest["ledger"]["kept_tokens"]


def test_a_table_of_any_size_is_written_in_batches_below_the_limit_of_int32(recipe, dataset, tmp_path, monkeypatch):
    # LlamaFactory#7526: list offsets past 2^31 overflowed. The limit is lowered to 4 rows a batch here.
    monkeypatch.setattr(publish, "BATCH_TOKENS", 4 * 128)
    small = prepare(recipe, tmp_path / "small")
    assert len(small.rows("train").data.column("input_ids").chunks) > 1
    assert small.rows("train").to_list() == dataset.rows("train").to_list()


def test_no_remaining_rows_is_an_error(from_rows):
    with pytest.raises(KitError, match=r"No row of .* can be trained on: no reply \(1 row, such as .*:1\)\."):
        prepare(from_rows([{"messages": chat("x")}]))
    assert not [p for p in data.Path("prepared").iterdir() if p.is_dir()]


def test_a_missing_model_is_an_error_that_lists_the_places(recipe):
    with pytest.raises(InputError, match=r"no folder .*nobody/nothing.*hub's cache.*Set model.name"):
        prepare(recipe.override(**{"model.name": "nobody/nothing"}))


def test_the_dataset_as_text_and_as_json(from_rows):
    rows = [*good(20), {"id": "empty", "messages": chat("Hi", "")}]
    recipe = from_rows(rows)
    made = prepare(recipe)
    value = json.loads(json.dumps(made.as_dict()))
    assert set(value) >= {"folder", "digest", "splits", "ledger", "dropped_rows", "optimizer_steps", "engine"}
    assert value["folder"] == str(made.path)
    assert value["optimizer_steps"] == recipe.optimizer_steps(value["splits"]["train"]["rows"])
    text = str(made)
    for words in ("Where the tokens went", "kept, in the loss", "Dropped rows", "empty message", "Lengths"):
        assert words in text
    assert made._repr_mimebundle_()["text/html"].count("<table") == 3
    assert Dataset(made.path) == made and Dataset(made.path).as_dict()["optimizer_steps"] is None


def test_folders_of_the_first_version_open(dataset):
    path = dataset.path / "manifest.json"
    old = {key: value for key, value in dataset.manifest.items() if key not in ("engine", "format_version")}
    path.write_text(json.dumps(old))
    opened = Dataset(dataset.path)
    assert opened.as_dict()["splits"] == dataset.manifest["splits"]
    assert len(opened.rows("train")) == old["splits"]["train"]["rows"]
    assert str(opened) and opened.preview().spans


class OtherIds:
    """An engine that agrees with tokenizers on `right` texts and then no more."""

    def __init__(self, backend, right):
        self.backend, self.right = backend, right

    def encode(self, text):
        before, self.backend.encode_special_tokens = self.backend.encode_special_tokens, True
        ids = self.backend.encode(text, add_special_tokens=False).ids
        self.backend.encode_special_tokens = before
        self.right -= 1
        return np.array(ids if self.right >= 0 else ids[::-1], np.int32)


@pytest.mark.parametrize(
    ("right", "engine"), [(0, "tokenizers"), (len(PROBE_TEXTS) + 40, "tokenizers"), (10**9, "gigatoken")]
)
def test_engine_auto_uses_gigatoken_only_where_ids_are_equal(recipe, dataset, tmp_path, monkeypatch, right, engine):
    monkeypatch.setattr(Engine, "_load_gigatoken", lambda self: OtherIds(self.backend, right))
    made = prepare(recipe, tmp_path / "auto", engine="auto")
    assert made.manifest["engine"] == engine
    for path in dataset.path.rglob("*.arrow"):
        assert path.read_bytes() == (made.path / path.relative_to(dataset.path)).read_bytes()


def test_engine_gigatoken_with_other_ids_is_an_error(recipe, monkeypatch):
    monkeypatch.setattr(Engine, "_load_gigatoken", lambda self: OtherIds(self.backend, len(PROBE_TEXTS) + 40))
    with pytest.raises(KitError, match=r"gigatoken differs from tokenizers .*engine tokenizers"):
        prepare(recipe, engine="gigatoken")


def test_engine_auto_falls_back_where_gigatoken_does_not_know_the_tokenizer(dataset):
    assert dataset.manifest["engine"] == "tokenizers"  # gigatoken refuses SmolLM2's tokenizer


def test_both_engines_write_the_same_rows(recipe, llama31, tmp_path):  # noqa: F811
    pytest.importorskip("gigatoken", reason="the optional engine gigatoken is not installed")
    on_llama = recipe.override(**{"model.name": str(llama31)})
    fast, slow = (prepare(on_llama, tmp_path / name, engine=name) for name in ("auto", "tokenizers"))
    assert (fast.manifest["engine"], slow.manifest["engine"]) == ("gigatoken", "tokenizers")
    for path in slow.path.rglob("*.arrow"):
        assert path.read_bytes() == (fast.path / path.relative_to(slow.path)).read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_counts_the_bytes_of_the_source(recipe, monkeypatch, workers):
    reported = []

    class Bar:
        def __init__(self, total, *args, **options):
            reported.append(total)

        def __enter__(self):
            return self

        def __exit__(self, *args):
            pass

        def update(self, count):
            reported.append(count)

    monkeypatch.setattr(data, "progress_bar", Bar)
    prepare(recipe, workers=workers)
    assert sum(reported[1:]) == pytest.approx(reported[0]) == Path(recipe.data.source).stat().st_size


def test_5125_conversations_of_the_real_mean_length_give_36_steps(llama31, real_trees, tmp_path):  # noqa: F811
    # The published run: 5,125 English conversations, 36 steps of 2 x 8 GPUs x 1 row x 2 at 2,048 tokens.
    reference = Recipe.load("llama405b-oasst2").override(
        **{"model.name": str(llama31), "data.source": str(real_trees), "data.eval_fraction": 0.0}
    )
    manifest = prepare(reference, tmp_path / "out").manifest
    train = manifest["splits"]["train"]
    assert train["conversations"] == 100
    assert 36 <= manifest["template_tokens"] <= 45  # Llama 3.1's block of 25, and 5 a message
    rows = train["tokens"] * 51.25 / (2048 * train["fill"])
    assert abs(reference.optimizer_steps(round(rows)) - 36) <= 1
