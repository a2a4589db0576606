import bz2
import gzip
import json
import lzma
from collections import Counter

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from kit.data.conversations import Conversation
from kit.data.sources import ALL_ROWS, Part, open_source
from kit.errors import InputError, KitError

ROWS = [
    {"id": f"r{i}", "messages": [{"role": "user", "content": f"é{i}"}, {"role": "assistant", "content": "y" * i}]}
    for i in range(1, 41)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def zstd(data):
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def as_parquet(rows, **options):
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.Table.from_pylist(rows), sink, **options)
    return sink.getvalue().to_pybytes()


def as_arrow(rows):
    """What datasets keeps in its cache: an IPC stream."""
    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def as_arrow_file(rows):
    """An IPC file, as pandas and polars write Feather."""
    table, sink = pyarrow.Table.from_pylist(rows), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return sink.getvalue().to_pybytes()


CONTAINERS = {
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "members.jsonl.gz": gzip.compress(LINES[: len(LINES) // 2]) + gzip.compress(LINES[len(LINES) // 2 :]),
    "a.jsonl.zst": zstd(LINES),
    "lines.json": LINES,
    "array.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "mark.jsonl": b"\xef\xbb\xbf" + LINES,
    "dos.jsonl": LINES.replace(b"\n", b"\r\n\r\n"),
    "a.parquet": as_parquet(ROWS, row_group_size=7),
    "a.arrow": as_arrow(ROWS),
    "file.arrow": as_arrow_file(ROWS),
}


def put(folder, name, data):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def read(source, lang="", part=ALL_ROWS, source_format="auto"):
    rejected = []
    opened = open_source(str(source), source_format)
    pairs = list(opened.read(lang, lambda key, why: rejected.append((key, why)), part))
    return pairs, rejected


def conversations(source, **more):
    return [conversation for _, conversation in read(source, **more)[0]]


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_rows(tmp_path, name):
    pairs, rejected = read(put(tmp_path, name, CONTAINERS[name]))
    assert not rejected
    assert [c.id for _, c in pairs] == [row["id"] for row in ROWS]
    assert [list(c.messages) for _, c in pairs] == [row["messages"] for row in ROWS]
    assert [place for place, _ in pairs] == sorted(place for place, _ in pairs)


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_recognised_by_content(tmp_path, name):
    held = name.rpartition(".")[2]
    other = "a.jsonl" if held in ("gz", "zst", "parquet", "arrow") else "a.jsonl.gz"
    path = put(tmp_path, other, CONTAINERS[name])
    assert len(conversations(path)) == len(ROWS)
    kind = {"gz": "gzip", "zst": "zstd", "parquet": "parquet", "arrow": "arrow"}.get(held, "text")
    kind = "arrow file" if name == "file.arrow" else kind
    assert f"{other} is {kind} inside" in open_source(str(path)).reason


@pytest.mark.parametrize("name", ["array.json", "pretty.json", "a.json.gz", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.99])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, name, share):
    data = CONTAINERS[name]
    with pytest.raises(InputError, match=rf"{name} is (cut short|not what its name says)"):
        read(put(tmp_path, name, data[: int(len(data) * share)]))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_compressed_file_is_an_error_that_names_it(tmp_path, name):
    with pytest.raises(InputError, match=rf"{name} is cut short"):
        read(put(tmp_path, name, CONTAINERS[name][:-20]))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (LINES.decode().encode("utf-16"), "UTF-16"),
        (LINES.decode().encode("utf-16-le"), "UTF-16"),
        (LINES.decode().encode("utf-16-be"), "UTF-16"),
        (LINES.decode().encode("latin-1"), r"not UTF-8 \(byte 0xe9\): Latin-1"),
        (b"\0" * 5000, "not what its name says"),
        (b"%PDF-1.7\nno rows\n", "2 of its first 2 rows are not JSON objects, the first is line or row 1"),
        (b"[1]\n[2]\n", "not what its name says"),
        (b"[1, 2]", "not what its name says"),
        (b'[{"text": "x"}] and more', "text after the end"),
        (b"[" * 100_000, "damaged"),
        (b"", "holds no rows: d/a.jsonl empty"),
        (b"\n \n", "holds no rows"),
        (b'{"x": 1}\n', "rows have the keys x. Looked for oasst_trees: `prompt`"),
        (b"{}\n", r"keys \(none\)"),
    ],
)
def test_other_files_are_an_error_that_describes_them(tmp_path, data, words):
    put(tmp_path, "d/a.jsonl", data)
    with pytest.raises(InputError, match=words.replace("d/", "")):
        read(tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.jsonl.bz2", bz2.compress(LINES), "is bzip2 inside"),
        ("a.jsonl", lzma.compress(LINES), "is xz inside"),
        ("a.json", b"PK\x03\x04" + bytes(40), "is a zip archive inside"),
        ("a.csv", b"question,answer\nHi,Hello\n", "a.csv is not read: 2 of its first 2 rows are not JSON objects"),
    ],
)
def test_a_file_that_is_not_read_is_an_error_with_the_true_reason(tmp_path, name, data, words):
    with pytest.raises(InputError, match=words):
        read(put(tmp_path, name, data))


