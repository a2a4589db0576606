"""Saves of a training run: whether a new checkpoint is good, and which complete checkpoint training resumes from."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import broadcast_object_list, reduce

from kit import files
from kit.checkpoints.formats.base import ProblemKind
from kit.checkpoints.inspect import Inspection, complete, inspect
from kit.errors import KitError
from kit.slurm.folder import RunFolder

READ_BACK_LIMIT = 8e9  # bytes; rank 0 reads about 1 GB/s while the other ranks wait


def check_finite(model: Any, step: int) -> None:
    """Raises KitError on every rank if a weight that is trained has NaN or infinity on any rank.

    No later step makes such a weight finite again.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    local = [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in trained]
    not_finite = torch.stack([~torch.isfinite(part.detach()).all() for part in local]).sum()
    count = int(reduce(not_finite, "sum").item())
    if count:
        raise KitError(
            f"The weights hold NaN or infinity at step {step} (in {count} tensors, over all ranks), so the run stops "
            "here and saves nothing; older checkpoints stay. Look where the loss rose first, and lower schedule.lr."
        )


def finish_checkpoint(path: Path, model: Any, values: bool = False) -> None:
    """Complete a checkpoint that all ranks have written, and check its keys, sizes and ranks. For rank 0 alone.

    Adds adapter_config.json, which a sharded checkpoint lacks, and gives every file the mode of the umask. `values`
    also reads the tensors back, up to READ_BACK_LIMIT. Raises KitError for a checkpoint that training could not resume
    from: hours of training are lost if that is found out at the end.
    """
    adapter = getattr(model, "peft_config", None)
    if adapter:
        adapter["default"].save_pretrained(path)
    for file in path.rglob("*"):
        file.chmod(files.umask_mode(0o777 if file.is_dir() else 0o666))  # safetensors 0.8 writes 0600
    found = _inspect(path, values)
    # An adapter is untrained at its first save where the learning rate still warms up.
    problems = [problem.message for problem in found.problems if problem.kind is not ProblemKind.UNTRAINED]
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
    if values and not found.problems and found.bytes < READ_BACK_LIMIT:
        return inspect(path, values=True, world=world)
    return found


def resume_point(run: RunFolder, say: Callable[[str], None]) -> str | None:
    """The newest complete checkpoint, chosen by rank 0 for all ranks; None: training starts at step 0.

    Incomplete checkpoints that are newer are renamed to incomplete-<step>.
    """
    chosen: list[str | None] = [None]
    if PartialState().is_main_process:
        chosen = [_newest_complete(run, say)]
    broadcast_object_list(chosen)
    return chosen[0]


def _newest_complete(run: RunFolder, say: Callable[[str], None]) -> str | None:
    checkpoints = run.checkpoints()
    for path in reversed(checkpoints):
        if complete(path, run.recipe.world_size):
            say(f"resuming from {path.name}")
            return str(path)
        aside = path.with_name(path.name.replace("checkpoint", "incomplete"))
        say(f"{path.name} is not complete: renamed to {aside.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    if checkpoints:
        say("no checkpoint is complete: training starts at step 0")
    return None
