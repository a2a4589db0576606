"""Load times: what loading really costs, each sample in fresh processes, every byte touched, cold or warm by proof."""

import importlib
import importlib.util
import json
import mmap
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from kit.chart import COLOURS, GRID, INK, LIMIT, fluid, frame, number, ticks
from kit.checkpoints import pagecache
from kit.checkpoints.formats.base import Weights, join_messages
from kit.checkpoints.formats.torch_files import load as torch_file
from kit.checkpoints.processes import Row, fresh, join
from kit.checkpoints.weights import read_headers
from kit.errors import InputError, KitError

_BLOCK = 4 << 20
_DEPTHS = (1, 4, 16, 32)
_NOT_COLD = (
    "No cold figure for {}: {:.0%} of its pages were in memory after eviction, or the device gave too few bytes. "
    "Another process may have it mapped, it may lie in memory (tmpfs), or you may not own it; time a copy on the "
    "storage in question."
)


@dataclass(frozen=True)
class LoadTime:
    """One method's figures: medians over samples, ranges as (least, most), bytes summed over ranks.

    call_s ends when the last rank's call returns, touched_s when it has read a byte of every page (on a GPU, when the
    copies are done); gb_s counts wanted bytes to touched_s, node_gb_s those of each node's ranks to the last of them.
    asked_gb went through read calls, device_gb came from the device; amplification is the larger of them over the
    wanted bytes. of_reference is gb_s over that of plain reads of the same files, at the best of the queue depths that
    are swept in every round.
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
    node_gb_s: dict[str, float]
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
        nodes = ", ".join(f"{name} {gb_s:.2f}" for name, gb_s in self.node_gb_s.items())
        return (
            f"{self.method}, {self.ranks} rank{'s' * (self.ranks > 1)}: {self.gb_s:.2f} GB/s ({low:.2f} to {high:.2f})"
            f", {self.label}, call {self.call_s:.3f} s, touched {self.touched_s:.3f} s, read {self.amplification:.2f} "
            f"of the wanted {self.wanted_gb:.3f} GB, {self.of_reference:.0%} of {self.reference} "
            f"({self.reference_gb_s:.2f} GB/s)" + (f", by node: {nodes}" if len(self.node_gb_s) > 1 else "")
        )


def time_load(
    path: Path | Sequence[Path], methods: Sequence[str] | None = None, cold: bool = False, repeats: int = 3,
    ranks: Sequence[int] = (1,), device: str = "cpu", launcher: Sequence[str] = (),
) -> list[LoadTime]:  # fmt: skip
    """Loads of one or more paths, the methods and rank counts in turn in each round; None is all methods that differ.

    launcher starts the ranks of other nodes too, see kit.checkpoints.processes; ranks is then how many it starts.
    Client-cold means that this machine's page cache was empty; a file server or a hypervisor may still hold the bytes.
    Raises KitError where cold was asked and cannot be proven, or where a load fails, InputError without a GPU a rank.
    """
    if device == "cuda" and not launcher:
        _need_gpus(max(ranks))
    paths = [Path(path)] if isinstance(path, (str, Path)) else [Path(one) for one in path]
    held = {one: _sound(one) for one in paths}
    cases = [
        (one, name, world) for one in paths for name in known(held[one].format, methods) for world in ranks
        if methods or world > 1 or name not in _SEVERAL
    ]  # fmt: skip
    samples: dict[tuple[Path, str, int], list[list[Row]]] = {case: [] for case in cases}
    rates: dict[Path, dict[int, list[float]]] = {one: {depth: [] for depth in _DEPTHS} for one in paths}
    with fresh("kit.checkpoints.timing", launcher) as run:
        for _ in range(repeats):
            for one in paths:
                for depth, taken in rates[one].items():
                    taken.append(_rate(held[one].files, cold, depth))
            for one, name, world in cases:
                rows = run(world, name, str(one.absolute()), "cold" if cold else "warm", device)
                if cold and _label(rows, held[one].bytes) != "client-cold":
                    raise KitError(_NOT_COLD.format(one, max(row["residency"] for row in rows)))
                samples[one, name, world].append(rows)
    depths = {one: max(swept, key=lambda depth: statistics.median(swept[depth])) for one, swept in rates.items()}
    how = "O_DIRECT" if cold else "pread"
    return [
        _load_time(
            held[path], path, name, world, device, taken, rates[path][depths[path]], f"{how}, {depths[path]} deep"
        )
        for (path, name, world), taken in samples.items()
    ]


def _need_gpus(ranks: int) -> None:
    import torch

    if ranks > (there := torch.cuda.device_count()):
        raise InputError(f"Loading to cuda takes a GPU for each rank: {ranks} asked for, {there} here; or load to cpu.")


def _sound(path: Path) -> Weights:
    held = read_headers(path)
    if held.problems or not held.tensors:
        raise KitError(f"{path} cannot be timed: {join_messages(held.problems) or 'it holds no tensors.'}")
    return held


def known(form: str, methods: Sequence[str] | None = None) -> list[str]:
    """The methods of a format whose packages are installed, or those asked for. Raises InputError for another."""
    installed = [m for m in METHODS[form] if m not in _PACKAGES or importlib.util.find_spec(_PACKAGES[m])]
    for name in sorted(set(methods or ()) - set(installed)):
        hint = f"it needs pip install {name}" if name in METHODS[form] else f"there are {', '.join(installed)}"
        raise InputError(f"No method {name} for {form} here; {hint}.")
    return list(methods or installed)


def label(residency: float, amplification: float) -> str:
    """client-cold, warm, or past the cache, by both proofs: pages in memory before, device bytes over wanted ones."""
    if amplification > 0.95:
        return "client-cold" if residency < 0.01 else "past the cache" if residency > 0.99 else "mixed"
    return "warm" if residency > 0.99 and amplification < 0.01 else "mixed"


def _label(rows: Sequence[Row], held_bytes: int) -> str:
    """Of the ranks' loads together: device bytes count over those that any rank wanted."""
    distinct = min(sum(row["wanted"] for row in rows), held_bytes)
    return label(max(row["residency"] for row in rows), sum(row["device"] for row in rows) / distinct)