@pytest.mark.parametrize("write", [as_parquet, as_arrow, as_arrow_file])
def test_tables_with_images_are_read_without_their_contents(tmp_path, write):
    picture = {"bytes": b"x" * 1000, "path": None}
    rows = [row | {"images": [picture] * (i % 2), "image": None} for i, row in enumerate(ROWS)]
    rows[0]["image"] = picture
    pairs, rejected = read(put(tmp_path, "a.parquet", write(rows)))
    assert Counter(why for _, why in rejected) == {"image or other non-text content (images)": 20}
    assert [c.unused for _, c in pairs][:2] == [("image",), ()]


def test_a_document_may_begin_as_a_file_format_does(tmp_path):
    assert conversations(put(tmp_path, "a.txt", b"BZh is how bzip2 begins."))[0].messages[0]["content"]


def test_preference_pairs_are_an_error_that_says_so(tmp_path):
    row = {"prompt": "Hi", "chosen": "Hello.", "rejected": "No."}
    with pytest.raises(InputError, match="Preference pairs are not trained on"):
        read(put(tmp_path, "a.jsonl", json.dumps(row).encode()))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (LINES[:40], "not JSON"),
        (LINES[: LINES.index("é".encode()) + 1], "not JSON"),  # cut inside a character
        (b"\0" * 40, "NUL character"),
        (b"[1]", "not an object"),
        (b'{"a":' * 5000, "not JSON"),
        (b'{"messages": []}', "no messages"),
        (b'{"text": "x"}', "no messages"),
    ],
)
@pytest.mark.parametrize("at", [0, 3, 40])
def test_one_invalid_line_is_counted_with_its_number(tmp_path, line, why, at):
    lines = LINES.splitlines()
    pairs, rejected = read(put(tmp_path, "a.jsonl", b"\n".join([*lines[:at], line, *lines[at:]])))
    assert len(pairs) == len(ROWS) and rejected == [(f"a.jsonl:{at + 1}", why)]


@pytest.mark.parametrize("bad", [50, 51])
def test_more_than_one_invalid_line_in_twenty_is_an_error(tmp_path, bad):
    path = put(tmp_path, "a.jsonl", LINES * 20 + b"oops\n" * bad + LINES * 10)  # 800 + 50 + 150 is the first thousand
    if bad == 50:
        assert len(read(path)[1]) == 50
    else:
        with pytest.raises(
            InputError, match="51 of its first 1000 rows are not JSON objects, the first is line or row 801"
        ):
            read(path)


def test_a_lone_surrogate_is_counted_with_the_rows_id_escaped_or_not(tmp_path):
    rows = [
        dict(ROWS[0], id=i, messages=[ROWS[0]["messages"][0], {"role": "assistant", "content": "\ud800"}]) for i in "ab"
    ]
    lines = [json.dumps(rows[0]).encode(), json.dumps(rows[1], ensure_ascii=False).encode("utf-8", "surrogatepass")]
    assert read(put(tmp_path, "a.jsonl", b"\n".join([LINES, *lines])))[1] == [(i, "lone surrogate") for i in "ab"]


