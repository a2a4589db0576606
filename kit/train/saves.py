"""Saves of a training run: whether a new checkpoint is good, and which complete checkpoint training resumes from."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, reduce

from kit import files
from kit.checkpoints.formats.base import ProblemKind
from kit.checkpoints.inspect import Inspection, complete, inspect
from kit.checkpoints.saved_by import SavedBy
from kit.config.recipe import Recipe
from kit.errors import InputError, KitError
from kit.show import count
from kit.slurm.folder import RunFolder
from kit.train import patches

READ_BACK_LIMIT = 8e9  # bytes; rank 0 reads about 1 GB/s while the other ranks wait


def check_finite(model: Any, step: int) -> None:
    """Raises KitError on every rank if a weight that is trained has NaN or infinity on any rank.

    No later step makes such a weight finite again.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    local = [_own_part(parameter) for parameter in trained]
    not_finite = torch.stack([~torch.isfinite(part.detach()).all() for part in local]).sum()
    # Offloaded weights are on the CPU, whose tensors NCCL does not sum.
    count = int(reduce(not_finite.to(PartialState().device), "sum").item())
    if count:
        raise KitError(
            f"The weights hold NaN or infinity at step {step} (in {count} tensors, over all ranks), so the run stops "
            "here and saves nothing; older checkpoints stay. Look where the loss rose first, and lower schedule.lr."
        )


def _own_part(parameter: Any) -> torch.Tensor:
    """What this rank holds of a weight: its part under FSDP2 and ZeRO-3, else all of it."""
    if hasattr(parameter, "to_local"):
        parameter = parameter.to_local()
    part: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return part


def record_ranks(path: Path, accelerator: Any, arguments: Any, tensor: int = 1) -> None:
    """Have a checkpoint say which ranks saved it, before they do. Only rank 0 calls it.

    accelerator: accelerate's; arguments: the Trainer's; tensor: ranks that train on the same rows.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)  # accelerate sets it only under FSDP
    ranks = accelerator.num_processes
    rows = ranks // tensor * arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    SavedBy(ranks, rows, reshards=plugin is not None and plugin.fsdp_version == 2).write(path)


@contextlib.contextmanager
def shards_saved_from_the_gpu(accelerator: Any) -> Iterator[None]:
    """Saves in the block read the shards of FSDP2 where they are. accelerator: accelerate's."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)  # accelerate sets it only under FSDP
    patches.save_shards_from_the_gpu(plugin, True)
    try:
        yield
    finally:
        patches.save_shards_from_the_gpu(plugin, False)


def finish_checkpoint(path: Path, model: Any, values: bool = False) -> None:
    """Complete a checkpoint that all ranks have written, and check its keys, sizes and ranks. Only rank 0 calls it.

    Adds adapter_config.json, which a sharded checkpoint lacks, and gives every file the mode of the umask. `values`
    also reads the tensors back, up to READ_BACK_LIMIT. trainer_state.json may be missing yet. Raises KitError for a
    checkpoint that training could not resume from: hours of training are lost if that is found out at the end.
    """
    adapter = getattr(model, "peft_config", None)
    if adapter:
        adapter["default"].save_pretrained(path)
    for file in path.rglob("*"):
        file.chmod(files.umask_mode(0o777 if file.is_dir() else 0o666))  # safetensors 0.8 writes 0600
    found = _inspect(path, values)
    # An adapter is untrained at its first save where the learning rate still warms up.
    accepted = (ProblemKind.UNTRAINED, ProblemKind.UNFINISHED_SAVE)
    problems = [problem.message for problem in found.problems if problem.kind not in accepted]
    expected = sum("lora_" in name for name, _ in model.named_parameters()) if adapter else 0
    if found.lora_tensors != expected:
        problems.append(f"it holds {found.lora_tensors} of {expected} adapter tensors")
    if problems:
        raise KitError(
            f"The checkpoint {path} is not usable, so the run stops here: {'; '.join(problems)}. "
            "A known cause: peft 0.21 with FSDP1 saves an empty adapter; use fsdp2 or peft 0.20."
        )


def _inspect(path: Path, values: bool) -> Inspection:
    world = PartialState().num_processes
    found = inspect(path, world=world)
    if values and found.kinds <= {ProblemKind.UNFINISHED_SAVE} and found.bytes < READ_BACK_LIMIT:
        return inspect(path, values=True, world=world)
    return found


def resume_point(run: RunFolder, say: Callable[[str], None]) -> str | None:
    """The newest complete checkpoint, chosen by rank 0 for all ranks; None: training starts at step 0.

    Incomplete checkpoints that are newer are renamed to incomplete-<step>. Raises KitError on every rank where a
    checkpoint is complete, but training cannot resume from it on the ranks of this run: it stays as it is.
    """
    chosen: list[str | KitError | None] = [None]
    if PartialState().is_main_process:
        try:
            chosen = [_newest_complete(run, say)]
        except KitError as error:
            chosen = [error]
    broadcast_object_list(chosen)
    if isinstance(chosen[0], KitError):
        raise chosen[0]
    return chosen[0]


def _newest_complete(run: RunFolder, say: Callable[[str], None]) -> str | None:
    checkpoints, recipe = run.checkpoints(), run.recipe
    for path in reversed(checkpoints):
        if reason := _why_not_on(path, recipe):
            raise KitError(reason)
        if complete(path, recipe.world_size):
            saved = SavedBy.read(path)
            other = saved and saved.ranks != recipe.world_size
            say(f"resuming from {path.name}" + (f", saved by {count(saved.ranks, 'rank')}" if saved and other else ""))
            return str(path)
        aside = path.with_name(path.name.replace("checkpoint", "incomplete"))
        say(f"{path.name} is not complete: renamed to {aside.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    if checkpoints:
        say("no checkpoint is complete: training starts at step 0")
    return None


def _why_not_on(path: Path, recipe: Recipe) -> str:
    """Why a complete checkpoint cannot be resumed from on the ranks of a recipe; empty where it can."""
    world, found = recipe.world_size, None
    with contextlib.suppress(InputError):  # it has no weights
        found = inspect(path, world=world)
    if found and ProblemKind.OTHER_RANKS in found.kinds:
        message = "".join(each.message for each in found.problems if each.kind is ProblemKind.OTHER_RANKS)
        return f"{message} Set parallel.nodes and parallel.gpus_per_node so, or start a new run."
    saved = SavedBy.read(path)
    if not found or not found.complete or not saved or saved.ranks == world:
        return ""
    saved_by, here = count(saved.ranks, "rank"), count(world, "rank")
    if recipe.parallel.strategy != "fsdp2":
        return (
            f"{path} was saved under fsdp2 by {saved_by}; on {here} training "
            "resumes from it only under fsdp2. Set parallel.strategy to fsdp2, or start a new run."
        )
    if saved.rows != recipe.batch:
        return (
            f"{path} was saved by {saved_by} with {saved.rows} rows in an optimizer step, and on "
            f"{here} this recipe has {recipe.batch}: training would go on with other rows. Set "
            f"schedule.micro_batch and schedule.grad_accum so that a step has {saved.rows} rows, or start a new run."
        )
    return ""
