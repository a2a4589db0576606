"""Load times: what loading really costs, each sample in fresh processes, every byte touched, cold or warm by proof."""

import importlib
import importlib.util
import json
import mmap
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kit import pagecache
from kit.errors import InputError, KitError
from kit.weights import Weights, torch_file, weights

_BLOCK = 4 << 20
_DEPTHS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class LoadTime:
    """One method's figures: medians over samples, ranges as (least, most), bytes summed over ranks.

    call_s ends when the last rank's call returns, touched_s when it has read a byte of every page (on a GPU, when the
    copies are done); gb_s counts wanted bytes to touched_s. asked_gb went through read calls, device_gb came from the
    device; amplification is the larger of them over the wanted bytes. of_reference is gb_s over the best rate of plain
    reads of the same files, measured in the same rounds.
    """

    path: str
    mount: str
    method: str
    format: str
    ranks: int
    device: str
    label: str
    samples: int
    call_s: float
    touched_s: float
    touched_range_s: tuple[float, float]
    wanted_gb: float
    asked_gb: float
    device_gb: float
    amplification: float
    residency_before: float
    gb_s: float
    gb_s_range: tuple[float, float]
    reference: str
    reference_gb_s: float
    reference_range: tuple[float, float]
    of_reference: float
    load_average: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __str__(self) -> str:
        low, high = self.gb_s_range
        ranks = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return (
            f"{self.method}, {ranks}: {self.gb_s:.2f} GB/s ({low:.2f} to {high:.2f}), {self.label}, call "
            f"{self.call_s:.3f} s, touched {self.touched_s:.3f} s, read {self.amplification:.2f} of the wanted "
            f"{self.wanted_gb:.3f} GB, {self.of_reference:.0%} of {self.reference} ({self.reference_gb_s:.2f} GB/s)"
        )


