"""NeMo AutoModel: its YAML for full fine-tunes and LoRA.

It computes masks from pairs of prompt and reply, so each reply of a conversation becomes a row.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.handover import PAIR_FILES, Rows
from kit.trainers import others
from kit.trainers.base import Rendering

KNOWN: Mapping[str, str] = {"nemo-automodel": "0.7.0", "transformers": "5.18.0", "torch": "2.13.0"}
CONFIG = "automodel.yaml"
PAIRS = (
    "nemo_automodel.components.datasets.llm.column_mapped_text_instruction_dataset.ColumnMappedTextInstructionDataset"
)
COLLATE = "nemo_automodel.components.datasets.utils.default_collater"


def rows(recipe: Recipe) -> Rows:
    """Text: a row for each reply."""
    return Rows.PAIRS


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for what AutoModel, or this renderer, cannot express."""
    accepted: dict[str, tuple[object, ...]] = {
        "schedule.scheduler": ("cosine", "linear", "constant"),
        "schedule.optimizer": ("adamw_torch_fused", "adamw_torch"),
        "parallel.strategy": ("ddp", "fsdp2"),
        "parallel.sharding": ("full", "grad_op"),
        "parallel.offload": ("none",),
        "model.attention": tuple(others.ATTENTION),
        "model.base": ("bf16",),
        "data.packing": (False,),
    }
    others.require("automodel", recipe, accepted)


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """automodel.yaml, and torchrun of AutoModel's command with it. Raises InputError without the model."""
    values = _model(recipe, cluster) | _data(recipe, folder) | _training(recipe, cluster, folder)
    launcher = others.torchrun(recipe, "-m", "nemo_automodel.cli.app", str(folder / CONFIG))
    notes = (
        "automodel reads text: a reply is a row, a space separates it from what precedes it, and an end-of-text token "
        "ends it.",
        "schedule.micro_batch counts replies, as the rows are not packed.",
    )
    return Rendering({CONFIG: others.as_yaml(values)}, launcher, notes=(*others.notes_of(recipe, cluster), *notes))


def _model(recipe: Recipe, cluster: Cluster) -> dict[str, Any]:
    tuning, parallel = recipe.tuning, recipe.parallel
    model = others.model_folder(recipe, cluster)
    values: dict[str, Any] = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        "seed": recipe.schedule.seed,
        "model": {
            "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
            "pretrained_model_name_or_path": model,
            "torch_dtype": recipe.model.dtype,
            "attn_implementation": others.ATTENTION[recipe.model.attention],
        },
        "distributed": {"strategy": parallel.strategy, "activation_checkpointing": parallel.recomputes},
        "dist_env": {"backend": "nccl" if cluster.nodes.gpus else "gloo"},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    }
    if parallel.strategy == "fsdp2":
        values["distributed"]["reshard_after_forward"] = parallel.sharding == "full"
    if tuning.method == "lora":
        values["peft"] = {
            "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
            "target_modules": [f"*.{name}" for name in tuning.target_modules],
            "dim": tuning.r,
            "alpha": tuning.alpha,
            "dropout": tuning.dropout,
        }
    return values


def _data(recipe: Recipe, folder: Path) -> dict[str, Any]:
    def dataset(split: str) -> dict[str, Any]:
        return {
            "_target_": PAIRS,
            "path_or_dataset_id": str(folder / "data" / PAIR_FILES[split]),
            "column_mapping": {"question": "instruction", "answer": "output"},
            "answer_only_loss_mask": recipe.data.loss == "assistant",
            "seq_length": recipe.data.seq_len,
            "truncation": True,
        }

    return {
        "dataset": dataset("train"),
        "dataloader": {"collate_fn": COLLATE, "shuffle": True},
        "validation_dataset": dataset("eval"),
        "validation_dataloader": {"collate_fn": COLLATE},
    }


def _training(recipe: Recipe, cluster: Cluster, folder: Path) -> dict[str, Any]:
    schedule = recipe.schedule
    return {
        "step_scheduler": {
            "global_batch_size": recipe.batch,
            "local_batch_size": schedule.micro_batch,
            "max_steps": schedule.max_steps,
            "num_epochs": 10**6,  # the steps end it
            "ckpt_every_steps": schedule.save_every or schedule.max_steps,
            "val_every_steps": schedule.eval_every or schedule.max_steps,
            "log_remote_every_steps": schedule.log_every,
        },
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": schedule.lr, "weight_decay": schedule.weight_decay},
        "lr_scheduler": {
            "lr_decay_style": schedule.scheduler,
            "lr_warmup_steps": math.ceil(schedule.warmup_ratio * schedule.max_steps),
            "min_lr": 0.0,
        },
        "checkpoint": {
            "enabled": True,
            "checkpoint_dir": str(folder / "checkpoints"),
            "model_save_format": "safetensors",
            "max_recent_checkpoints": schedule.keep,
        },
        "wandb": {"project": recipe.name, "mode": "offline", "dir": str(folder)},
    }
