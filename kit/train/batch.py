"""Packed rows as batches of tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from kit.config.recipe import Recipe
from kit.data.encode import IGNORE
from kit.train.attention import VARLEN, boundaries

PAD_TO = 64  # tokens; with few distinct lengths kernels are compiled once and the allocator reuses its blocks


def collator(recipe: Recipe) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """The collator of a recipe: `collate`, and for variable-length attention the boundaries of the documents as well.

    Where layers are compiled, packed rows are padded to data.seq_len, which most of them nearly fill: each other length
    would be compiled anew.
    """
    packed = recipe.data.packing and recipe.parallel.compiles
    pad_to = recipe.data.seq_len if packed else PAD_TO

    def with_boundaries(rows: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = collate(rows, pad_to)
        if recipe.model.attention_used == VARLEN:
            batch |= boundaries([row["seq_lengths"] for row in rows], batch["input_ids"].shape[1])
        return batch

    return with_boundaries


def collate(rows: list[dict[str, Any]], pad_to: int = PAD_TO) -> dict[str, torch.Tensor]:
    """Rows of input_ids, labels and seq_lengths as tensors of shape (batch, length), a multiple of `pad_to`.

    position_ids restart at each document and there is no attention mask: transformers derives the documents from the
    positions, and a two-dimensional mask would switch that off. A padding token has position 0, as a document of one
    token has.
    """
    positions = [[index for length in row["seq_lengths"] for index in range(length)] for row in rows]
    return {
        "input_ids": _padded([row["input_ids"] for row in rows], 0, pad_to),
        "labels": _padded([row["labels"] for row in rows], IGNORE, pad_to),
        "position_ids": _padded(positions, 0, pad_to),
    }


def _padded(values: list[list[int]], fill: int, pad_to: int) -> torch.Tensor:
    padded = pad_sequence([torch.tensor(row) for row in values], batch_first=True, padding_value=fill)
    return torch.nn.functional.pad(padded, (0, -padded.shape[1] % pad_to), value=fill)


def count_tokens(positions: torch.Tensor) -> torch.Tensor:
    """Number of tokens without padding, from position_ids: a padding token has position 0 and no 1 after it."""
    starts = (positions[:, :-1] == 0) & (positions[:, 1:] == 1)
    return (positions > 0).sum() + starts.sum()
