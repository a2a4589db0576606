"""Load times: what loading really costs, each sample in a fresh process, every byte touched, cold or warm by proof."""

import json
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kit import pagecache
from kit.errors import InputError, KitError
from kit.weights import Weights, safetensors_header, torch_file, weights

_BLOCK = 4 << 20


@dataclass(frozen=True)
class LoadTime:
    """One method's figures: medians over fresh processes, ranges as (least, most).

    call_s ends when the call returns, touched_s when a byte of every page was read; gb_s counts wanted bytes to
    touched_s. of_reference is gb_s over the best rate of plain reads of the same files.
    """

    method: str
    format: str
    label: str
    samples: int
    call_s: float
    touched_s: float
    touched_range_s: tuple[float, float]
    wanted_gb: float
    device_gb: float
    amplification: float
    residency_before: float
    gb_s: float
    gb_s_range: tuple[float, float]
    reference: str
    reference_gb_s: float
    of_reference: float
    load_average: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        low, high = self.gb_s_range
        return (
            f"{self.method}: {self.gb_s:.2f} GB/s ({low:.2f} to {high:.2f}), {self.label}, call {self.call_s:.3f} s, "
            f"touched {self.touched_s:.3f} s, device {self.amplification:.2f} of the wanted {self.wanted_gb:.3f} GB, "
            f"{self.of_reference:.0%} of {self.reference} ({self.reference_gb_s:.2f} GB/s)"
        )


def time_load(path: Path, methods: Sequence[str] | None = None, cold: bool = False, repeats: int = 3) -> list[LoadTime]:
    """Loads on the CPU, each sample in a fresh process, the methods in turn within each round.

    Client-cold means that this machine's page cache was empty; a file server or a hypervisor may still hold the bytes.
    Raises KitError where cold was asked and cannot be proven.
    """
    path = Path(path)
    held = weights(path)
    if held.faults or not held.tensors:
        raise KitError(f"{path} cannot be timed: {' '.join(held.faults) or 'it holds no tensors.'}")
    known = METHODS[held.format]
    if unknown := set(methods or ()) - set(known):
        raise InputError(f"No method {', '.join(sorted(unknown))} for {held.format}; there are {', '.join(known)}.")
    rate, how = reference(held.files, cold)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in methods or known}
    for _ in range(repeats):
        for name, taken in samples.items():
            taken.append(_fresh(name, path, cold))
    return [_load_time(name, held, taken, rate, how) for name, taken in samples.items()]


def _fresh(method: str, path: Path, cold: bool) -> dict[str, float]:
    command = [sys.executable, "-m", "kit.loadtime", method, str(path.absolute()), "cold" if cold else "warm"]
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KitError(f"Loading {path} by {method} failed (exit {done.returncode}): {done.stderr.strip()[-800:]}")
    sample: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if cold and label(sample["residency"], sample["device"] / sample["wanted"]) != "client-cold":
        raise KitError(
            f"No cold figure for {path}: {sample['residency']:.0%} of its pages were in memory after eviction and the "
            f"device gave {sample['device'] / sample['wanted']:.2f} of the wanted bytes. Another process may have it "
            "mapped, it may lie in memory (tmpfs), or you may not own it; time a copy on the storage in question."
        )
    return sample


def label(residency: float, amplification: float) -> str:
    """client-cold or warm where both proofs agree (pages in memory before, device bytes over wanted), else mixed."""
    if residency < 0.01 and amplification > 0.95:
        return "client-cold"
    return "warm" if residency > 0.99 and amplification < 0.01 else "mixed"


def _load_time(method: str, held: Weights, taken: list[dict[str, float]], rate: float, how: str) -> LoadTime:
    def middle(key: str) -> float:
        return statistics.median(sample[key] for sample in taken)

    wanted, touched = held.bytes, [sample["touched"] for sample in taken]
    labels = {label(sample["residency"], sample["device"] / wanted) for sample in taken}
    gb_s = wanted / 1e9 / middle("touched")
    return LoadTime(
        method, held.format, labels.pop() if len(labels) == 1 else "mixed", len(taken), middle("call"),
        middle("touched"), (min(touched), max(touched)), wanted / 1e9, middle("device") / 1e9,
        middle("device") / wanted, middle("residency"), gb_s,
        (wanted / 1e9 / max(touched), wanted / 1e9 / min(touched)), how, rate, gb_s / rate, os.getloadavg()[0],
    )  # fmt: skip