def test_a_folder_is_read_in_order_and_empty_files_are_counted(tmp_path):
    for name in ("d/b/x.jsonl", "d/a.jsonl", "d/b/deep/er/y.jsonl.gz"):
        put(tmp_path, name, gzip.compress(LINES) if name.endswith("gz") else LINES)
    for name in ("d/c.jsonl", "d/b/dataset_info.json", "d/.cache/a.jsonl", "d/README.md"):
        put(tmp_path, name, b"")
    opened = open_source(str(tmp_path / "d"))
    assert opened.names == ("a.jsonl", "b/deep/er/y.jsonl.gz", "b/x.jsonl", "c.jsonl")
    pairs, rejected = read(tmp_path / "d")
    assert len(pairs) == 3 * len(ROWS) and rejected == [("c.jsonl", "empty file")]


def test_a_folder_without_data_files_is_an_error(tmp_path):
    put(tmp_path, "d/a.csv", b"a,b")
    with pytest.raises(InputError, match=r"holds no .jsonl"):
        open_source(str(tmp_path / "d"))


def test_mixed_formats_are_an_error_that_names_both_files(tmp_path):
    put(tmp_path, "d/a.jsonl", LINES)
    put(tmp_path, "d/b.jsonl", b'{"text": "x"}\n')
    with pytest.raises(
        InputError, match=r"mixes formats: .*a.jsonl has rows of messages and .*b.jsonl has rows of text"
    ):
        open_source(str(tmp_path / "d"))


def test_a_given_format_is_required(tmp_path):
    row = {"text": "x", "prompt": "a", "completion": "b"}
    path = put(tmp_path, "a.jsonl", json.dumps(row).encode())
    assert open_source(str(path)).format == "prompt_completion"
    assert conversations(path, source_format="text")[0].messages == ({"role": "text", "content": "x"},)
    with pytest.raises(InputError, match="Looked for alpaca: `instruction` and `output`"):
        open_source(str(path), "alpaca")


def test_the_format_is_that_of_the_first_known_row(tmp_path):
    path = put(tmp_path, "a.jsonl", b'oops\n{"messages": null}\n' + LINES)
    assert open_source(str(path)).reason == "messages: rows have `messages`, or `conversations` of `role` and `content`"
    assert read(path)[1] == [("a.jsonl:1", "not JSON"), ("a.jsonl:2", "no messages")]


def test_text_files_are_one_document_each(tmp_path):
    put(tmp_path, "d/a.txt", b"\xef\xbb\xbfOne.\n\nStill one.")
    put(tmp_path, "d/b.txt.gz", gzip.compress(b"Two."))
    put(tmp_path, "d/c.txt", b" ")
    pairs, rejected = read(tmp_path / "d")
    assert [(c.id, c.messages[0]["content"]) for _, c in pairs] == [
        ("a.txt", "One.\n\nStill one."),
        ("b.txt.gz", "Two."),
    ]
    assert rejected == [("c.txt", "empty message")]
    put(tmp_path, "d/d.txt", "é".encode("latin-1"))
    with pytest.raises(InputError, match=r"d.txt is not UTF-8"):
        read(tmp_path / "d")