def time_load(
    path: Path | Sequence[Path], methods: Sequence[str] | None = None, cold: bool = False, repeats: int = 3,
    ranks: Sequence[int] = (1,), device: str = "cpu", launcher: Sequence[str] = (),
) -> list[LoadTime]:  # fmt: skip
    """Loads of one or more paths, the methods and rank counts in turn in each round; None is all methods that differ.

    launcher starts the ranks of other nodes too: ("srun", "-N2", "-n16") with MASTER_ADDR set and ranks=(16,).
    Client-cold means that this machine's page cache was empty; a file server or a hypervisor may still hold the bytes.
    Raises KitError where cold was asked and cannot be proven, or where a load fails.
    """
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(one) for one in path]
    held = {one: _sound(one) for one in paths}
    depths = {one: _best_depth(held[one].files, cold) for one in paths}
    cases = [
        (one, name, world) for one in paths for name in known(held[one].format, methods) for world in ranks
        if methods or world > 1 or name not in _SEVERAL
    ]  # fmt: skip
    samples: dict[tuple[Path, str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    rates: dict[Path, list[float]] = {one: [] for one in paths}
    for _ in range(repeats):
        for one in paths:
            rates[one].append(_rate(held[one].files, cold, depths[one]))
        for case in cases:
            samples[case].append(_sample_of(held[case[0]], *case, cold, device, launcher))
    how = "O_DIRECT" if cold else "pread"
    return [
        _load_time(held[case[0]], *case, device, samples[case], rates[case[0]], f"{how}, {depths[case[0]]} deep")
        for case in cases
    ]


def _sound(path: Path) -> Weights:
    held = weights(path)
    if held.faults or not held.tensors:
        raise KitError(f"{path} cannot be timed: {' '.join(held.faults) or 'it holds no tensors.'}")
    return held


def known(form: str, methods: Sequence[str] | None = None) -> list[str]:
    """The methods of a format whose packages are installed, or those asked for. Raises InputError for another."""
    installed = [m for m in METHODS[form] if m not in _PACKAGES or importlib.util.find_spec(_PACKAGES[m])]
    for name in sorted(set(methods or ()) - set(installed)):
        hint = f"it needs pip install {name}" if name in METHODS[form] else f"there are {', '.join(installed)}"
        raise InputError(f"No method {name} for {form} here; {hint}.")
    return list(methods or installed)


def run_ranks(arguments: Sequence[str], world: int, launcher: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What each of `world` fresh processes of `python ARGUMENTS` printed: one JSON object each. Raises KitError."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "--no-python")
    several = (*torchrun, sys.executable) if world > 1 and not launcher else ()
    command = [*launcher, sys.executable, *several, *arguments]
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    local = {} if launcher else {"GLOO_SOCKET_IFNAME": "lo"}
    environment = local | {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        mapped = done.returncode == -7 or "SIGBUS" in done.stderr
        why = "a mapped file was cut off, or its file system failed (SIGBUS): " * mapped
        raise KitError(f"{' '.join(arguments)} failed (exit {done.returncode}): {why}{done.stderr.strip()[-800:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _sample_of(
    held: Weights, path: Path, method: str, world: int, cold: bool, device: str, launcher: Sequence[str]
) -> dict[str, Any]:
    """One load, over its ranks: the slowest one's times and all their bytes."""
    arguments = ("-m", "kit.loadtime", method, str(path.absolute()), "cold" if cold else "warm", device)
    rows = run_ranks(arguments, world, launcher)
    sample = {key: sum(row[key] for row in rows) for key in ("wanted", "asked", "device")}
    sample |= {key: max(row[key] for row in rows) for key in ("call", "touched", "residency")}
    sample |= {"rows": rows, "distinct": min(sample["wanted"], held.bytes)}
    if cold and label(sample["residency"], sample["device"] / sample["distinct"]) != "client-cold":
        raise KitError(
            f"No cold figure for {path}: {sample['residency']:.0%} of its pages were in memory after eviction and the "
            f"device gave {sample['device'] / sample['distinct']:.2f} of the wanted bytes. Another process may have it "
            "mapped, it may lie in memory (tmpfs), or you may not own it; time a copy on the storage in question."
        )
    return sample


def label(residency: float, amplification: float) -> str:
    """client-cold, warm, or past the cache, by both proofs: pages in memory before, device bytes over wanted ones."""
    if amplification > 0.95:
        return "client-cold" if residency < 0.01 else "past the cache" if residency > 0.99 else "mixed"
    return "warm" if residency > 0.99 and amplification < 0.01 else "mixed"


def _load_time(
    held: Weights, path: Path, method: str, world: int, device: str, taken: list[dict[str, Any]], rates: list[float],
    how: str,
) -> LoadTime:  # fmt: skip
    def middle(key: str) -> float:
        return float(statistics.median(sample[key] for sample in taken))

    wanted, touched, rate = middle("wanted"), [sample["touched"] for sample in taken], statistics.median(rates)
    labels = {label(sample["residency"], sample["device"] / sample["distinct"]) for sample in taken}
    gb_s = wanted / 1e9 / middle("touched")
    return LoadTime(
        str(path), mount(path), method, held.format, world, device, labels.pop() if len(labels) == 1 else "mixed",
        len(taken), middle("call"), middle("touched"), (min(touched), max(touched)), wanted / 1e9,
        middle("asked") / 1e9, middle("device") / 1e9, max(middle("asked"), middle("device")) / wanted,
        middle("residency"), gb_s, (wanted / 1e9 / max(touched), wanted / 1e9 / min(touched)), how, rate,
        (min(rates), max(rates)), gb_s / rate, os.getloadavg()[0],
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


def mount(path: Path) -> str:
    """The mount that holds the path, as "source on folder (type)"; an NFS source names the server's address."""
    mounts = [m for m in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(m.mountpoint)]
    deepest: Any = max(mounts, key=lambda m: len(m.mountpoint))
    return f"{deepest.device} on {deepest.mountpoint} ({deepest.fstype})"


@dataclass(frozen=True)
class TargetRate:
    """What the ranks of one node got through one mount, all ranks reading at once: GB/s, (least, most)."""

    node: str
    mount: str
    ranks: int
    gb: float
    gb_s: float
    gb_s_range: tuple[float, float]


def time_spread(
    path: Path, world: int, cold: bool = False, repeats: int = 3, device: str = "cpu", launcher: Sequence[str] = ()
) -> list[TargetRate]:
    """Load a state dict spread over the ranks, whole tensors, even in bytes, all at once; the slowest target first.

    This is what a loop of `hash(key) % num_gpus` and `.to(gpu)` means to measure. Raises KitError as time_load does.
    """
    held, found = _sound(Path(path)), defaultdict(list)
    for _ in range(repeats):
        groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        for row in _sample_of(held, Path(path), "spread", world, cold, device, launcher)["rows"]:
            groups[row["node"], row["mount"]].append(row)
        for target, rows in groups.items():
            gb = sum(row["wanted"] for row in rows) / 1e9
            found[target].append((gb / max(row["touched"] for row in rows), gb, len(rows)))
    rates = []
    for target, taken in found.items():
        speeds = [speed for speed, _, _ in taken]
        rates.append(TargetRate(*target, *taken[0][:0:-1], statistics.median(speeds), (min(speeds), max(speeds))))
    return sorted(rates, key=lambda r: r.gb_s)


def _best_depth(paths: Sequence[Path], cold: bool) -> int:
    return max(_DEPTHS, key=lambda depth: _rate(paths, cold, depth))


def _rate(paths: Sequence[Path], cold: bool, depth: int) -> float:
    """GB/s of plain reads of the first GiB, so many in flight: of the device by O_DIRECT if cold, else of memory."""
    blocks = [(path, at) for path in paths for at in range(0, path.stat().st_size, _BLOCK)][:256]
    (pagecache.evict if cold else pagecache.warm)(paths)
    begun = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        done = sum(pool.map(_read_blocks, [blocks[n::depth] for n in range(depth)], [cold] * depth))
    return done / 1e9 / (time.perf_counter() - begun)


def _read_blocks(blocks: Sequence[tuple[Path, int]], direct: bool) -> int:
    buffer, done = mmap.mmap(-1, _BLOCK), 0  # page-aligned, as O_DIRECT asks
    for path, at in blocks:
        try:
            descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError:  # this file system has no O_DIRECT
            descriptor = os.open(path, os.O_RDONLY)
        done += os.preadv(descriptor, [buffer], at)
        os.close(descriptor)
    return done


class Job(NamedTuple):
    """One rank's part of a load: what is there, who asks, and where it shall go."""

    held: Weights
    path: Path
    rank: int = 0
    world: int = 1
    device: str = "cpu"


Load = Callable[[Job], Iterable[Any]]  # the tensors, a rank's own where it asks for its part


def _load_file(job: Job) -> Iterator[Any]:
    from safetensors.torch import load_file

    return (tensor for file in job.held.files for tensor in load_file(file, device=job.device).values())


def _torch_load(use_mmap: bool) -> Load:
    return lambda job: [
        tensor.to(job.device) for file in job.held.files for tensor in torch_file(file, mmap=use_mmap).values()
    ]


def _dcp_load(reader: str) -> Load:
    """Rows of each tensor on each rank, as FSDP2 cuts them."""

    def load(job: Job) -> list[Any]:
        import torch
        from torch.distributed.checkpoint import state_dict_loader
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, empty

        mesh = init_device_mesh(job.device, (job.world,)) if job.world > 1 else None
        state: dict[str, Any] = {}
        for name, entry in job.held.tensors.items():
            options: dict[str, Any] = {"dtype": getattr(torch, entry.dtype)}
            sharded = mesh is not None and entry.shape
            options |= {"device_mesh": mesh, "placements": [Shard(0)]} if sharded else {"device": job.device}
            state[name] = (empty if sharded else torch.empty)(entry.shape, **options)
        readers = {"dcp": FileSystemReader, "hf": HuggingFaceStorageReader, "kit": _shards().Reader}
        source = readers[reader](str(job.held.files[0].parent))
        state_dict_loader.load(state, storage_reader=source, no_dist=mesh is None)
        return [t.to_local() if hasattr(t, "to_local") else t for t in state.values()]

    return load


def _handed_over(job: Job) -> Iterable[Any]:
    import torch.distributed as dist

    group = dist.group.WORLD if job.world > 1 else None
    state: dict[str, Any] = _shards().load_sharded(job.path, group=group, device=job.device)
    return state.values()


def _fastsafetensors(job: Job) -> Iterator[Any]:
    opened = importlib.import_module("fastsafetensors").fastsafe_open
    for file in job.held.files:
        with opened([str(file)], device=job.device, nogds=True) as stream:
            yield from [stream.get_tensor(name) for name in stream.keys()]  # noqa: SIM118


def _runai(job: Job) -> Iterator[Any]:
    with importlib.import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in job.held.files])
        yield from (tensor.to(job.device) for _, tensor in streamer.get_tensors())


def _shards() -> Any:
    from kit import shards  # imports torch

    return shards


_EVERY: dict[str, Load] = {
    "kit": lambda job: _shards().load_sharded(job.path, job.rank, job.world, device=job.device).values(),
    "kit, handed over": _handed_over,
    "spread": lambda job: _shards().load_balanced(job.path, job.rank, job.world, job.device).values(),
}
_SAFETENSORS: dict[str, Load] = {
    "load_file": _load_file,
    "load_file, clone": lambda job: (tensor.clone() for tensor in _load_file(job)),
    "dcp.load, HF reader": _dcp_load("hf"),
    "fastsafetensors": _fastsafetensors,
    "runai-model-streamer": _runai,
}
METHODS: dict[str, dict[str, Load]] = {
    "safetensors": _SAFETENSORS | _EVERY,
    "peft adapter": _SAFETENSORS | _EVERY,
    "torch": {"torch.load": _torch_load(False), "torch.load, mmap": _torch_load(True)} | _EVERY,
    "dcp": {"dcp.load": _dcp_load("dcp"), "dcp.load, kit's reader": _dcp_load("kit")} | _EVERY,
}
_SEVERAL = ("kit, handed over", "spread")  # on one rank the same as kit
_PACKAGES = {"fastsafetensors": "fastsafetensors", "runai-model-streamer": "runai_model_streamer"}


def join() -> tuple[int, int]:
    """(rank, world), from torchrun or srun, with a process group of CPUs and any GPUs where there is more than one."""
    import torch.distributed as dist

    names = (("RANK", "SLURM_PROCID", 0), ("WORLD_SIZE", "SLURM_NTASKS", 1))
    rank, world = (int(os.environ.get(one) or os.environ.get(other) or default) for one, other, default in names)
    if world > 1:
        dist.init_process_group(rank=rank, world_size=world)
    return rank, world


def _sample(method: str, path: Path, cold: bool, device: str) -> dict[str, Any]:
    """One rank's part of a load: imports, headers and the process group beforehand, every page touched."""
    import safetensors.torch  # noqa: F401
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode

    _shards()
    with FakeTensorMode():  # imports sympy
        pass
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0))
        torch.empty(1, device=device)
    job = Job(weights(path), path, *join(), device)
    (pagecache.evict if cold else pagecache.warm)(job.held.files)
    residency = pagecache.residency(job.held.files)
    if job.world > 1:
        dist.barrier()
    device_bytes, asked, begun = pagecache.device_bytes(), pagecache.read_bytes(), time.perf_counter()
    tensors = list(METHODS[job.held.format][method](job))
    called = time.perf_counter()
    for tensor in tensors:
        if not tensor.is_cuda:
            tensor.reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    if device == "cuda":
        torch.cuda.synchronize()
    return {
        "touched": time.perf_counter() - begun, "call": called - begun,
        "device": pagecache.device_bytes() - device_bytes, "asked": pagecache.read_bytes() - asked,
        "residency": residency, "wanted": sum(t.nbytes for t in tensors), "node": socket.gethostname(),
        "mount": mount(path),
    }  # fmt: skip


def report(value: dict[str, Any]) -> None:
    """Print one rank's JSON in one write, so that ranks do not mix, and leave the process group."""
    import torch.distributed as dist

    os.write(1, (json.dumps(value) + "\n").encode())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":  # one rank of one sample
    report(_sample(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "cold", sys.argv[4]))
