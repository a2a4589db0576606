"""Packed rows as batches, and the proof that documents in one row do not see each other."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM

from kit.config import models as model
from kit.config.recipe import Recipe
from kit.data.encode import IGNORE
from kit.errors import KitError

PAD_TO = 64  # tokens; few distinct lengths, so that kernels are compiled once and the allocator reuses its blocks


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Rows to (batch, length) tensors. Positions restart at each document and there is no mask.

    So documents do not see each other: transformers derives the blocks from the positions, and a two-dimensional mask
    would switch that off. A padding token has position 0, a document of its own.
    """

    def padded(values: list[list[int]], fill: int) -> torch.Tensor:
        whole = pad_sequence([torch.tensor(v) for v in values], batch_first=True, padding_value=fill)
        return torch.nn.functional.pad(whole, (0, -whole.shape[1] % PAD_TO), value=fill)

    positions = [[i for length in row["seq_lengths"] for i in range(length)] for row in rows]
    return {
        "input_ids": padded([row["input_ids"] for row in rows], 0),
        "labels": padded([row["labels"] for row in rows], IGNORE),
        "position_ids": padded(positions, 0),
    }


def count_tokens(positions: torch.Tensor) -> torch.Tensor:
    """Tokens that are no padding: a padding token has position 0 and no position 1 after it."""
    starts = (positions[:, :-1] == 0) & (positions[:, 1:] == 1)
    return (positions > 0).sum() + starts.sum()


def check_isolation(recipe: Recipe) -> float:
    """How much of one packed document leaks into the next, as a share; raises KitError where it is more than rounding.

    Measured on one layer of each kind of the model, with random weights and the recipe's attention: whether documents
    are kept apart is a matter of code, not of weights. 1 is what plain causal attention over both lets through; 1e-4
    is allowed in fp32, 0.05 in 16 bits, whose unit roundoff is 2^-8.
    """
    config = AutoConfig.from_pretrained(model.source(recipe.model.name)).get_text_config()
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    small = {"num_hidden_layers": len(kinds) or 1, "vocab_size": 256, "intermediate_size": 256, "pad_token_id": None}
    config.update(small | ({"layer_types": kinds} if kinds else {}))
    on_gpu, n = torch.cuda.is_available(), 48  # tokens of a document
    dtype = getattr(torch, recipe.model.dtype) if on_gpu else torch.float32
    first, second = torch.randint(256, (2, n), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [(first + second, [n, n]), (first + second, [2 * n]), (second, [n])]
    batch = collate([{"input_ids": ids, "labels": ids, "seq_lengths": lengths} for ids, lengths in rows])
    with torch.random.fork_rng(), torch.device("cuda" if on_gpu else "cpu") as device, torch.no_grad():
        torch.manual_seed(0)
        probe = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=recipe.model.attention).eval()
        given = {name: batch[name].to(device) for name in ("input_ids", "position_ids")}
        packed, causal, alone = probe(**given, use_cache=False).logits.float()
    leak = (packed[n : 2 * n] - alone[:n]).abs().max() / (causal[n : 2 * n] - alone[:n]).abs().max()
    if not leak < (1e-4 if dtype == torch.float32 else 0.05):
        raise KitError(
            f"With model.attention {recipe.model.attention}, packed documents of {recipe.model.name} see each other: "
            f"{leak:.0%} of what causal attention lets through. Set model.attention to sdpa, or data.packing to false."
        )
    return float(leak)