def test_pretraining_corpora_as_published(tmp_path):
    # cerebras/SlimPajama-627B: {train,validation,test}/chunkN/example_*.jsonl.zst.
    page = {"text": "A page.", "meta": {"redpajama_set_name": "RedPajamaC4"}}
    for name in ("train/chunk1/example_train_0", "train/chunk2/example_train_0", "validation/chunk1/example_holdout_0"):
        put(tmp_path, f"slim/{name}.jsonl.zst", zstd(json.dumps(page).encode()))
    found = conversations(tmp_path / "slim")
    assert [c.split for c in found] == ["train", "train", "eval"] and len({c.id for c in found}) == 3
    # bigcode/starcoderdata: <language>/train-00000-of-N.parquet.
    code = {"max_stars_repo_path": "a.py", "max_stars_repo_name": "o/r", "max_stars_count": 1, "id": "0"}
    put(tmp_path, "star/python/train-00000-of-00002.parquet", as_parquet([code | {"content": "x = 1\n"}]))
    made = conversations(tmp_path / "star")
    assert made == [Conversation("0", made[0].group, ({"role": "text", "content": "x = 1\n"},))]


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train-00000-of-00001.jsonl", "validation-00000-of-00001.jsonl"], ["train", "eval"]),
        (["dev/a.jsonl", "train/a.jsonl"], ["eval", "train"]),
        (["chat.jsonl", "chat_test.jsonl"], ["train", "eval"]),
        (["test.jsonl"], [""]),
        (["train-0.jsonl", "train-1.jsonl"], ["", ""]),
        (["contest.jsonl", "latest.jsonl"], ["", ""]),
    ],
)
def test_file_names_of_both_splits_decide_the_split(tmp_path, names, splits):
    for name in names:
        put(tmp_path, f"d/{name}", LINES)
    opened = open_source(str(tmp_path / "d"))
    assert list(opened.splits) == splits
    assert ("1 of 2 files for eval" in opened.reason) == any(splits)


