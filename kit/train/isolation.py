"""Packed rows as batches, and the check before training that documents in one row do not attend to each other."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from kit.config import models
from kit.config.recipe import Recipe
from kit.data.encode import IGNORE
from kit.errors import KitError

PAD_TO = 64  # tokens; with few distinct lengths kernels are compiled once and the allocator reuses its blocks
# Largest share of leak that is rounding: fp32, and 16 bits, whose unit roundoff is 2^-8.
FP32_ROUNDING, HALF_ROUNDING = 1e-4, 0.05
DOCUMENT = 48  # tokens of each document of the check


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows of input_ids, labels and seq_lengths as tensors of shape (batch, length).

    position_ids restart at each document and there is no attention mask: transformers derives the documents from the
    positions, and a two-dimensional mask would switch that off. A padding token has position 0, as a document of one
    token has.
    """
    positions = [[index for length in row["seq_lengths"] for index in range(length)] for row in rows]
    return {
        "input_ids": _padded([row["input_ids"] for row in rows], 0),
        "labels": _padded([row["labels"] for row in rows], IGNORE),
        "position_ids": _padded(positions, 0),
    }


def _padded(values: list[list[int]], fill: int) -> torch.Tensor:
    """Shape (batch, length); the length is a multiple of PAD_TO."""
    padded = pad_sequence([torch.tensor(row) for row in values], batch_first=True, padding_value=fill)
    return torch.nn.functional.pad(padded, (0, -padded.shape[1] % PAD_TO), value=fill)


def count_tokens(positions: torch.Tensor) -> torch.Tensor:
    """Number of tokens without padding, from position_ids: a padding token has position 0 and no 1 after it."""
    starts = (positions[:, :-1] == 0) & (positions[:, 1:] == 1)
    return (positions > 0).sum() + starts.sum()


def check_isolation(recipe: Recipe) -> float:
    """How much of one packed document leaks into the next: 0 is nothing, 1 is what plain causal attention lets through.

    Measured on one layer of each kind of the model, with random weights and the recipe's attention, since the code
    decides this and not the weights. Raises KitError where it is more than rounding.
    """
    on_gpu = torch.cuda.is_available()
    dtype = getattr(torch, recipe.model.dtype) if on_gpu else torch.float32
    config, rows = _small_config(recipe), _three_rows()
    with torch.random.fork_rng(), torch.device("cuda" if on_gpu else "cpu") as device, torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=recipe.model.attention).eval()
        batch = {name: tensor.to(device) for name, tensor in rows.items()}
        packed, causal, alone = model(**batch, use_cache=False).logits.float()
    second = slice(DOCUMENT, 2 * DOCUMENT)
    difference = (packed[second] - alone[:DOCUMENT]).abs().max()
    leak = float(difference / (causal[second] - alone[:DOCUMENT]).abs().max())
    if not leak < (FP32_ROUNDING if dtype == torch.float32 else HALF_ROUNDING):  # NaN is an error as well
        raise KitError(
            f"With model.attention {recipe.model.attention}, packed documents of {recipe.model.name} see each other: "
            f"{leak:.0%} of what causal attention lets through. Set model.attention to sdpa, or data.packing to false."
        )
    return leak


def _small_config(recipe: Recipe) -> Any:
    """The model's config with one layer of each kind and a small vocabulary."""
    config = AutoConfig.from_pretrained(models.source(recipe.model.name)).get_text_config()
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    config.update(
        {"num_hidden_layers": len(kinds) or 1, "vocab_size": 256, "intermediate_size": 256, "pad_token_id": None}
    )
    if kinds:
        config.update({"layer_types": kinds})
    return config


def _three_rows() -> dict[str, torch.Tensor]:
    """Two documents packed, the same two as one document, and the second one alone."""
    first, second = torch.randint(256, (2, DOCUMENT), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [
        (first + second, [DOCUMENT, DOCUMENT]),
        (first + second, [2 * DOCUMENT]),
        (second, [DOCUMENT]),
    ]
    batch = collate([{"input_ids": ids, "labels": ids, "seq_lengths": lengths} for ids, lengths in rows])
    del batch["labels"]
    return batch
