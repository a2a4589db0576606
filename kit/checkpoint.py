"""Checkpoints: what one holds, whether it is whole, and how often to write one."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit import files
from kit.cluster import Cluster
from kit.errors import InputError
from kit.recipe import Recipe
from kit.weights import Weights, read, sharded, weights

STATE = "trainer_state.json"  # the Trainer writes it last: without it the save did not finish
MTBF_GPU_HOURS = 54 * 24 * 16_384 / 419  # Llama 3 (arXiv 2407.21783, 3.3.4): 419 unexpected interruptions in 54 days


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


def inspect(path: Path, values: bool = False) -> Inspection:
    """What is there and what is wrong with it; `values` reads every tensor too. Raises InputError for no weights."""
    path = Path(path)
    held = weights(path)
    problems = [*_faults(path, held), *_hidden(held)]
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


def _faults(path: Path, held: Weights) -> Iterator[str]:
    """What makes a checkpoint unfit to load or resume from."""
    yield from held.faults
    if not held.tensors:
        yield f"{path} holds 0 tensors that can be read."
    elif held.format == "peft adapter" and not any("lora_" in name for name in held.tensors):
        yield f"{path} holds no LoRA tensors."
    if path.is_dir() and (re.fullmatch(r"checkpoint-\d+", path.name) or (path / STATE).exists()):
        if not (path / STATE).is_file():
            yield f"{path} has no {STATE}: the save did not finish."
        for part in sorted(path.glob("optimizer_*/")):
            yield from sharded([part]).faults
        yield from (f"{p} is empty." for p in sorted(path.iterdir()) if p.is_file() and not p.stat().st_size)


def _hidden(held: Weights) -> Iterator[str]:
    for path in held.files:
        mode = path.stat().st_mode
        if files.umask_mode() & 0o040 & ~mode:
            yield f"{path} has mode {mode & 0o777:04o}, which hides it from the group; chmod g+r it."


def complete(path: Path) -> bool:
    """Whether training may resume from this checkpoint-N folder. Mode bits do not count: its owner can read it."""
    try:
        return (path / STATE).is_file() and not any(_faults(path, weights(path)))
    except InputError:
        return False


@dataclass(frozen=True)
class Plan:
    """How often to save (seconds of work between saves), the bound that decided, and the storage a run takes (GB)."""

    interval_s: float
    bound: str
    bounds_s: dict[str, float]
    write_s: float
    mtbf_h: float
    waste: float
    storage_gb: dict[str, float]
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        """The plan for a person."""
        bounds = ", ".join(f"{name} {seconds / 60:,.0f} min" for name, seconds in self.bounds_s.items())
        sizes = ", ".join(f"{name} {gb:,.1f}" for name, gb in self.storage_gb.items())
        return [
            f"save every {self.interval_s / 60:,.0f} min of work: the {self.bound} bound won ({bounds})",
            f"a save takes {self.write_s:.2g} s; one failure in {self.mtbf_h:,.0f} h; waste {self.waste:.2%}",
            f"storage over the run's life, GB: {sizes}",
            *self.problems,
        ]


def plan(
    checkpoint_gb: float, write_gb_s: float, gpus: int, time_limit_h: float = 0, max_loss_min: float = 0,
    keep: int = 3, merged_gb: float = 0, base_gb: float = 0, mtbf_gpu_h: float = MTBF_GPU_HOURS, margin_s: float = 300,
) -> Plan:  # fmt: skip
    """The shortest of three intervals: Young/Daly, what the time limit leaves, what one may lose; 0 is no limit.

    Young 1974 (CACM 17, 9) and Daly 2006 (FGCS 22, 3): sqrt(2 C M) with C = seconds of a write and M = mtbf_gpu_h /
    gpus. Waste is C/T + T/(2M), restarts left out. Rotation deletes after the new one is written, hence keep + 1; 20%
    of the volume stays free.
    """
    write, mtbf = checkpoint_gb / write_gb_s, mtbf_gpu_h * 3600 / gpus
    bounds = {"Young/Daly": math.sqrt(2 * write * mtbf)}
    if time_limit_h:
        bounds["time limit"] = time_limit_h * 3600 - write - margin_s
    if max_loss_min:
        bounds["largest loss"] = max_loss_min * 60
    bound = min(bounds, key=lambda name: bounds[name])
    interval = max(bounds[bound], write)
    problems = []
    if bounds[bound] < write:
        problems.append(
            f"A write takes {write:.0f} s, but the {bound} asks for one every {bounds[bound]:.0f} s: not feasible; "
            f"faster storage, fewer bytes or a longer {bound} would help. The interval shown is one write long."
        )
    parts = {"checkpoints": (keep + 1) * checkpoint_gb, "merged": merged_gb, "base": base_gb}
    storage = parts | {"free": sum(parts.values()) / 4, "total": sum(parts.values()) * 1.25}
    waste = write / interval + interval / (2 * mtbf)
    return Plan(interval, bound, bounds, write, mtbf / 3600, waste, storage, tuple(problems))


def plan_for(recipe: Recipe, cluster: Cluster) -> Plan:
    """The plan for a recipe on a cluster, from the forecast's sizes and the profile's storage and time limit."""
    from kit.timing import disk_rate, predict

    storage = predict(recipe, cluster).storage
    days, _, clock = cluster.slurm.time.rpartition("-")
    hours, minutes, *_ = [*map(int, clock.split(":")), 0] if ":" in clock else (0, int(clock or 0))
    return plan(
        storage.checkpoint_gb,
        disk_rate(cluster, cluster.paths.runs) / 1e9,
        recipe.world_size,
        time_limit_h=24 * int(days or 0) + hours + minutes / 60,
        keep=recipe.schedule.keep,
        merged_gb=storage.merged_gb,
        base_gb=storage.merged_gb,
    )
