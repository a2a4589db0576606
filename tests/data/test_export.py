import hashlib
import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from kit.data.dataset import Dataset
from kit.data.export import to_megatron, to_parquet, to_webdataset, write_index
from kit.data.sources import open_source
from kit.errors import InputError
from tests.conftest import oracle

# Writes the same documents with megatron-core's own builder: argv = target folder, ids.npy, lengths.npy, dtype, out.
ORACLE = """
import sys
sys.path.insert(0, sys.argv[1])
import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, _IndexWriter
ids, lengths, kind, out = np.load(sys.argv[2]), np.load(sys.argv[3]), getattr(np, sys.argv[4]), sys.argv[5]
if len(ids):
    builder = IndexedDatasetBuilder(out + ".bin", kind)
    for document in np.split(ids, np.cumsum(lengths)[:-1]):
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(out + ".idx")
else:
    with _IndexWriter(out + ".idx", kind) as writer:
        writer.write(lengths.tolist(), None, list(range(len(lengths) + 1)))
print(DType.optimal_dtype(65_499).__name__, DType.optimal_dtype(65_500).__name__)
"""


@pytest.fixture
def megatron(tmp_path_factory):
    """megatron-core's writer as a function (ids, lengths, dtype) -> .bin and .idx."""
    target = oracle("megatron-core-0.16.1")

    def write(ids, lengths, kind):
        folder = tmp_path_factory.mktemp("oracle")
        np.save(folder / "ids.npy", ids)
        np.save(folder / "lengths.npy", lengths)
        arguments = [target, folder / "ids.npy", folder / "lengths.npy", kind, folder / "o"]
        done = subprocess.run([sys.executable, "-c", ORACLE, *map(str, arguments)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["uint16", "int32"]
        return folder / "o.bin", folder / "o.idx"

    return write


def dataset_of(path, smollm2, documents, rows_of=2, extra_tokens=0):
    """A prepared folder of these documents, `rows_of` packed into a row."""
    import datasets
    from tokenizers import Tokenizer

    rows = [documents[i : i + rows_of] for i in range(0, len(documents), rows_of)]
    ids = [[t for d in row for t in d] for row in rows]
    kind = datasets.Sequence(datasets.Value("int32"))
    table = datasets.Dataset.from_dict(
        {"input_ids": ids, "labels": ids, "seq_lengths": [[len(d) for d in row] for row in rows]},
        features=datasets.Features({"input_ids": kind, "labels": kind, "seq_lengths": kind}),
    )
    for split in ("train", "eval"):
        table.save_to_disk(str(path / split))
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    tokenizer.add_tokens([f"<extra {i}>" for i in range(extra_tokens)])
    (path / "tokenizer").mkdir()
    tokenizer.save(str(path / "tokenizer" / "tokenizer.json"))
    (path / "manifest.json").write_text(json.dumps({"splits": {"train": {}, "eval": {}}, "digest": "d"}))
    return Dataset(path)


def documents(count, vocabulary, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, n).tolist() for n in rng.integers(1, 50, count)]


@pytest.mark.slow
@pytest.mark.parametrize("extra, kind, top", [(0, "uint16", 49_152), (20_000, "int32", 69_152)])
def test_megatron_files_equal_those_of_megatrons_own_writer(tmp_path, smollm2, megatron, extra, kind, top):
    made = [*documents(2501, top), [top - 1]]  # more rows than are read at once
    to_megatron(dataset_of(tmp_path / "prepared", smollm2, made, extra_tokens=extra), tmp_path / "out")
    lengths = np.array([len(d) for d in made])
    for expected in megatron(np.array([t for d in made for t in d]), lengths, kind):
        for split in ("train", "eval"):
            assert (tmp_path / "out" / f"{split}{expected.suffix}").read_bytes() == expected.read_bytes()
    tokens = np.fromfile(tmp_path / "out" / "train.bin", kind)
    assert tokens[-1] == top - 1


@pytest.mark.slow
def test_pointers_beyond_2_gib_are_exact(tmp_path, megatron):
    # NVIDIA/Megatron-LM#1672: int32 pointers overflowed. No tokens are needed to see it: 8 x 2^28 x 4 bytes = 8 GiB.
    lengths = np.full(8, 2**28)
    write_index(tmp_path / "ours.idx", np.dtype(np.int32), lengths)
    assert (tmp_path / "ours.idx").read_bytes() == megatron(np.array([]), lengths, "int32")[1].read_bytes()
    pointers = np.fromfile(tmp_path / "ours.idx", "<i8", count=8, offset=34 + 4 * 8)
    assert pointers.tolist() == [i * 2**30 for i in range(8)]


def test_ids_of_a_128k_vocabulary_are_exact(tmp_path, smollm2):
    # princeton-nlp/LLM-Shearing#65: uint16 cut Llama 3's ids; 128,009 is its <|eot_id|>.
    dataset = dataset_of(tmp_path / "prepared", smollm2, [[128_000, 128_009]], extra_tokens=128_256 - 49_152)
    to_megatron(dataset, tmp_path / "out")
    assert np.fromfile(tmp_path / "out" / "train.bin", np.int32).tolist() == [128_000, 128_009]


def test_parquet_has_every_column_and_loads_by_split(tmp_path, smollm2):
    import datasets

    dataset = dataset_of(tmp_path / "prepared", smollm2, documents(3001, 49_152))
    to_parquet(dataset, tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"))
    assert set(loaded) == {"train", "eval"}
    assert loaded["train"].features == dataset.rows("train").features
    assert loaded["train"][:] == dataset.rows("train")[:]
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["digest"] == "d"


@pytest.mark.parametrize("export", [to_megatron, to_parquet])
def test_an_existing_folder_is_not_changed(tmp_path, smollm2, export):
    dataset = dataset_of(tmp_path / "prepared", smollm2, documents(3, 100))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(InputError, match="exists already"):
        export(dataset, tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def members(folder):
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            yield from ((m.name, tar.extractfile(m).read()) for m in tar)


@pytest.fixture
def corpus(tmp_path):
    """60 texts of up to 30 kB, one row without any."""
    rng = np.random.default_rng(0)
    texts = [f"text {i} é\n" * int(n) for i, n in enumerate(rng.integers(1, 3000, 60))]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in [*texts, ""]))
    return path, texts


def test_webdataset_shards_have_all_texts_in_order_and_limited_size(tmp_path, corpus):
    path, texts = corpus
    counts = to_webdataset(open_source(str(path)), tmp_path / "out", shard_bytes=100_000)
    shards = sorted((tmp_path / "out").glob("*.tar"))
    assert counts.as_dict() == {
        "folder": str(tmp_path / "out"),
        "documents": 60,
        "shards": len(shards),
        "rejected": {"empty message": 1},
    }
    assert [p.name for p in shards] == [f"train-{i:06d}.tar" for i in range(len(shards))]
    assert [(f"{i:09d}.txt", t.encode()) for i, t in enumerate(texts)] == list(members(tmp_path / "out"))
    assert all(p.stat().st_size <= 100_000 for p in shards)
    assert len(shards) <= 2 * sum(p.stat().st_size for p in shards) / 100_000


def test_a_document_larger_than_the_limit_is_alone_in_its_shard(tmp_path, corpus):
    path, texts = corpus
    assert to_webdataset(open_source(str(path)), tmp_path / "out", shard_bytes=1).as_dict()["shards"] == len(texts)
    assert [data.decode() for _, data in members(tmp_path / "out")] == texts


def test_webdataset_bytes_are_reproducible(tmp_path, corpus):
    path, _ = corpus
    for name in ("one", "two"):
        to_webdataset(open_source(str(path)), tmp_path / name, shard_bytes=200_000)
    digests = [
        [hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((tmp_path / n).iterdir())] for n in ("one", "two")
    ]
    assert digests[0] == digests[1]


def test_webdataset_members_are_conversations_and_shards_are_of_one_split(tmp_path, real_trees):
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}], "id": "a.b/c"}
    (tmp_path / "chat").mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / "chat" / name).write_text(json.dumps(chat) + "\n")
    assert to_webdataset(open_source(str(tmp_path / "chat")), tmp_path / "split").as_dict()["documents"] == 2
    assert {p.name for p in (tmp_path / "split").iterdir()} == {"train-000000.tar", "eval-000000.tar"}
    name, data = next(members(tmp_path / "split"))
    assert name == "000000000.json" and {k: json.loads(data)[k] for k in chat} == chat
    counts = to_webdataset(open_source(str(real_trees)), tmp_path / "trees")
    assert counts.as_dict()["documents"] == 100 == sum(1 for _ in members(tmp_path / "trees"))


def test_a_damaged_source_leaves_no_folder(tmp_path):
    rows = "".join(json.dumps({"text": f"{i}"}) + "\n" for i in range(2000))
    (tmp_path / "corpus.jsonl").write_bytes(rows.encode() + b'{"text": "\xff\xfe"}\n')
    with pytest.raises(InputError, match="UTF-8"):
        to_webdataset(open_source(str(tmp_path / "corpus.jsonl")), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.jsonl"]
