"""Axolotl: its YAML, with the kit's tokens and labels of each document, so that loss masks are exact."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.handover import TOKEN_FILES, Rows
from kit.trainers import others
from kit.trainers.base import Rendering

KNOWN: Mapping[str, str] = {
    "axolotl": "0.19.0", "transformers": "5.16.1", "trl": "1.9.0", "peft": "0.20.0", "accelerate": "1.13.0",
    "datasets": "4.8.4", "pydantic": "2.12.5", "torch": "2.13.0",
}  # fmt: skip
CONFIG = "axolotl.yaml"


def rows(recipe: Recipe) -> Rows:
    """A row for each document: axolotl packs them itself, with positions that begin again in each."""
    return Rows.TOKENS


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for what axolotl, or this renderer, cannot express."""
    accepted: dict[str, tuple[object, ...]] = {
        "parallel.strategy": ("ddp", "fsdp2"),
        "parallel.sharding": ("full", "grad_op"),
        "model.attention": tuple(others.ATTENTION),
        "model.base": ("bf16", "nf4"),
        "parallel.offload": ("none", "cpu"),
    }
    if recipe.data.packing:
        accepted["model.attention"] = ("auto", "sdpa", "flash_attention_2")
    others.require("axolotl", recipe, accepted)


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """axolotl.yaml, and torchrun of axolotl's training with it. Raises InputError without the model."""
    values = _model(recipe, cluster) | _data(recipe, folder) | _training(recipe, cluster, folder)
    launcher = others.torchrun(recipe, "-m", "axolotl.cli.train", str(folder / CONFIG))
    return Rendering({CONFIG: others.as_yaml(values)}, launcher, notes=(*others.notes_of(recipe, cluster), *_notes()))


def _model(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    tuning, parallel = recipe.tuning, recipe.parallel
    values: dict[str, Any] = {
        "base_model": others.model_folder(recipe, cluster),
        "attn_implementation": others.ATTENTION[recipe.model.attention],
        "gradient_checkpointing": parallel.recomputes,
        "trust_remote_code": False,
    }
    if tuning.method != "full":
        values |= {
            "adapter": tuning.method,
            "lora_r": tuning.r,
            "lora_alpha": tuning.alpha,
            "lora_dropout": tuning.dropout,
            "lora_target_modules": list(tuning.target_modules),
            "load_in_4bit": tuning.method == "qlora",
        }
    if parallel.strategy == "fsdp2" and recipe.world_size > 1:
        values |= {
            "fsdp_version": 2,
            "fsdp_config": {
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "state_dict_type": "SHARDED_STATE_DICT",
                "offload_params": parallel.offloads,
                "reshard_after_forward": parallel.sharding == "full",
            },
        }
    return values


def _data(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Rows that have tokens already; an empty type says so."""
    files = {split: str(folder / "data" / name) for split, name in TOKEN_FILES.items()}
    return {
        "datasets": [{"path": files["train"], "ds_type": "parquet", "type": ""}],
        "test_datasets": [{"path": files["eval"], "ds_type": "parquet", "type": "", "split": "train"}],
        "dataset_prepared_path": str(folder / "prepared"),
        "sequence_len": recipe.data.seq_len,
        "sample_packing": recipe.data.packing,
        "eval_sample_packing": recipe.data.packing,
        "pad_to_sequence_len": recipe.data.packing,
    }


def _training(recipe: Recipe, cluster: Cluster, folder: Path) -> dict[str, Any]:
    schedule, on_gpus = recipe.schedule, cluster.nodes.gpus > 0
    return {
        "output_dir": str(folder / "checkpoints"),
        "auto_resume_from_checkpoints": True,
        "max_steps": schedule.max_steps,
        "micro_batch_size": schedule.micro_batch,
        "gradient_accumulation_steps": schedule.grad_accum,
        "eval_batch_size": schedule.eval_batch,
        "learning_rate": schedule.lr,
        "lr_scheduler": schedule.scheduler,
        "warmup_steps": math.ceil(schedule.warmup_ratio * schedule.max_steps),
        "weight_decay": schedule.weight_decay,
        "optimizer": schedule.optimizer,
        "eval_steps": schedule.eval_every or schedule.max_steps,
        "save_steps": schedule.save_every or schedule.max_steps,
        "save_total_limit": schedule.keep,
        "logging_steps": schedule.log_every,
        "seed": schedule.seed,
        "bf16": on_gpus and recipe.model.dtype == "bfloat16",
        "fp16": on_gpus and recipe.model.dtype == "float16",
        "tf32": False,
        "use_wandb": True,
        "wandb_project": recipe.name,
        "wandb_mode": "offline",
    }


def _notes() -> tuple[str, ...]:
    return ("axolotl packs documents in another order than the kit: its steps see other documents together.",)
