"""LLaMA-Factory: its YAML, with the kit's packed rows, so that loss masks and the bounds of documents are exact."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.handover import Rows
from kit.trainers import others
from kit.trainers.base import Rendering

KNOWN: Mapping[str, str] = {
    "llamafactory": "0.9.5", "transformers": "5.6.0", "trl": "0.24.0", "peft": "0.18.1", "accelerate": "1.11.0",
    "datasets": "4.0.0", "torch": "2.13.0",
}  # fmt: skip
CONFIG = "llamafactory.yaml"
ATTENTION = {"sdpa": "sdpa", "eager": "disabled", "flash_attention_2": "fa2"}
SHARDING = {"full": "full_shard", "grad_op": "shard_grad_op", "hybrid": "hybrid_shard"}


def rows(recipe: Recipe) -> Rows:
    """Packed rows: neat_packing attends within the documents that the attention mask numbers."""
    return Rows.PACKED


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for what LLaMA-Factory, or this renderer, cannot express."""
    accepted: dict[str, tuple[object, ...]] = {
        "parallel.strategy": ("ddp", "fsdp1", "fsdp2"),
        "parallel.offload": ("none", "cpu"),
        "model.attention": tuple(others.ATTENTION),
        "model.base": ("bf16", "nf4"),
    }
    if recipe.tuning.method == "qlora":
        accepted["parallel.strategy"] = ("ddp",)
    others.require("llamafactory", recipe, accepted)
    if recipe.tuning.method == "qlora":
        others.require_gpus("llamafactory", cluster, "trains QLoRA")


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """llamafactory.yaml, and torchrun of LLaMA-Factory's launcher with it. Raises InputError without the model."""
    values = _model(recipe, cluster) | _data(recipe, folder) | _training(recipe, cluster, folder)
    launcher = others.torchrun(recipe, "-m", "llamafactory.launcher", str(folder / CONFIG))
    return Rendering({CONFIG: others.as_yaml(values)}, launcher, notes=others.notes_of(recipe, cluster))


def _model(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    tuning = recipe.tuning
    values: dict[str, Any] = {
        "model_name_or_path": others.model_folder(recipe, cluster),
        "trust_remote_code": False,
        "flash_attn": ATTENTION[others.ATTENTION[recipe.model.attention]],
        "disable_gradient_checkpointing": not recipe.parallel.recomputes,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if tuning.method == "full" else "lora",
    }
    if tuning.method != "full":
        values |= {
            "lora_rank": tuning.r,
            "lora_alpha": tuning.alpha,
            "lora_dropout": tuning.dropout,
            "lora_target": ",".join(tuning.target_modules),
        }
    if tuning.method == "qlora":
        values |= {"quantization_method": "bnb", "quantization_bit": 4, "quantization_type": "nf4"}
    return values


def _data(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The rows are in tokenized_path. LLaMA-Factory wants names of datasets all the same, and does not read them."""
    return {
        "tokenized_path": str(folder / "data"),
        "dataset": "prepared",
        "eval_dataset": "prepared",
        "cutoff_len": recipe.data.seq_len,
        "packing": recipe.data.packing,
        "neat_packing": recipe.data.packing,
    }


def _training(recipe: Recipe, cluster: Cluster, folder: Path) -> dict[str, Any]:
    schedule, on_gpus = recipe.schedule, cluster.nodes.gpus > 0
    return {
        "output_dir": str(folder / "checkpoints"),
        "max_steps": schedule.max_steps,
        "per_device_train_batch_size": schedule.micro_batch,
        "gradient_accumulation_steps": schedule.grad_accum,
        "per_device_eval_batch_size": schedule.eval_batch,
        "learning_rate": schedule.lr,
        "lr_scheduler_type": schedule.scheduler,
        "warmup_steps": math.ceil(schedule.warmup_ratio * schedule.max_steps),  # as transformers rounds the ratio
        "weight_decay": schedule.weight_decay,
        "optim": schedule.optimizer,
        "eval_strategy": "steps",
        "eval_steps": schedule.eval_every or schedule.max_steps,
        "save_steps": schedule.save_every or schedule.max_steps,
        "save_total_limit": schedule.keep,
        "logging_steps": schedule.log_every,
        "seed": schedule.seed,
        "bf16": on_gpus and recipe.model.dtype == "bfloat16",
        "fp16": on_gpus and recipe.model.dtype == "float16",
        "use_cpu": not on_gpus,
        "report_to": "wandb",
    } | _fsdp(recipe)


def _fsdp(recipe: Recipe) -> dict[str, Any]:
    """transformers' FSDP arguments; with a single rank there is nothing to shard."""
    parallel = recipe.parallel
    if not parallel.strategy.startswith("fsdp") or recipe.world_size == 1:
        return {}
    words = [
        SHARDING[parallel.sharding],
        "auto_wrap",
        *(["offload"] if parallel.offloads else []),
    ]
    version = 2 if parallel.strategy == "fsdp2" else 1
    config: dict[str, Any] = {"version": version, "state_dict_type": "SHARDED_STATE_DICT"}
    if version == 2:
        config["reshard_after_forward"] = parallel.sharding == "full"
    return {"fsdp": " ".join(words), "fsdp_config": config}
