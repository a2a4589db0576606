"""Megatron-LM: flags of pretrain_gpt.py for training from random weights on our .bin and .idx; every token counts.

Megatron's own tools convert pretrained weights, on GPUs. They are not run here, and training would silently begin at
random weights in their place. So model.name has to be a config.json.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.handover import Rows
from kit.errors import InputError
from kit.forecast.shape import load_config
from kit.trainers import others
from kit.trainers.base import Rendering

KNOWN: Mapping[str, str] = {"megatron-core": "0.16.1", "torch": "2.13.0"}
FLAGS = "megatron.args"
FAMILIES = ("llama", "qwen2", "qwen3")  # dense decoders
# Keys of config.json whose other values its flags, as rendered here, do not describe.
DESCRIBED: Mapping[str, tuple[object, ...]] = {
    "attention_bias": (False, None), "mlp_bias": (False, None), "hidden_act": ("silu", None),
    "use_sliding_window": (False, None),
}  # fmt: skip
ROPES = ("default", "llama3")
ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
STYLES = {"cosine": "cosine", "linear": "linear", "constant_with_warmup": "constant"}


def rows(recipe: Recipe) -> Rows:
    """Megatron's .bin and .idx."""
    return Rows.INDEXED


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for what Megatron, or this renderer, cannot express."""
    accepted: dict[str, tuple[object, ...]] = {
        "tuning.method": ("full",),
        "data.loss": ("all",),
        "schedule.optimizer": ("adamw_torch_fused", "adamw_torch"),
        "schedule.scheduler": tuple(STYLES),
        "parallel.strategy": ("ddp", "zero1"),
        "parallel.offload": ("none",),
        "parallel.tensor": (recipe.parallel.tensor,),
        "model.dtype": ("bfloat16",),
        "model.attention": ("auto",),
    }
    others.require("megatron", recipe, accepted, pretrained=False)
    others.require_gpus("megatron", cluster, "trains")
    if not recipe.model.name.endswith(".json"):
        raise InputError(
            "megatron trains from random weights here, as pretrained ones have to be converted by its own tools first: "
            "set model.name to the model's config.json, or take another trainer."
        )
    config, tensor = _config(recipe, cluster), recipe.parallel.tensor
    for key in ("num_attention_heads", "num_key_value_heads"):
        if (config.get(key) or tensor) % tensor:
            raise InputError(
                f"megatron gives each rank a number of heads: {key} of {recipe.model.name} is {config[key]}, which "
                f"parallel.tensor {tensor} does not divide."
            )
    if tensor > 1 and cluster.environment.get(ONE_QUEUE) != "1":
        raise InputError(
            f"megatron splits layers only where {ONE_QUEUE} is 1 before Blackwell: set it in the table environment of "
            f"the profile {cluster.name}."
        )


def _config(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    config = load_config(recipe.model.name, cluster.paths.hf_home)
    if config["model_type"] not in FAMILIES:
        raise InputError(f"megatron is rendered for {', '.join(FAMILIES)}, not for {config['model_type']}.")
    for key, values in DESCRIBED.items():
        if config.get(key) not in values:
            raise InputError(f"megatron is not rendered for a model with {key} = {json.dumps(config[key])}.")
    if _rope(config)["rope_type"] not in ROPES:
        raise InputError(f"megatron is not rendered for rotary embeddings of type {_rope(config)['rope_type']}.")
    return config


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding as transformers 5 writes it, from either spelling."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type") or found.get("type") or "default"
    return {"rope_theta": config.get("rope_theta", 10_000.0)} | found | {"rope_type": kind}


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """torchrun of pretrain_gpt with flags, which megatron.args repeats. Raises InputError without the model."""
    words: list[str] = []
    values = _model(_config(recipe, cluster)) | _training(recipe) | _places(recipe, cluster, folder)
    for key, value in values.items():
        if value is not False:
            words += [f"--{key}"] if value is True else [f"--{key}", str(value)]
    notes = (
        *others.notes_of(recipe, cluster),
        "pip installs megatron-core without pretrain_gpt.py: slurm.setup of the profile has to put a checkout of "
        "Megatron-LM, of the same version, on PYTHONPATH. It needs Transformer Engine (NVIDIA's PyTorch image has it).",
        "Megatron joins the documents end to end: attention passes their bounds, and it does not evaluate here.",
    )
    launcher = others.torchrun(recipe, "-m", "pretrain_gpt", *words)
    return Rendering({FLAGS: "\n".join(words) + "\n"}, launcher, notes=notes)


def _model(config: dict[str, Any]) -> dict[str, Any]:
    """The flags that describe a dense decoder, from Hugging Face's config.json."""
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    rope = _rope(config)
    scaled = rope["rope_type"] == "llama3"
    return {
        "num-layers": config["num_hidden_layers"],
        "hidden-size": config["hidden_size"],
        "ffn-hidden-size": config["intermediate_size"],
        "num-attention-heads": heads,
        "kv-channels": config.get("head_dim") or config["hidden_size"] // heads,
        "group-query-attention": groups not in (None, heads),
        "num-query-groups": groups or heads,
        "max-position-embeddings": config["max_position_embeddings"],
        "position-embedding-type": "rope",
        "rotary-base": int(rope["rope_theta"]),
        "use-rope-scaling": scaled,
        "rope-scaling-factor": rope["factor"] if scaled else False,
        "normalization": "RMSNorm",
        "norm-epsilon": config["rms_norm_eps"],
        "swiglu": True,
        "disable-bias-linear": True,
        "add-qkv-bias": config["model_type"] == "qwen2",
        "qk-layernorm": config["model_type"] == "qwen3",
        "untie-embeddings-and-output-weights": not config.get("tie_word_embeddings", False),
        "init-method-std": config.get("initializer_range", 0.02),
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
    }


def _training(recipe: Recipe) -> dict[str, Any]:
    schedule, parallel = recipe.schedule, recipe.parallel
    return {
        "seq-length": recipe.data.seq_len,
        "micro-batch-size": schedule.micro_batch,
        "global-batch-size": recipe.batch,
        "train-iters": schedule.max_steps,
        "lr": schedule.lr,
        "min-lr": schedule.lr if schedule.scheduler == "constant_with_warmup" else 0.0,
        "lr-decay-style": STYLES[schedule.scheduler],
        "lr-warmup-iters": math.ceil(schedule.warmup_ratio * schedule.max_steps),
        "weight-decay": schedule.weight_decay,
        "adam-beta2": 0.999,
        "clip-grad": 1.0,
        "bf16": True,
        "tensor-model-parallel-size": parallel.tensor,
        "sequence-parallel": parallel.tensor > 1,
        "use-distributed-optimizer": parallel.strategy == "zero1",
        "recompute-granularity": "full" if parallel.recomputes else False,
        "recompute-method": "uniform" if parallel.recomputes else False,
        "recompute-num-layers": 1 if parallel.recomputes else False,
        "seed": schedule.seed,
        "eval-iters": 0,
        "log-interval": schedule.log_every,
        "save-interval": schedule.save_every or schedule.max_steps,
    }


def _places(recipe: Recipe, cluster: Cluster, folder: Path) -> dict[str, Any]:
    return {
        "tokenizer-type": "HuggingFaceTokenizer",
        "tokenizer-model": others.model_folder(recipe, cluster),
        "data-path": folder / "data" / "train",
        "split": "1,0,0",
        "save": folder / "checkpoints",
        "ckpt-format": "torch_dist",
        "wandb-project": recipe.name,
        "wandb-exp-name": folder.name,
        "wandb-save-dir": folder,
    }
