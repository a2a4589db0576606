"""LitGPT: YAML of finetune_lora, finetune_full or pretrain, and the conversion of weights to LitGPT's format and back.

Its loss masks a prompt and counts a reply, so each reply of a conversation becomes a row of text with what precedes it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.handover import Rows
from kit.errors import InputError
from kit.trainers import others
from kit.trainers.base import PYTHON, Rendering

KNOWN: Mapping[str, str] = {"litgpt": "0.5.13", "lightning": "2.6.6", "jsonargparse": "4.41.0", "torch": "2.13.0"}
CONFIG = "litgpt.yaml"
MODULES = {"q_proj": "lora_query", "k_proj": "lora_key", "v_proj": "lora_value", "o_proj": "lora_projection",
    "lm_head": "lora_head"}  # fmt: skip
MLP = {"gate_proj", "up_proj", "down_proj"}  # lora_mlp is one switch for all of them
# What Fabric shards by, with several ranks: ModelParallelStrategy (FSDP2) for LoRA, FSDPStrategy (FSDP1) otherwise.
STRATEGIES = {"finetune_lora": "fsdp2", "finetune_full": "fsdp1", "pretrain": "fsdp1"}
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch")


def command(recipe: Recipe) -> str:
    """LitGPT's command: pretrain for a full fine-tune whose loss counts every token."""
    if recipe.tuning.method != "full":
        return "finetune_lora"
    return "pretrain" if recipe.data.loss == "all" else "finetune_full"


def rows(recipe: Recipe) -> Rows:
    """Text: a row for each reply, or files of documents for pretrain."""
    return Rows.TEXT if command(recipe) == "pretrain" else Rows.PAIRS


def check(recipe: Recipe, cluster: Cluster) -> None:
    """Raises InputError for what LitGPT cannot express."""
    accepted: dict[str, tuple[object, ...]] = {
        "schedule.scheduler": ("cosine",),
        "schedule.optimizer": OPTIMIZERS,
        "model.attention": ("auto", "sdpa"),
        "model.base": ("bf16", "nf4"),
        "parallel.offload": ("none",),
    }
    if recipe.world_size > 1:
        accepted |= {"parallel.strategy": (STRATEGIES[command(recipe)],), "model.base": ("bf16",)}
    if command(recipe) != "pretrain":
        accepted["data.packing"] = (False,)
    others.require("litgpt", recipe, accepted)
    if recipe.world_size > 1:
        others.require_gpus("litgpt", cluster, "runs several ranks")
    if recipe.tuning.method != "full":
        lora_switches(recipe)


def lora_switches(recipe: Recipe) -> dict[str, bool]:
    """LitGPT's switches for the target modules. Raises InputError for modules that it has no switch for."""
    wanted = set(recipe.tuning.target_modules)
    if unknown := wanted - set(MODULES) - MLP:
        raise InputError(f"litgpt has no LoRA for {', '.join(sorted(unknown))}: leave it out of tuning.target_modules.")
    if wanted & MLP and not wanted >= MLP:
        raise InputError(f"litgpt gives all of {', '.join(sorted(MLP))} LoRA, or none: change tuning.target_modules.")
    return {switch: name in wanted for name, switch in MODULES.items()} | {"lora_mlp": wanted >= MLP}


def render(recipe: Recipe, cluster: Cluster, folder: Path) -> Rendering:
    """litgpt.yaml, torchrun of LitGPT with it, and the two conversions. Raises InputError without the model."""
    kind, model = command(recipe), others.model_folder(recipe, cluster)
    name, base = Path(recipe.model.name).name, folder / "base"
    values: dict[str, Any] = {"checkpoint_dir": str(base)} if kind != "pretrain" else {
        "model_name": name, "initial_checkpoint_dir": str(base), "tokenizer_dir": str(base),
    }  # fmt: skip
    values |= _shared(recipe, cluster, folder)
    if kind == "finetune_lora":
        tuning = recipe.tuning
        values |= {"lora_r": tuning.r, "lora_alpha": tuning.alpha, "lora_dropout": tuning.dropout}
        values |= lora_switches(recipe)
        values["quantize"] = "bnb.nf4-dq" if tuning.method == "qlora" else None
    convert = (PYTHON, "-m", "litgpt", "convert_to_litgpt", str(base), "--model_name", name)
    return Rendering(
        {CONFIG: others.as_yaml(values)},
        others.torchrun(recipe, "-m", "litgpt", kind, "--config", str(folder / CONFIG)),
        before=(("cp", "--recursive", "--symbolic-link", "--force", f"{model}/.", str(base)), convert),
        after=((PYTHON, "-m", "litgpt", "convert_from_litgpt", str(folder / "out" / "final"), str(folder / "hf")),),
        notes=(*others.notes_of(recipe, cluster), *_notes(recipe, kind)),
    )


