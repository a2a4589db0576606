"""A prepared dataset as Megatron .bin/.idx or parquet, raw text as WebDataset tars: new folders, whole or absent."""

import io
import json
import shutil
import struct
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kit import files
from kit.data.conversations import Conversation
from kit.data.dataset import Dataset
from kit.data.sources import Source

ROWS = 1000  # read and written at once: 16 MB at 2,048 tokens a row
TYPE_CODES = {"int32": 4, "uint16": 8}  # DType of megatron-core 0.16.1, core/datasets/indexed_dataset.py


def to_megatron(dataset: Dataset, out: Path) -> Path:
    """OUT/<split>.bin and .idx, each packed document one sequence; Megatron's data prefix is OUT/<split>.

    The format holds tokens only: labels, and with them the loss mask, stay behind. Raises InputError if OUT exists.
    """
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(dataset.path / "tokenizer" / "tokenizer.json")).get_vocab_size()
    kind = np.dtype(np.uint16 if vocabulary < 65_500 else np.int32)  # Megatron's own bound
    with _folder(dataset, out) as folder:
        for split in dataset.manifest["splits"]:
            lengths = []
            with (folder / f"{split}.bin").open("wb") as stream:
                for table in dataset.rows(split).with_format("arrow").iter(ROWS):
                    stream.write(_flat(table["input_ids"]).astype(kind).tobytes())
                    lengths.append(_flat(table["seq_lengths"]))
            write_index(folder / f"{split}.idx", kind, np.concatenate(lengths))
    return out


def write_index(path: Path, kind: np.dtype[Any], lengths: np.ndarray[Any, Any]) -> None:
    """Megatron's .idx for sequences of these lengths (tokens), each a document of its own.

    Magic, version, type code, sequences, documents + 1, int32 lengths, byte pointers and document bounds (the same
    file as TYPE_CODES). Pointers are int64 from the start: int32 would end at 2 GiB.
    """
    sizes = lengths.astype(np.int64) * kind.itemsize
    header = struct.pack("<QBQQ", 1, TYPE_CODES[kind.name], len(lengths), len(lengths) + 1)
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    with path.open("wb") as stream:
        stream.write(b"MMIDIDX\x00\x00" + header)
        for values in (lengths.astype(np.int32), np.cumsum(sizes) - sizes, bounds):
            stream.write(values.tobytes())


def to_parquet(dataset: Dataset, out: Path) -> Path:
    """OUT/data/<split>-00000-of-00001.parquet with all columns, zstd: what load_dataset(OUT) and the hub take.

    Raises InputError if OUT exists.
    """
    from pyarrow import parquet

    with _folder(dataset, out) as folder:
        (folder / "data").mkdir()
        for split in dataset.manifest["splits"]:
            rows, path = dataset.rows(split), folder / "data" / f"{split}-00000-of-00001.parquet"
            with parquet.ParquetWriter(path, rows.features.arrow_schema, compression="zstd") as writer:
                for table in rows.with_format("arrow").iter(ROWS):
                    writer.write_table(table)
    return out


def to_webdataset(source: Source, out: Path, shard_bytes: int = 256 * 2**20, lang: str = "") -> dict[str, Any]:
    """OUT/<split>-000000.tar and on, one member a document: .txt for plain text, .json for a conversation.

    Shards hold at most `shard_bytes`, or one larger document. Rows of no split are train. Returns {"documents",
    "shards", "rejected": {reason: rows}}; raises InputError if OUT exists.
    """
    rejected: Counter[str] = Counter()
    splits: dict[str, _Shards] = {}
    with files.new_folder(out) as folder, ExitStack() as stack:
        for _, found in source.read(lang, lambda _, reason: rejected.update([reason])):
            if (split := found.split or "train") not in splits:
                splits[split] = stack.enter_context(closing(_Shards(folder / split, shard_bytes)))
            row = as_row(found)
            if "text" in row:
                splits[split].add("txt", row["text"].encode())
            else:
                splits[split].add("json", json.dumps(row, ensure_ascii=False).encode())
    counts = {"documents": sum(s.documents for s in splits.values()), "shards": sum(s.count for s in splits.values())}
    return counts | {"rejected": dict(rejected)}


def as_row(found: Conversation) -> dict[str, Any]:
    """A conversation as a JSON row that kit.data.sources reads back; its split goes into the file's name."""
    row: dict[str, Any] = {"id": found.id, "group": found.group, "lang": found.lang}
    first = found.messages[0]
    return row | ({"text": first["content"]} if first["role"] == "text" else {"messages": found.messages})


class _Shards:
    """Numbered tars of one split, the same bytes each time: members carry no date and no owner."""

    def __init__(self, prefix: Path, limit: int) -> None:
        self.prefix, self.limit = prefix, limit - tarfile.RECORDSIZE  # what the end of a tar may take
        self.count = self.documents = 0
        self.tar: tarfile.TarFile

    def add(self, extension: str, data: bytes) -> None:
        """Append a document, in a new shard where it would pass the limit."""
        size = 512 * (1 + -(-len(data) // 512))  # a header, then whole blocks
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
def _folder(dataset: Dataset, out: Path) -> Iterator[Path]:
    """A new folder with the dataset's manifest in it, which tells what was exported."""
    with files.new_folder(out) as folder:
        shutil.copy(dataset.path / "manifest.json", folder)
        yield folder


def _flat(column: Any) -> np.ndarray[Any, Any]:
    """The values of a column of lists, end to end."""
    return np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])