def _load_time(
    held: Weights, path: Path, method: str, world: int, device: str, taken: list[list[Row]], rates: list[float],
    how: str,
) -> LoadTime:  # fmt: skip
    def each(key: str, over: Callable[[Iterable[float]], float]) -> list[float]:
        return [over(row[key] for row in rows) for rows in taken]

    middle, touched = statistics.median, each("touched", max)
    wanted, asked, from_device = (middle(each(key, sum)) for key in ("wanted", "asked", "device"))
    labels = {_label(rows, held.bytes) for rows in taken}
    gb_s, rate, nodes = wanted / 1e9 / middle(touched), middle(rates), sorted({r["node"] for r in taken[0]})
    of_nodes = {node: middle([_gb_s([r for r in rows if r["node"] == node]) for rows in taken]) for node in nodes}
    return LoadTime(
        str(path), mount(path), method, held.format, world, device, labels.pop() if len(labels) == 1 else "mixed",
        len(taken), middle(each("call", max)), middle(touched), (min(touched), max(touched)), wanted / 1e9,
        asked / 1e9, from_device / 1e9, max(asked, from_device) / wanted, middle(each("residency", max)), gb_s,
        (wanted / 1e9 / max(touched), wanted / 1e9 / min(touched)), of_nodes, how, rate, (min(rates), max(rates)),
        gb_s / rate, os.getloadavg()[0],
    )  # fmt: skip


def _gb_s(rows: Sequence[Row]) -> float:
    return float(sum(row["wanted"] for row in rows) / 1e9 / max(row["touched"] for row in rows))


def names(times: Sequence[LoadTime]) -> list[str]:
    """Each figure's method, with its path and ranks where those are not all the same."""
    several = [len({getattr(t, key) for t in times}) > 1 for key in ("path", "ranks")]
    return [t.method + f" on {t.path}" * several[0] + f", {t.ranks} ranks" * several[1] for t in times]


