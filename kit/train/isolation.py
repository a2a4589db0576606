"""The check before training that documents in one packed row do not attend to each other."""

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kit.config import models
from kit.config.recipe import Recipe
from kit.errors import KitError
from kit.train import attention, device
from kit.train.batch import collator
from kit.train.compile import compile_layers

# Largest share of leak that is rounding: fp32, and 16 bits, whose unit roundoff is 2^-8.
FP32_ROUNDING, HALF_ROUNDING = 1e-4, 0.05
DOCUMENT = 48  # tokens of each document of the check
WINDOW = 16  # tokens; windows are made as short, so that they lie inside of a document


def check_isolation(recipe: Recipe) -> float:
    """How much of one packed document leaks into the next: 0 is nothing, 1 is what plain causal attention lets through.

    Measured on a batch of rows and one layer of each kind of the model, with random weights and the recipe's attention,
    compiled as well where the recipe compiles: the code decides this, not the weights. Raises KitError where it is more
    than rounding.
    """
    on_gpu, name = torch.cuda.is_available(), recipe.model.attention_used
    dtype = getattr(torch, recipe.model.dtype) if on_gpu else torch.float32
    attention.register()
    config, rows = _small_config(recipe), _three_rows(recipe)
    with device.kept_random_state(), torch.device(device.kind()) as here, torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=name).eval()
        batch = {key: value.to(here) if torch.is_tensor(value) else value for key, value in rows.items()}
        leaks = [_leak(model, batch)]
        if recipe.parallel.compiles:
            compile_layers(model)
            leaks.append(_leak(model, batch))
    leak = max(leaks, key=lambda one: (math.isnan(one), one))
    if not leak < (FP32_ROUNDING if dtype == torch.float32 else HALF_ROUNDING):  # NaN is an error as well
        raise KitError(
            f"With model.attention {name}, packed documents of {recipe.model.name} see each other: "
            f"{leak:.0%} of what causal attention lets through. Set model.attention to sdpa, or data.packing to false."
        )
    return leak


def _leak(model: Any, batch: dict[str, Any]) -> float:
    packed, causal, alone = model(**batch, use_cache=False).logits.float()
    second = slice(DOCUMENT, 2 * DOCUMENT)
    difference = (packed[second] - alone[:DOCUMENT]).abs().max()
    return float(difference / (causal[second] - alone[:DOCUMENT]).abs().max())


def _small_config(recipe: Recipe) -> Any:
    """The model's config with one layer of each kind and a small vocabulary."""
    config = AutoConfig.from_pretrained(models.source(recipe.model.name)).get_text_config()
    kinds = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    config.update(
        {"num_hidden_layers": len(kinds) or 1, "vocab_size": 256, "intermediate_size": 256, "pad_token_id": None}
    )
    if kinds:
        config.update({"layer_types": kinds})
    if getattr(config, "sliding_window", None):
        config.update({"sliding_window": WINDOW})
    return config


def _three_rows(recipe: Recipe) -> dict[str, Any]:
    """Two documents packed, the same two as one document, and the second one alone."""
    first, second = torch.randint(256, (2, DOCUMENT), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [
        (first + second, [DOCUMENT, DOCUMENT]),
        (first + second, [2 * DOCUMENT]),
        (second, [DOCUMENT]),
    ]
    wide = recipe.override(**{"data.seq_len": 2 * DOCUMENT})
    batch = collator(wide)([{"input_ids": ids, "labels": ids, "seq_lengths": lengths} for ids, lengths in rows])
    del batch["labels"]
    return batch
