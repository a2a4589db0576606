"""Time saving: how long a save blocks training, and how long until it is on disk."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from kit.checkpoints.plan import save_blocks
from kit.checkpoints.processes import fresh_ranks, join
from kit.checkpoints.storage import mount
from kit.errors import InputError
from kit.forecast.timing import predict
from kit.show import Gigabytes, Part, Result, Table, progress_bar
from kit.slurm.run import Run

_TENSORS, _COLUMNS, _FP32 = 64, 4096, 4


class Method(StrEnum):
    """How a state is saved."""

    SHARDED = "sharded"  # each rank writes a file (dcp.save), as fsdp1 and fsdp2 do
    CONSOLIDATED = "consolidated"  # all ranks gather, rank 0 writes one safetensors file
    ASYNCHRONOUS = "asynchronous"  # each rank copies its part and writes it in the background (dcp.async_save)


class Spread(NamedTuple):
    """Seconds over fresh processes."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} s ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True)
class SaveTime:
    """One method on one number of ranks, in the times of its slowest rank.

    blocked_s: training waits. durable_s: from the same beginning until the bytes are on disk (fsync). gb_s counts the
    state's bytes once, to durable_s.
    """

    method: Method
    mount: str
    ranks: int
    samples: int
    gb: float
    blocked_s: Spread
    durable_s: Spread
    gb_s: float


@dataclass(frozen=True)
class SaveTimes(Result):
    """Save times by method and ranks; of a run also the seconds for which each of its saves blocked training."""

    methods: tuple[SaveTime, ...]
    run_blocked_s: dict[int, float] = field(default_factory=dict)

    def parts(self) -> Iterable[Part]:
        """A table of the methods, and one of the run's own saves."""
        columns = ("method", "ranks", "size", "blocks training for", "on disk after", "GB/s", "storage")
        rows = [
            (t.method.value, t.ranks, Gigabytes(t.gb), str(t.blocked_s), str(t.durable_s), t.gb_s, t.mount)
            for t in self.methods
        ]
        yield Table(columns, rows)
        if self.run_blocked_s:
            yield Table(("save of the run at step", "blocked training for, s"), list(self.run_blocked_s.items()))


def time_run_saves(
    run: Run,
    gb: float = 0,
    ranks: Sequence[int] = (),
    methods: Sequence[str] | None = None,
    repeats: int = 3,
    progress: bool = False,
) -> SaveTimes:
    """Save times in a run's folder, by default with its checkpoint size (forecast) and its number of ranks."""
    size = gb or predict(run.recipe, run.cluster).storage.checkpoint_gb
    folder = run.path / "checkpoints"
    found = time_saves(folder, size, ranks or (run.recipe.world_size,), methods, repeats, progress=progress)
    return SaveTimes(found.methods, save_blocks(run))


def time_saves(
    folder: Path,
    gb: float = 1.0,
    ranks: Sequence[int] = (1,),
    methods: Sequence[str] | None = None,
    repeats: int = 3,
    progress: bool = False,
) -> SaveTimes:
    """Write a state of `gb`, rows spread over the ranks, into a folder that is removed; the methods take turns.

    Raises InputError for an unknown method or too little room, KitError where a save fails.
    """
    if unknown := sorted(set(methods or ()) - set(Method)):
        raise InputError(f"No method {', '.join(unknown)}; there are {', '.join(Method)}.")
    if (free := shutil.disk_usage(folder).free / 1e9) < 2 * gb:
        raise InputError(f"{folder} has {free:.1f} GB free; saving {gb:.1f} GB there needs twice as much.")
    cases = [(Method(method), world) for world in ranks for method in methods or Method]
    samples: dict[tuple[Method, int], list[dict[str, float]]] = {case: [] for case in cases}
    with (
        fresh_ranks("kit.checkpoints.saving") as run_sample,
        progress_bar(len(cases) * repeats, "saves", shown=progress) as bar,
    ):
        for method, world in cases * repeats:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as scratch:
                rows = run_sample(world, method, scratch, str(gb))
            samples[method, world].append({key: max(row[key] for row in rows) for key in rows[0]})
            bar.update()
    return SaveTimes(tuple(_summary(*case, folder, gb, taken) for case, taken in samples.items()))


def _summary(method: Method, ranks: int, folder: Path, gb: float, samples: list[dict[str, float]]) -> SaveTime:
    def spread(key: str) -> Spread:
        seconds = [sample[key] for sample in samples]
        return Spread(statistics.median(seconds), min(seconds), max(seconds))

    blocked, durable = spread("blocked_s"), spread("durable_s")
    return SaveTime(method, mount(folder), ranks, len(samples), gb, blocked, durable, gb / durable.median)


def sample(method: str, scratch: str, gb: str) -> dict[str, float]:
    """One rank's part of one save, in seconds."""
    import torch.distributed as dist

    folder, (rank, world) = Path(scratch), join()
    if world == 1 and method == Method.ASYNCHRONOUS:  # it asks for a process group
        dist.init_process_group("gloo", init_method=f"file://{folder}/.group", rank=0, world_size=1)
    state = _make_state(float(gb), world)
    if world > 1:
        dist.barrier()
    begun = time.perf_counter()
    future = _save(Method(method), state, folder, rank, world)
    blocked = time.perf_counter()
    if future is not None:
        future.result()
    if world > 1:
        dist.barrier()  # the save is complete when all ranks have written
    for path in (*folder.iterdir(), folder):  # by every rank: one node cannot flush what another one holds
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"blocked_s": blocked - begun, "durable_s": time.perf_counter() - begun}


def _make_state(gb: float, world: int) -> dict[str, Any]:
    """64 random fp32 matrices; each of several ranks holds its rows of every one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rows = max(1, round(gb * 1e9 / _TENSORS / _COLUMNS / _FP32 / world))
    parts = {f"layers.{number}": torch.rand(rows, _COLUMNS) for number in range(_TENSORS)}
    if world == 1:
        return parts
    mesh = init_device_mesh("cpu", (world,))
    return {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}


def _save(method: Method, state: dict[str, Any], folder: Path, rank: int, world: int) -> Any:
    """Save by one method; the future of an asynchronous save, else None."""
    from safetensors.torch import save_file
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    if method == Method.CONSOLIDATED:
        complete = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
        if rank == 0:
            save_file(complete, folder / "model.safetensors")
        return None
    writer = FileSystemWriter(folder, sync_files=True)
    if method == Method.ASYNCHRONOUS:
        return state_dict_saver.async_save(state, storage_writer=writer)
    state_dict_saver.save(state, storage_writer=writer, no_dist=world == 1)
    return None
