"""Save times: how long a save holds training up, when it is written, and when it is safe on disk."""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kit.checkpoints.processes import fresh, join
from kit.checkpoints.timing import mount
from kit.checkpoints.timing import prepare as prepare
from kit.errors import InputError


@dataclass(frozen=True)
class SaveTime:
    """One method's times over fresh runs, of the slowest rank, each as (median, least, most).

    blocked_s: training waits. done_s: every byte is with the kernel, or on disk. durable_s: on disk (fsync); all from
    the beginning. gb_s counts the state's bytes, once, to durable_s.
    """

    method: str
    mount: str
    ranks: int
    samples: int
    gb: float
    blocked_s: tuple[float, float, float]
    done_s: tuple[float, float, float]
    durable_s: tuple[float, float, float]
    gb_s: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        times = (("blocks for", self.blocked_s), ("written after", self.done_s), ("on disk after", self.durable_s))
        took = ", ".join(f"{what} {t[0]:.2f} s ({t[1]:.2f} to {t[2]:.2f})" for what, t in times)
        return (
            f"{self.method}, {self.ranks} rank{'s' * (self.ranks > 1)}, {self.gb:.3g} GB: {took}, {self.gb_s:.2f} GB/s"
        )


def time_save(
    folder: Path, gb: float = 1.0, ranks: int = 1, methods: Sequence[str] | None = None, repeats: int = 3,
    launcher: Sequence[str] = (),
) -> list[SaveTime]:  # fmt: skip
    """Write a state of `gb`, rows spread over the ranks, into a folder that is removed, the methods in turn.

    Raises InputError for an unknown method or too little room, KitError where a save fails.
    """
    if unknown := set(methods or ()) - set(METHODS):
        raise InputError(f"No method {', '.join(sorted(unknown))}; there are {', '.join(METHODS)}.")
    if (free := shutil.disk_usage(folder).free / 1e9) < 2 * gb:
        raise InputError(f"{folder} has {free:.1f} GB free; saving {gb:.1f} GB there asks for twice as much.")
    taken: dict[str, list[list[float]]] = {method: [] for method in methods or METHODS}
    with fresh("kit.checkpoints.saving", launcher) as run:
        for method, samples in list(taken.items()) * repeats:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".save-") as scratch:
                rows = run(ranks, method, scratch, str(gb))
            samples.append([max(row[key] for row in rows) for key in ("blocked", "done", "durable")])
    found = []
    for method, samples in taken.items():
        blocked, done, durable = ((statistics.median(s), min(s), max(s)) for s in zip(*samples, strict=True))
        rate = gb / durable[0]
        found.append(SaveTime(method, mount(folder), ranks, repeats, gb, blocked, done, durable, rate))
    return found


State = dict[str, Any]


def _consolidated(save: Callable[[State, Path], None]) -> Callable[[State, Path], None]:
    """Every rank gathers whole tensors, a collective; rank 0 alone writes them."""

    def write(state: State, folder: Path) -> None:
        whole = {name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()}
        if int(os.environ.get("RANK", 0)) == 0:
            save(whole, folder)

    return write


def _torch_save(state: State, folder: Path) -> None:
    import torch

    torch.save(state, folder / "pytorch_model.bin")


def _safetensors(state: State, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")


def _dcp(fsync: bool, background: bool = False) -> Callable[[State, Path], Any]:
    """A file for each rank, as a sharded run writes it; the future of an asynchronous save."""

    def save(state: State, folder: Path) -> Any:
        from torch.distributed.checkpoint import state_dict_saver as saver
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        writer = FileSystemWriter(folder, sync_files=fsync)
        if background:
            return saver.async_save(state, storage_writer=writer)
        saver.save(state, storage_writer=writer, no_dist="RANK" not in os.environ)
        return None

    return save


METHODS: dict[str, Callable[[State, Path], Any]] = {
    "torch.save, consolidated": _consolidated(_torch_save),
    "safetensors, consolidated": _consolidated(_safetensors),
    "dcp.save, sharded": _dcp(fsync=True),
    "dcp.save, sharded, no fsync": _dcp(fsync=False),
    "dcp.async_save, sharded": _dcp(fsync=True, background=True),
}


def sample(method: str, scratch: str, gb: str) -> dict[str, float]:
    """One rank's part of one save of 64 tensors."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    folder, (_, world) = Path(scratch), join()
    if world == 1 and "async" in method:
        dist.init_process_group("gloo", init_method=f"file://{folder}/.group", rank=0, world_size=1)
    rows = max(1, round(float(gb) * 1e9 / 64 / 4096 / 4 / world))
    mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
    parts = [torch.rand(rows, 4096) for _ in range(64)]
    state = {f"layers.{n}": DTensor.from_local(p, mesh, [Shard(0)]) if mesh else p for n, p in enumerate(parts)}
    if mesh:
        dist.barrier()
    begun = time.perf_counter()
    pending = METHODS[method](state, folder)
    blocked = time.perf_counter()
    if pending is not None:
        pending.result()
    if mesh:
        dist.barrier()  # done is when all are
    done = time.perf_counter()
    for path in (*folder.iterdir(), folder):  # by every rank: one node cannot flush what another one holds
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"blocked": blocked - begun, "done": done - begun, "durable": time.perf_counter() - begun}


if __name__ == "__main__":  # one rank of one sample
    print(json.dumps(sample(*sys.argv[1:])), flush=True)