def test_a_hub_id_is_read_from_the_cache_with_its_splits(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    for split, rows in (("train_sft", ROWS), ("test_sft", ROWS[:3])):
        folder = tmp_path / "someone___chats" / "default" / "0.0.0" / "0123abc"
        put(folder, f"chats-{split}.arrow", as_arrow(rows))
    sizes = {
        s: {"name": s, "num_bytes": 1, "num_examples": n, "dataset_name": "chats"}
        for s, n in (("train_sft", 40), ("test_sft", 3))
    }
    features = datasets.Features.from_arrow_schema(pyarrow.Table.from_pylist(ROWS).schema)
    datasets.DatasetInfo(
        features=features, builder_name="parquet", dataset_name="chats", config_name="default", splits=sizes
    ).write_to_directory(str(folder))
    found = conversations("someone/chats")
    assert Counter(c.split for c in found) == {"train": 40, "eval": 3}
    assert all(path.is_file() for path in open_source("someone/chats").files)


def test_missing_data_are_an_error_that_lists_the_places():
    with pytest.raises(InputError, match=r"neither a file nor a folder .* hub id .*cache.*Set data.source"):
        open_source("nobody/nothing")


def flat(message, tree, parent=None):
    yield {k: v for k, v in message.items() if k != "replies"} | {"parent_id": parent, "message_tree_id": tree}
    for reply in message.get("replies") or []:
        yield from flat(reply, tree, message["message_id"])


def columns(message):
    """The parquet files' encoding: every key in every row, counts as parallel lists."""
    emojis = message.get("emojis") or {}
    keys = ("message_id", "parent_id", "text", "role", "lang", "deleted", "review_result", "rank", "message_tree_id")
    lists = {"emojis": {"name": list(emojis), "count": list(emojis.values())} if emojis else None}
    return {key: message.get(key) for key in keys} | lists


def test_real_trees_give_the_same_conversations_in_every_form(tmp_path, real_trees):
    trees = [json.loads(line) for line in real_trees.read_text().splitlines()]
    messages = [m for t in trees for m in flat(t["prompt"], t["message_tree_id"])]
    put(tmp_path, "flat.messages.jsonl.gz", gzip.compress("\n".join(map(json.dumps, messages)).encode()))
    # Shards as the hub has them, in which a tree may go on in the next.
    for i, rows in enumerate((messages[::2], messages[1::2])):
        put(tmp_path, f"hub/train-0000{i}-of-00002.parquet", as_parquet([columns(m) for m in rows]))
    made, rejected = read(real_trees, "en")
    found = [c for _, c in made]
    assert not rejected
    assert found == conversations(tmp_path / "flat.messages.jsonl.gz", lang="en")
    assert sorted(found, key=lambda c: c.id) == sorted(conversations(tmp_path / "hub", lang="en"), key=lambda c: c.id)
    # The same data through an independent implementation: 55 conversations of one exchange, 45 of two.
    assert Counter(len(c.messages) for c in found) == {2: 55, 4: 45}
    assert all(c.messages[-1]["role"] == "assistant" and c.group == c.id for c in found)
    assert read(real_trees, "de")[1] == [(t["message_tree_id"], "other language") for t in trees]


def test_a_tree_that_ends_in_prompts_gives_one_conversation_that_ends_in_a_reply(tmp_path):
    # allenai/open-instruct PR 35 and 68, artidoro/qlora 25: partial paths came out as conversations of their own.
    ends = [{"message_id": f"q{i}", "role": "prompter", "text": "And?", "replies": []} for i in range(2)]
    reply = {"message_id": "a", "role": "assistant", "text": "Hello.", "replies": ends}
    root = {"message_id": "p", "role": "prompter", "text": "Hi", "replies": [reply]}
    path = put(tmp_path, "a.jsonl", json.dumps({"message_tree_id": "p", "prompt": root}).encode())
    (only,) = conversations(path)
    assert [m["content"] for m in only.messages] == ["Hi", "Hello."]


BYTES = st.binary(max_size=200) | st.sampled_from(sorted(CONTAINERS.values())).flatmap(
    lambda data: st.tuples(st.integers(0, len(data)), st.binary(max_size=4), st.integers(0, 4)).map(
        lambda t: data[: t[0]] + t[1] + data[t[0] + t[2] :]
    )
)


@given(BYTES, st.sampled_from([*sorted(CONTAINERS), "a.txt"]), st.sampled_from([bytes, gzip.compress, zstd]))
def test_any_bytes_under_any_name_are_read_or_an_error(tmp_path_factory, data, name, wrap):
    path = put(tmp_path_factory.mktemp("any"), name, wrap(data))
    try:
        read(path)
    except KitError as error:
        assert str(path) in str(error)


OBJECTS = st.sampled_from([LINES.splitlines()[0], b'{"messages": 1}', b'{"id": "x"}', b" "])
BAD = st.sampled_from([b"oops", b"[]", b"\0", b""])


@given(st.lists(st.tuples(st.lists(OBJECTS, max_size=9), BAD), min_size=1, max_size=3), st.integers(1, 5))
def test_parts_together_have_every_row_once(tmp_path_factory, contents, count):
    folder = tmp_path_factory.mktemp("parts")
    files = [[LINES.splitlines()[i], *lines, bad, LINES.splitlines()[i]] for i, (lines, bad) in enumerate(contents)]
    for i, lines in enumerate(files):
        put(folder, f"{i}.jsonl", b"\n".join(lines))
    whole, rejected = read(folder)
    assert len(whole) + len(rejected) == sum(bool(line.strip()) for lines in files for line in lines)
    shares = [read(folder, part=Part(i, count)) for i in range(count)]
    assert sorted(p for pairs, _ in shares for p, _ in pairs) == [place for place, _ in whole]
    assert sorted(r for _, told in shares for r in told) == sorted(rejected)


@pytest.mark.parametrize("count", [3, 7])
def test_parts_of_joined_messages_are_complete_trees(tmp_path, real_trees, count):
    trees = [json.loads(line) for line in real_trees.read_text().splitlines()]
    rows = [m for t in trees for m in flat(t["prompt"], t["message_tree_id"])]
    rows.append(dict(rows[0], message_id="orphan", parent_id="nobody"))
    path = put(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    whole, rejected = read(path)
    shares = [read(path, part=Part(i, count)) for i in range(count)]
    assert sorted((p for pairs, _ in shares for p in pairs), key=lambda pair: pair[0]) == whole
    assert [r for _, told in shares for r in told] == rejected == [("orphan", "parent is missing")]
