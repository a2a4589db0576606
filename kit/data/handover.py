"""Hand over: a prepared dataset in the forms that other trainers read, with the tokens that the loss counts.

A split of the prepared dataset is "train" or "eval".
"""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from kit.data.dataset import Dataset
from kit.data.export import write_indexed

IGNORED = -100  # the label of a token that the loss does not count
PAIR_FILES = {"train": "train.json", "eval": "val.json"}
TOKEN_FILES = {"train": "train.parquet", "eval": "eval.parquet"}
LINE_FILES = {"train": "train.jsonl", "eval": "validation.jsonl"}
TEXT_FILES = 8  # of a split; LitGPT's workers read a file each


class Rows(Enum):
    """The forms of a folder with the rows."""

    PACKED = "packed"
    """A DatasetDict of packed rows, splits train and validation; attention_mask has each token's number of document."""
    PAIRS = "pairs"
    """train.json and val.json: a row of text for each reply, with all that precedes it as the instruction."""
    TOKENS = "tokens"
    """train.parquet and eval.parquet: a row of input_ids, labels and attention_mask for each document."""
    LINES = "lines"
    """train.jsonl and validation.jsonl: an object with the text of a document on each line."""
    TEXT = "text"
    """Folders train and eval with documents as .txt files."""
    INDEXED = "indexed"
    """Megatron's train.bin, train.idx, eval.bin and eval.idx."""


def write(dataset: Dataset, rows: Rows, out: Path) -> dict[str, int]:
    """Write the dataset into the new folder `out`; returns the rows of each split, as the trainer counts them."""
    out.mkdir()
    writers = {
        Rows.PACKED: _write_packed, Rows.PAIRS: _write_pairs, Rows.TOKENS: _write_tokens, Rows.LINES: _write_lines,
        Rows.TEXT: _write_text, Rows.INDEXED: _write_indexed,
    }  # fmt: skip
    return writers[rows](dataset, out)


def _write_packed(dataset: Dataset, out: Path) -> dict[str, int]:
    import datasets

    def numbered(row: dict[str, Any]) -> dict[str, Any]:
        lengths = row["seq_lengths"]
        return {"attention_mask": np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)}

    names = {"train": "train", "eval": "validation"}
    with _no_progress_bars(), tempfile.TemporaryDirectory(dir=out.parent) as cache:
        splits = {
            names[split]: dataset.rows(split).map(
                numbered, remove_columns="seq_lengths", cache_file_name=f"{cache}/{split}.arrow"
            )
            for split in dataset.manifest["splits"]
        }
        datasets.DatasetDict(splits).save_to_disk(str(out))
    return {split: len(splits[names[split]]) for split in dataset.manifest["splits"]}


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def documents(dataset: Dataset, split: str) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids and labels of each document, in the order of the packed rows."""
    for row in dataset.rows(split).with_format("numpy"):
        ends = np.cumsum(row["seq_lengths"])
        for start, end in zip(np.append(0, ends[:-1]), ends, strict=True):
            yield row["input_ids"][start:end].tolist(), row["labels"][start:end].tolist()


def _write_pairs(dataset: Dataset, out: Path) -> dict[str, int]:
    tokenizer, counts = _tokenizer(dataset), {}
    for split in dataset.manifest["splits"]:
        pairs = []
        for ids, labels in documents(dataset, split):
            for start, end in replies(labels):
                text = {"instruction": ids[:start], "output": ids[start:end]}
                pairs.append({key: tokenizer.decode(part, skip_special_tokens=False) for key, part in text.items()})
        (out / PAIR_FILES[split]).write_text(json.dumps(pairs, ensure_ascii=False), encoding="utf-8")
        counts[split] = len(pairs)
    return counts


def replies(labels: list[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each stretch of tokens that the loss counts."""
    counted = np.concatenate([[False], np.asarray(labels) != IGNORED, [False]])
    bounds = np.flatnonzero(np.diff(counted.astype(np.int8)))
    yield from zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)


def _write_tokens(dataset: Dataset, out: Path) -> dict[str, int]:
    import datasets

    for split in dataset.manifest["splits"]:
        rows = [
            {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)}
            for ids, labels in documents(dataset, split)
        ]
        with _no_progress_bars():
            datasets.Dataset.from_list(rows).to_parquet(str(out / TOKEN_FILES[split]))
    return {split: values["rows"] for split, values in dataset.manifest["splits"].items()}


def _write_lines(dataset: Dataset, out: Path) -> dict[str, int]:
    tokenizer = _tokenizer(dataset)
    for split in dataset.manifest["splits"]:
        texts = (tokenizer.decode(ids, skip_special_tokens=False) for ids, _ in documents(dataset, split))
        lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (out / LINE_FILES[split]).write_text(lines, encoding="utf-8")
    return {split: values["rows"] for split, values in dataset.manifest["splits"].items()}


def _write_text(dataset: Dataset, out: Path) -> dict[str, int]:
    tokenizer, counts = _tokenizer(dataset), {}
    for split in dataset.manifest["splits"]:
        texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids, _ in documents(dataset, split)]
        (out / split).mkdir()
        for index in range(min(TEXT_FILES, len(texts))):
            (out / split / f"{index:02}.txt").write_text("".join(texts[index::TEXT_FILES]), encoding="utf-8")
        counts[split] = dataset.manifest["splits"][split]["rows"]
    return counts


def _write_indexed(dataset: Dataset, out: Path) -> dict[str, int]:
    seq_len = int(dataset.manifest["settings"]["data"]["seq_len"])
    tokens = {split: int(lengths.sum()) for split, lengths in write_indexed(dataset, out).items()}
    return {split: max(1, (count - 1) // seq_len) for split, count in tokens.items()}  # a sample has its next token


def _tokenizer(dataset: Dataset) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(dataset.path / "tokenizer" / "tokenizer.json"))
