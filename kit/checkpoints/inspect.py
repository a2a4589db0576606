"""Checkpoints: what one holds, and whether it is whole."""

import re
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.checkpoints.plan import Plan
from kit.checkpoints.plan import plan as plan
from kit.checkpoints.plan import plan_for as plan_for
from kit.checkpoints.weights import Weights, read, sharded, weights
from kit.errors import InputError
from kit.slurm.run import Run
from kit.watch.metrics import Metrics
from kit.watch.series import Series

STATE = "trainer_state.json"  # the Trainer writes it last: without it the save did not finish


@dataclass(frozen=True)
class Inspection:
    """What a checkpoint holds; problems are sentences."""

    format: str
    tensors: int
    bytes: int
    ranks: int
    lora_tensors: int
    dtypes: dict[str, int]
    problems: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"problems": list(self.problems)}


def inspect(path: Path, values: bool = False, world: int = 0) -> Inspection:
    """What is there and what is wrong with it; `values` reads every tensor too, `world` is how many ranks saved.

    Raises InputError for no weights, KitError for files that may not be read.
    """
    path = Path(path)
    held = weights(path)
    problems = [*_faults(path, held, world), *_hidden(held)]
    if values and not held.faults:
        bad, untrained = judge(read(held, held.tensors))
        problems += [NOT_FINITE.format(len(bad), ", ".join(bad[:3]))] if bad else []
        problems += [UNTRAINED] if untrained else []
    lora = sum("lora_" in name for name in held.tensors)
    dtypes = dict(Counter(entry.dtype for entry in held.tensors.values()))
    ranks = len({p.name.rpartition("_")[0] for p in held.files}) if held.format == "dcp" else 1
    return Inspection(held.format, len(held.tensors), held.bytes, ranks, lora, dtypes, tuple(problems))


NOT_FINITE = "{} tensors hold NaN or infinity: {}."
UNTRAINED = "Every lora_B is zero: the adapter is untrained and changes nothing."


def judge(named: Iterable[tuple[str, Any]]) -> tuple[list[str], bool]:
    """(names with values that are not finite, whether there are lora_B tensors and all are zero)."""
    import torch

    bad, outputs = [], []
    for name, tensor in named:
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            bad.append(name)
        if "lora_B" in name or "lora_embedding_B" in name:
            outputs.append(bool(tensor.any()))
    return bad, bool(outputs) and not any(outputs)


def _faults(path: Path, held: Weights, world: int = 0) -> Iterator[str]:
    """What makes a checkpoint unfit to load or resume from."""
    yield from held.faults
    if not held.tensors:
        yield f"{path} holds 0 tensors that can be read."
    elif held.format == "peft adapter" and not any("lora_" in name for name in held.tensors):
        yield f"{path} holds no LoRA tensors."
    if path.is_dir() and (re.fullmatch(r"checkpoint-\d+", path.name) or (path / STATE).exists()):
        yield from _step_faults(path)
        parts, states = sorted(path.glob("optimizer_*/")), len(list(path.glob("rng_state*.pth")))
        for part in parts:
            yield from sharded([part]).faults
        if not parts and not any(path.rglob("*optim*")):
            yield f"{path} has no optimizer state, without which training would go on as if it had just begun."
        if world and states != world:  # each rank writes its own, and none waits for the others
            yield f"{path} holds the random state of {states} of {world} ranks."
        for file in (p for p in sorted(path.iterdir()) if p.is_file()):
            if not file.stat().st_size:
                yield f"{file} is empty."
            elif file.suffix in (".pt", ".pth") and not zipfile.is_zipfile(file):
                yield f"{file} is cut off, or no file of torch.save."


def _step_faults(path: Path) -> Iterator[str]:
    if not (path / STATE).is_file():
        yield f"{path} has no {STATE}: the save did not finish."
        return
    try:
        step = dict(files.read_json(path / STATE)).get("global_step")
    except (InputError, ValueError) as error:
        yield f"{path / STATE} is damaged ({error})."
        return
    if path.name != f"checkpoint-{step}" and path.name.startswith("checkpoint-"):
        yield f"{path / STATE} is of step {step}: two checkpoints lie in one folder."


def _hidden(held: Weights) -> Iterator[str]:
    for path in held.files:
        mode = path.stat().st_mode
        if files.umask_mode() & 0o040 & ~mode:
            yield f"{path} has mode {mode & 0o777:04o}, which hides it from the group; chmod g+r it."


def complete(path: Path, world: int = 0) -> bool:
    """Whether training, on so many ranks, may resume from this checkpoint-N folder. Mode bits do not count.

    Raises KitError where its files may not be read.
    """
    try:
        return not any(_faults(path, weights(path), world)) and (path / STATE).is_file()
    except InputError:
        return False


def save_blocks(run: Run) -> dict[int, float]:
    """Seconds for which each save blocked training, by step, from the run's W&B log."""
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    blocks = metrics.series.get("train/save_blocked_s", Series.empty())
    return dict(zip(map(int, blocks.steps), blocks.values, strict=True))


def plan_for_run(run: Run) -> Plan:
    """The plan for a run's recipe and cluster, by the median of what its saves have blocked training for."""
    return plan_for(run.recipe, run.cluster, statistics.median(save_blocks(run).values() or [0]))