def _shared(recipe: Recipe, cluster: Cluster, folder: Path) -> dict[str, Any]:
    schedule, kind = recipe.schedule, command(recipe)
    precision = {"bfloat16": "bf16-true", "float16": "16-true", "float32": "32-true"}[recipe.model.dtype]
    pretrains = kind == "pretrain"
    warmup = max(1, round(schedule.warmup_ratio * schedule.max_steps))  # it divides by them
    tokens = schedule.max_steps * recipe.batch * recipe.data.seq_len
    # The steps end a fine-tune before the epochs do; LitGPT wants a number of them all the same.
    length = (
        {"max_tokens": tokens, "max_norm": 1.0} if pretrains else {"max_steps": schedule.max_steps, "epochs": 10**6}
    )
    return {
        "out_dir": str(folder / "out"),
        "precision": precision if cluster.nodes.gpus else "32-true",
        "devices": recipe.parallel.gpus_per_node,
        "num_nodes": recipe.parallel.nodes,
        "data": _text(folder, schedule.seed) if pretrains else _pairs(recipe, folder),
        "train": {
            "save_interval": schedule.save_every or schedule.max_steps,
            "log_interval": schedule.log_every * schedule.grad_accum,  # it counts forward passes
            "global_batch_size": recipe.batch,
            "micro_batch_size": schedule.micro_batch,
            "lr_warmup_steps": warmup,
            "max_seq_length": recipe.data.seq_len,
            **length,
            "min_lr": 0.0,
        },
        "eval": {
            "interval": schedule.eval_every or schedule.max_steps,
            "max_iters": 100,
            **({} if pretrains else {"max_new_tokens": 1}),
        },
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": schedule.lr, "weight_decay": schedule.weight_decay},
        },
        "logger_name": "wandb",
        "seed": schedule.seed,
    }  # fmt: skip


def _pairs(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """train.json and val.json; the texts have the chat template already, so that the prompt style adds nothing."""
    return {
        "class_path": "litgpt.data.JSON",
        "init_args": {
            "json_path": str(folder / "data"),
            "mask_prompt": recipe.data.loss == "assistant",
            "prompt_style": {"class_path": "litgpt.prompts.Default"},
            "num_workers": 1,
            "seed": recipe.schedule.seed,
        },
    }


def _text(folder: Path, seed: int) -> dict[str, Any]:
    return {
        "class_path": "litgpt.data.TextFiles",
        "init_args": {"train_data_path": str(folder / "data" / "train"), "val_data_path": str(folder / "data" / "eval"),
                      "num_workers": 1, "seed": seed},
    }  # fmt: skip


def _notes(recipe: Recipe, kind: str) -> tuple[str, ...]:
    last = "Hugging Face weights are written as hf/model.pth: rename it to pytorch_model.bin next to the config.json."
    keeps = "litgpt keeps every checkpoint: schedule.keep is not carried over."
    if kind == "pretrain":
        return (
            "litgpt joins the documents end to end: attention passes their bounds.",
            "litgpt pretrain needs the package litdata in its environment.",
            keeps,
            last,
        )
    return (
        "litgpt reads text: a reply is a row, with all that precedes it, and ends with the end-of-text token.",
        "schedule.micro_batch counts replies, as litgpt does not pack.",
        keeps,
        last,
    )
