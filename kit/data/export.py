"""Export: prepared datasets as Megatron .bin/.idx or Parquet, and raw texts as WebDataset tars, in new folders."""

import io
import json
import shutil
import struct
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.data.conversations import Conversation
from kit.data.dataset import Dataset
from kit.data.sources import Source
from kit.show import Answer

BATCH_ROWS = 1000  # read and written at once: 16 MB at 2,048 tokens a row
TYPE_CODES = {"int32": 4, "uint16": 8}  # DType of megatron-core 0.16.1, core/datasets/indexed_dataset.py
TAR_BLOCK = 512  # bytes


def to_megatron(dataset: Dataset, out: Path) -> Answer:
    """OUT/<split>.bin and .idx, each packed document one sequence; Megatron's data prefix is OUT/<split>.

    The format has no labels, so the loss mask is lost. Raises InputError if OUT exists.
    """
    with _new_folder(dataset, out) as folder:
        lengths = write_indexed(dataset, folder)
    sequences, tokens = sum(map(len, lengths.values())), sum(int(each.sum()) for each in lengths.values())
    return _answer(out, sequences=sequences, tokens=tokens)


def write_indexed(dataset: Dataset, folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Write FOLDER/<split>.bin and .idx; returns the tokens of each document of each split."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(dataset.path / "tokenizer" / "tokenizer.json")).get_vocab_size()
    dtype = np.dtype(np.uint16 if vocabulary < 65_500 else np.int32)  # Megatron's own bound
    found = {}
    for split in dataset.manifest["splits"]:
        lengths = []
        with (folder / f"{split}.bin").open("wb") as stream:
            for table in dataset.rows(split).with_format("arrow").iter(BATCH_ROWS):
                stream.write(_flat(table["input_ids"]).astype(dtype).tobytes())
                lengths.append(_flat(table["seq_lengths"]))
        found[split] = np.concatenate(lengths)
        write_index(folder / f"{split}.idx", dtype, found[split])
    return found


def write_index(path: Path, dtype: np.dtype[Any], lengths: np.ndarray[Any, Any]) -> None:
    """Megatron's .idx for sequences of these lengths (tokens), each a document.

    Magic, version, type code, sequences, documents + 1, int32 lengths, byte pointers and document bounds (the same
    file as TYPE_CODES). Pointers are int64 from the start: int32 would end at 2 GiB.
    """
    sizes = lengths.astype(np.int64) * dtype.itemsize
    header = struct.pack("<QBQQ", 1, TYPE_CODES[dtype.name], len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    with path.open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00" + header)
        for values in (lengths.astype(np.int32), np.cumsum(sizes) - sizes, bounds):
            stream.write(values.tobytes())


def to_parquet(dataset: Dataset, out: Path) -> Answer:
    """OUT/data/<split>-00000-of-00001.parquet with all columns, zstd: the layout that load_dataset(OUT) reads.

    Raises InputError if OUT exists.
    """
    from pyarrow import parquet

    count = 0
    with _new_folder(dataset, out) as folder:
        (folder / "data").mkdir()
        for split in dataset.manifest["splits"]:
            rows, path = dataset.rows(split), folder / "data" / f"{split}-00000-of-00001.parquet"
            with parquet.ParquetWriter(path, rows.features.arrow_schema, compression="zstd") as writer:
                for table in rows.with_format("arrow").iter(BATCH_ROWS):
                    writer.write_table(table)
            count += len(rows)
    return _answer(out, rows=count)


def to_webdataset(source: Source, out: Path, shard_bytes: int = 256 * 2**20, lang: str = "") -> Answer:
    """OUT/<split>-000000.tar and on, one member per document: .txt for plain text, .json for a conversation.

    Shards have at most `shard_bytes`, or one larger document. Rows without a split go to train. The result counts
    documents and shards. Raises InputError if OUT exists.
    """
    rejected: Counter[str] = Counter()
    splits: dict[str, _Shards] = {}
    with files.new_folder(out) as folder, ExitStack() as stack:
        for _, conversation in source.read(lang, lambda row, reason: rejected.update([reason])):
            split = conversation.split or "train"
            if split not in splits:
                splits[split] = stack.enter_context(closing(_Shards(folder / split, shard_bytes)))
            row = as_row(conversation)
            if "text" in row:
                splits[split].add("txt", row["text"].encode())
            else:
                splits[split].add("json", json.dumps(row, ensure_ascii=False).encode())
    documents = sum(shards.documents for shards in splits.values())
    return _answer(out, rejected, documents=documents, shards=sum(shards.count for shards in splits.values()))


def _answer(folder: Path, rejected: Mapping[str, int] | None = None, **counts: int) -> Answer:
    """{"folder", each count, "rejected": {reason: rows}}."""
    lines = [f"{folder}: " + ", ".join(f"{count:,} {name}" for name, count in counts.items())]
    if rejected:
        lines.append("rejected rows: " + ", ".join(f"{reason} ({rows:,})" for reason, rows in rejected.items()))
    return Answer({"folder": str(folder), **counts, "rejected": dict(rejected or {})}, *lines)


def as_row(conversation: Conversation) -> dict[str, Any]:
    """A conversation as a JSON row that kit.data.sources reads; the split goes into the file's name."""
    row: dict[str, Any] = {"id": conversation.id, "group": conversation.group, "lang": conversation.lang}
    first = conversation.messages[0]
    if first["role"] == "text":
        return row | {"text": first["content"]}
    tools = {"tools": conversation.tools} if conversation.tools else {}
    return row | tools | {"messages": conversation.messages}


class _Shards:
    """Numbered tars of one split, the same bytes each time: members have no date and no owner."""

    def __init__(self, prefix: Path, limit: int) -> None:
        self.prefix, self.limit = prefix, limit - tarfile.RECORDSIZE  # the end of a tar takes up to one record
        self.count = self.documents = 0
        self.tar: tarfile.TarFile

    def add(self, extension: str, data: bytes) -> None:
        """Append a document, in a new shard where it would pass the limit."""
        size = TAR_BLOCK * (1 + -(-len(data) // TAR_BLOCK))  # a header block, then the data in complete blocks
        if not self.count or (self.tar.offset and self.tar.offset + size > self.limit):
            self.close()
            self.tar = tarfile.open(f"{self.prefix}-{self.count:06d}.tar", "w")  # noqa: SIM115 - open until it is full
            self.count += 1
        member = tarfile.TarInfo(f"{self.documents:09d}.{extension}")
        member.size = len(data)
        self.tar.addfile(member, io.BytesIO(data))
        self.documents += 1

    def close(self) -> None:
        """End the last shard."""
        if self.count:
            self.tar.close()


@contextmanager
def _new_folder(dataset: Dataset, out: Path) -> Iterator[Path]:
    """A new folder with the dataset's manifest, which says what was exported."""
    with files.new_folder(out) as folder:
        shutil.copy(dataset.path / "manifest.json", folder)
        yield folder


def _flat(column: Any) -> np.ndarray[Any, Any]:
    """The values of a column of lists, end to end."""
    return np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])