def separable(times: Sequence[LoadTime]) -> list[str]:
    """A sentence for each label, cold or warm: how much faster the fastest is, and which ranges overlap with its."""
    said, named = [], sorted(zip(times, names(times), strict=True), key=lambda one: (one[0].label, -one[0].gb_s))
    for state, group in groupby(named, key=lambda one: one[0].label):
        (best, name), *others = group
        near = [other for t, other in others if t.gb_s_range[1] >= best.gb_s_range[0] or t.samples == 1]
        behind = [f"{name} is {best.gb_s / t.gb_s:.2f} times as fast as {n}" for t, n in others if n not in near]
        tied = f"{' and '.join([name, *near])} are not separable: their ranges overlap over {best.samples} samples"
        said += [f"{state}: {'; '.join([tied] * bool(near) + behind[:1])}."] * bool(others)
    return said


def figure(times: Sequence[LoadTime]) -> Any:
    """Bars of medians with their ranges, as SVG; dashed, what plain reads of the same files gave in the same rounds."""
    from IPython.display import SVG

    left, top, scale = 190, 48, 440 / max(rate for t in times for rate in (t.gb_s_range[1], t.reference_gb_s))
    labels, how = ", ".join(sorted({t.label for t in times})), times[0].reference
    head = f"Loading, {labels}: median and range; dashed: plain reads ({how})"
    body, bottom = f'<text y="14" font-weight="600" fill="{INK}">{head}</text>', top + 26 * len(times)
    for value in ticks(0, 440 / scale):
        x = left + value * scale
        body += f'<path d="M{x:.1f} 40V{bottom}" stroke="{GRID}"/>'
        body += f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{number(value)} GB/s</text>'
    for y, t, name in zip(range(top, 9999, 26), times, names(times), strict=False):
        low, high, end = (left + rate * scale for rate in (*t.gb_s_range, t.reference_gb_s))
        body += (
            f'<rect x="{left}" y="{y}" width="{t.gb_s * scale:.1f}" height="18" fill="{COLOURS[0]}" opacity="0.6"/>'
            f'<path d="M{low:.1f} {y + 5}v8m0-4H{high:.1f}m0-4v8" stroke="{INK}" stroke-width="1.5" fill="none"/>'
            f'<path d="M{end:.1f} {y - 4}v26" stroke="{LIMIT}" stroke-dasharray="5 3" stroke-width="1.5"/>'
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end" fill="{INK}">{escape(name)}</text>'
            f'<text x="{high + 6:.1f}" y="{y + 13}" fill="{INK}">{number(t.gb_s)}</text>'
        )
    return SVG(fluid(frame(head, 720, bottom + 22, body)))


def mount(path: Path) -> str:
    """The mount that holds the path, as "source on folder (type)"; an NFS source names the server's address."""
    mounts = [m for m in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(m.mountpoint)]
    deepest: Any = max(mounts, key=lambda m: len(m.mountpoint))
    return f"{deepest.device} on {deepest.mountpoint} ({deepest.fstype})"


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
    import torch

    opened = importlib.import_module("fastsafetensors").fastsafe_open
    device = f"cuda:{torch.cuda.current_device()}" if job.device == "cuda" else job.device  # it asks for the number
    for file in job.held.files:
        with opened([str(file)], device=device, nogds=True) as stream:
            yield from [stream.get_tensor(name) for name in stream.keys()]  # noqa: SIM118


def _runai(job: Job) -> Iterator[Any]:
    with importlib.import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in job.held.files])
        yield from (tensor.to(job.device) for _, tensor in streamer.get_tensors())


def _shards() -> Any:
    from kit.checkpoints import sharded as shards  # imports torch

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


def prepare() -> None:
    """Import what any method needs, so that no sample pays for it."""
    for name in (
        "safetensors.torch",
        "torch.distributed.checkpoint.hf_storage",
        "torch._dynamo",
        "kit.checkpoints.sharded",
    ):
        importlib.import_module(name)  # dynamo is what DTensor imports at its first use


def sample(method: str, path: str, state: str, device: str) -> Row:
    """One rank's part of a load: imports, headers and the process group beforehand, every page touched."""
    import torch
    import torch.distributed as dist

    prepare()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0))
        torch.empty(1, device=device)
    importlib.import_module(_PACKAGES.get(method, "torch"))
    job = Job(read_headers(Path(path)), Path(path), *join(device), device)
    (pagecache.evict if state == "cold" else pagecache.warm)(job.held.files)
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
    }  # fmt: skip


if __name__ == "__main__":  # one rank of one sample
    print(json.dumps(sample(*sys.argv[1:])), flush=True)