def separable(times: Sequence[LoadTime]) -> list[str]:
    """A sentence for each neighbour in the order of medians: faster, or not separable where the ranges overlap."""
    ordered = sorted(times, key=lambda t: -t.gb_s)
    return [
        f"{a.method} is {a.gb_s / b.gb_s:.2f} times as fast as {b.method}."
        if a.gb_s_range[0] > b.gb_s_range[1]
        else f"{a.method} and {b.method} are not separable: their ranges overlap over {a.samples} samples."
        for a, b in pairwise(ordered)
    ]


def reference(paths: Sequence[Path], cold: bool) -> tuple[float, str]:
    """(GB/s, how) of plain reads of the first GiB with 1, 2, 4 and 8 threads, the best: of the device, or of memory."""
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK)][:256]
    how, rates = "O_DIRECT" if cold and _direct(paths[0]) else "pread", {}
    for threads in (1, 2, 4, 8):
        (pagecache.evict if cold else pagecache.warm)(paths)
        begun = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            done = sum(pool.map(_read_blocks, [blocks[n::threads] for n in range(threads)], [how] * threads))
        rates[done / 1e9 / (time.perf_counter() - begun)] = f"{how}, {threads} threads"
    return max(rates.items())


def _direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:  # this file system has none
        return False
    return True


def _read_blocks(blocks: Sequence[tuple[Path, int]], how: str) -> int:
    buffer = mmap.mmap(-1, _BLOCK)  # page-aligned, as O_DIRECT asks
    done = 0
    for path, at in blocks:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if how == "O_DIRECT" else 0))
        done += os.preadv(descriptor, [buffer], at)
        os.close(descriptor)
    return done


def _load_file(held: Weights) -> list[Any]:
    from safetensors.torch import load_file

    return [tensor for path in held.files for tensor in load_file(path).values()]


def _pread(held: Weights) -> list[Any]:
    import torch

    tensors = []
    for path in held.files:
        header, start = safetensors_header(path)
        data = _read_parallel(path, start)
        for name, t in header.items():
            flat = data[slice(*t["data_offsets"])].view(getattr(torch, held.tensors[name].dtype))
            tensors.append(flat.view(t["shape"]))
    return tensors


def _read_parallel(path: Path, start: int) -> Any:
    """The file from `start` on as uint8[bytes], by four threads."""
    import torch

    data = torch.empty(path.stat().st_size - start, dtype=torch.uint8)
    memory: Any = memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's arrays are buffers
    with path.open("rb", buffering=0) as stream, ThreadPoolExecutor(4) as pool:

        def fill(at: int) -> None:
            os.preadv(stream.fileno(), [memory[at : at + _BLOCK]], start + at)

        list(pool.map(fill, range(0, len(memory), _BLOCK)))
    return data


def _dcp_load(held: Weights) -> list[Any]:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = {n: torch.empty(e.shape, dtype=getattr(torch, e.dtype)) for n, e in held.tensors.items()}
    load(state, storage_reader=FileSystemReader(held.files[0].parent), no_dist=True)
    return list(state.values())


_SAFETENSORS_METHODS: dict[str, Callable[[Weights], list[Any]]] = {
    "load_file": _load_file,
    "load_file, clone": lambda held: [tensor.clone() for tensor in _load_file(held)],
    "pread, 4 threads": _pread,
}
METHODS: dict[str, dict[str, Callable[[Weights], list[Any]]]] = {
    "safetensors": _SAFETENSORS_METHODS,
    "peft adapter": _SAFETENSORS_METHODS,
    "torch": {
        "torch.load": lambda held: [t for path in held.files for t in torch_file(path, mmap=False).values()],
        "torch.load, mmap": lambda held: [t for path in held.files for t in torch_file(path).values()],
    },
    "dcp": {"dcp.load, 1 process": _dcp_load},
}


def _sample(method: str, path: Path, cold: bool) -> dict[str, float]:
    """One load in this process, imports and headers beforehand, every page touched."""
    import safetensors.torch  # noqa: F401
    import torch.distributed.checkpoint

    held = weights(path)
    (pagecache.evict if cold else pagecache.warm)(held.files)
    residency, before, begun = pagecache.residency(held.files), pagecache.device_bytes(), time.perf_counter()
    tensors = METHODS[held.format][method](held)
    called = time.perf_counter()
    for tensor in tensors:
        tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    touched = time.perf_counter()
    device = pagecache.device_bytes() - before
    return {
        "call": called - begun, "touched": touched - begun, "device": device, "residency": residency,
        "wanted": held.bytes,
    }  # fmt: skip


if __name__ == "__main__":  # one sample of time_load
    print(json.dumps(_sample(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "cold")))
