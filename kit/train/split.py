"""Full fine-tunes whose layers are split over ranks, by transformers' DistributedConfig (parallel.tensor and expert).

transformers shards such a model as it reads it, and reduces its gradients. It saves no optimizer of it and does not
resume, so both are done here, in the folders and by the names that FSDP2's checkpoints have.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.trainer_utils import SaveStrategy
from transformers.utils.logging import disable_progress_bar

from kit.checkpoints.sharded import Reader
from kit.config import models
from kit.config.recipe import Recipe
from kit.train import attention, patches

MODEL, OPTIMIZER, SCHEDULER = "pytorch_model_fsdp_0", "optimizer_0", "scheduler.pt"


def load_split(recipe: Recipe) -> Any:
    """The base model in fp32, of which each rank has read its part alone. The ranks have to be connected already."""
    parallel, on_gpus = recipe.parallel, torch.cuda.is_available()
    if not on_gpus:
        patches.count_cpu_processes()
    patches.sum_gradients_of_one_pass()
    attention.register()
    disable_progress_bar()
    layout = DistributedConfig(
        fsdp_size=recipe.data_ranks,
        tp_size=parallel.tensor,
        ep_size=parallel.expert,
        fsdp_mixed_precision=on_gpus,  # bf16 from fp32 weights, as accelerate's FSDP2 has them
    )
    return AutoModelForCausalLM.from_pretrained(
        models.source(recipe.model.name),
        local_files_only=True,
        dtype=torch.float32,
        attn_implementation=recipe.model.attention_used,
        distributed_config=layout,
    )


class SplitSaves:
    """Part of a Trainer of a split model: its checkpoints."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    args: Any

    def __init__(self, *, args: Any, **kwargs: Any) -> None:
        strategy, args.save_strategy = args.save_strategy, SaveStrategy.NO  # transformers accepts no other one here
        super().__init__(args=args, **kwargs)  # type: ignore[call-arg]
        args.save_strategy = strategy

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Nothing: a checkpoint has the weights of its shards alone, and no rank holds the model."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        _write(folder / MODEL, {"model": get_model_state_dict(self.model)})
        _write(folder / OPTIMIZER, {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)})
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        found = _read(Path(resume_from_checkpoint) / MODEL, {"model": get_model_state_dict(self.model)})
        set_model_state_dict(self.model, found["model"])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        wanted = {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}
        found = _read(Path(checkpoint) / OPTIMIZER, wanted)
        set_optimizer_state_dict(self.model, self.optimizer, found["optimizer"])
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))


def _write(folder: Path, state: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save(_contiguous(state), storage_writer=FileSystemWriter(folder))


def _read(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """What the folder has in place of the values of `state`, on the same ranks."""
    found = _contiguous(state)
    load(found, storage_reader=Reader(folder))
    placed: dict[str, Any] = tree_map(_as_placed, found, state)
    return placed


def _contiguous(state: dict[str, Any]) -> dict[str, Any]:
    """The state with a part of each tensor that is one block of rows or columns.

    A rank has every other block of what is joined from several, such as gate_up_proj, and DCP would describe these
    blocks as one: the file would hold the rows in another order.
    """
    found: dict[str, Any] = tree_map(_one_block, state)
    return found


def _one_block(value: Any) -> Any:
    return value.redistribute(placements=[*map(_plain, value.placements)]) if isinstance(value, DTensor) else value


def _plain(placement: Placement) -> Placement:
    """The placement on one block of the same dimension, for torch's _StridedShard; else itself."""
    strided = hasattr(placement, "split_factor")
    return Shard(placement.dim) if strided else placement  # type: ignore[attr-defined]


def _as_placed(value: Any, like: Any) -> Any:
    return value.redistribute(placements=like.placements) if isinstance(value, DTensor) else value
