"""Figures of a prepared dataset, and the steps that other settings would give."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kit import figures
from kit.config.recipe import Recipe
from kit.data.pack import pack
from kit.errors import InputError, KitError
from kit.show import Answer


def token_flow(manifest: Mapping[str, Any]) -> figures.Figure:
    """Where the tokens went: read, kept or dropped by reason, split, and counted in the loss or only as context."""
    ledger, splits = manifest["ledger"], manifest["splits"]
    flows = [("read", "kept", ledger["kept_tokens"])]
    flows += [("read", reason, count) for reason, count in ledger["dropped"].items()]
    for name, split in splits.items():
        flows.append(("kept", name, split["tokens"]))
        flows.append((name, "trained on" if name == "train" else "evaluated", split["loss_tokens"]))
        flows.append((name, "context", split["tokens"] - split["loss_tokens"]))
    return figures.sankey("Where the tokens went", "tokens", flows)


def length_histogram(manifest: Mapping[str, Any]) -> figures.Figure:
    """How many documents have how many tokens."""
    histogram = manifest["lengths"]
    return figures.histogram("Lengths of documents", "tokens", "documents", histogram["upto"], histogram["documents"])


def steps_with(
    lengths: "np.ndarray[Any, Any]", recipe: Recipe, seq_len: int, longest: int, epochs: float, batch: int
) -> Answer:
    """Optimizer steps for documents of these lengths, up to `longest` tokens each, in rows of `seq_len` tokens.

    `batch` is the number of rows per step. Raises KitError where no document is that short, and InputError where the
    batch does not divide among the ranks.
    """
    fitting = lengths[lengths <= min(seq_len, longest)]
    if not len(fitting):
        raise KitError(f"No document has {min(seq_len, longest)} tokens or fewer.")
    if batch % recipe.data_ranks:
        raise InputError(f"A batch of {batch} rows does not divide among {recipe.data_ranks} ranks.")
    rows = len(fitting)
    if recipe.data.packing:
        rows = len(pack(fitting, seq_len, recipe.schedule.seed)[1]) - 1
    schedule = {"epochs": epochs, "micro_batch": 1, "grad_accum": batch // recipe.data_ranks, "max_steps": 0}
    steps = recipe.override(**{f"schedule.{key}": value for key, value in schedule.items()}).optimizer_steps(rows)
    tokens, left_out = int(fitting.sum()), len(lengths) - len(fitting)
    fill = tokens / rows / seq_len
    text = f"{steps:,} optimizer steps: {rows:,} rows of {seq_len:,} tokens, {fill:.1%} full, {tokens:,} tokens"
    if 0 < recipe.schedule.max_steps < steps:
        text += f"; the recipe's schedule.max_steps ends the run after {recipe.schedule.max_steps:,}"
    if left_out:
        text += f"; {left_out:,} longer documents left out"
    return Answer({"optimizer_steps": steps, "rows": rows, "fill": fill, "tokens": tokens, "left_out": left_out}, text)
