"""torchtitan: flags for full fine-tunes of the models that it has a configuration of; the loss counts every token."""

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

KNOWN: Mapping[str, str] = {"torchtitan": "0.3.0", "torch": "2.13.0"}
FLAGS = "torchtitan.args"
# Its module and configuration by model_type, hidden_size and num_hidden_layers of Hugging Face's config.json.
MODELS = {
    ("llama", 4096, 32): ("llama3", "llama3_8b"),
    ("llama", 8192, 80): ("llama3", "llama3_70b"),
    ("llama", 16384, 126): ("llama3", "llama3_405b"),
    ("qwen3", 1024, 28): ("qwen3", "qwen3_0_6b"),
    ("qwen3", 2048, 28): ("qwen3", "qwen3_1_7b"),
    ("qwen3", 5120, 40): ("qwen3", "qwen3_14b"),
    ("qwen3", 5120, 64): ("qwen3", "qwen3_32b"),
}
RECOMPUTED = {True: "activation-checkpoint:full", False: "activation-checkpoint:none"}  # a subcommand, after all flags


def rows(recipe: Recipe) -> Rows:
    """Text: a line for each document."""
    return Rows.LINES


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for what torchtitan, or this renderer, cannot express."""
    accepted: dict[str, tuple[object, ...]] = {
        "tuning.method": ("full",),
        "data.loss": ("all",),
        "schedule.optimizer": ("adamw_torch_fused", "adamw_torch"),
        "schedule.scheduler": ("cosine", "linear"),
        "parallel.strategy": ("fsdp2",),
        "parallel.offload": ("none", "cpu"),
        "model.attention": ("auto", "sdpa"),
        "model.dtype": ("bfloat16", "float32"),
    }
    others.require("torchtitan", recipe, accepted)
    configuration(recipe, cluster)


def configuration(recipe: Recipe, cluster: Cluster) -> tuple[str, str]:
    """torchtitan's module and configuration of the model. Raises InputError for a model that it has none of."""
    config = load_config(recipe.model.name, cluster.paths.hf_home)
    found = MODELS.get((config["model_type"], config["hidden_size"], config["num_hidden_layers"]))
    if found is None:
        known = ", ".join(name for _, name in MODELS.values())
        raise InputError(f"torchtitan has no configuration for {recipe.model.name}; it has {known}.")
    return found


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """torchrun of torchtitan with flags, which torchtitan.args repeats. Raises InputError without the model."""
    module, name = configuration(recipe, cluster)
    words = ["--module", module, "--config", name]
    for key, value in _values(recipe, cluster, folder).items():
        words += [f"--{key}", str(value)] if not isinstance(value, bool) else [f"--{key}" if value else no(key)]
    words.append(RECOMPUTED[recipe.parallel.recomputes])
    notes = (
        *others.notes_of(recipe, cluster),
        "torchtitan joins the documents end to end: attention passes their bounds.",
        "torchtitan keeps fp32 weights and computes in bf16; it writes DCP checkpoints to checkpoints/step-N.",
    )
    launcher = others.torchrun(recipe, "-m", "torchtitan.train", *words)
    return Rendering({FLAGS: "\n".join(words) + "\n"}, launcher, notes=notes)


def no(key: str) -> str:
    """The flag that sets a boolean to false."""
    section, _, name = key.rpartition(".")
    return f"--{section}.no-{name}" if section else f"--no-{name}"


def _values(recipe: Recipe, cluster: Cluster, folder: Path) -> dict[str, Any]:
    schedule, parallel = recipe.schedule, recipe.parallel
    hybrid = parallel.sharding == "hybrid"
    return {
        "hf-assets-path": others.model_folder(recipe, cluster),
        "dump-folder": folder,
        "training.local-batch-size": schedule.micro_batch,
        "training.global-batch-size": recipe.batch,
        "training.seq-len": recipe.data.seq_len,
        "training.steps": schedule.max_steps,
        "training.enable-cpu-offload": parallel.offloads,
        "parallelism.data-parallel-replicate-degree": parallel.nodes if hybrid else 1,
        "parallelism.fsdp-reshard-after-forward": "never" if parallel.sharding == "grad_op" else "always",
        "optimizer.param-groups.0.optimizer-kwargs.lr": schedule.lr,
        "optimizer.param-groups.0.optimizer-kwargs.weight_decay": schedule.weight_decay,
        "lr-scheduler.warmup-steps": math.ceil(schedule.warmup_ratio * schedule.max_steps),
        "lr-scheduler.decay-type": schedule.scheduler,
        "checkpoint.enable": True,
        "checkpoint.folder": "checkpoints",
        "checkpoint.interval": schedule.save_every or schedule.max_steps,
        "checkpoint.keep-latest-k": schedule.keep,
        "checkpoint.initial-load-in-hf": True,
        "checkpoint.last-save-in-hf": True,
        "metrics.log-freq": schedule.log_every,
        "metrics.enable-wandb": True,
        "dataloader.dataset": "c4_test",  # the name of its reader of lines with a text
        "dataloader.dataset-path": folder / "data",
        "debug.seed": schedule.seed,
    }
