"""Step time, wall time and storage of a recipe on a cluster, in closed form; `predict` adds the memory."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kit import figures
from kit.config.cluster import Cluster, Link
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast.memory import Layout, Memory, frozen_bytes, memory
from kit.forecast.shape import Shape, load_shape
from kit.forecast.work import Work, micro_batch, optimizer_step, useful_flops
from kit.show import Part, Result, format_duration

# By GPU: what a large matmul reaches of the bf16 peak, and GB/s that kernels get of its memory: 78 % of the data sheet.
# H100: kit.check.probe's 743 TFLOP/s; the H200 is its chip. A100: 250 TFLOP/s, which agrees with the published runs.
GPUS = {"H100": (0.75, 2600.0), "H200": (0.75, 3740.0), "A100": (0.8, 1590.0)}
EFFICIENCY, BYTES_PER_FLOP = 0.5, 0.003  # of any other GPU; H100 and A100 move 0.0026 and 0.005
LAUNCH_US = 5.0  # a guess for a host of one's own; a virtual machine with H100s took 11.6
# These two, kit.forecast.work.UNIT and the 78 % were fitted on the 36 rows of Llama-3.2-1B, -3B and TinyLlama in
# tests/truth/h100.csv and frozen: median error 7 % there, 9 % on the other 49 rows, and 8 % on 202 published ones of
# llm-foundry, fms-acceleration and fms-fsdp.
ATTENTION = 0.5  # of a matmul's rate, masked or not; FlashAttention-2 gets 35 % of an H100 (Shah et al. 2024)
KERNEL = 3.5  # launches: a kernel with its views, its Python and its node in the autograd graph


@dataclass(frozen=True)
class Time:
    """Seconds of one optimizer step and hours of the run; None where the profile or the sizes do not say enough.

    GPU (compute_s), host (host_s, launching kernels) and links work side by side: the range runs from the longest of
    them to their sum, and step_s, their root sum of squares, lies between.
    """

    optimizer_steps: int | None = None
    step_s: float | None = None
    step_range_s: tuple[float, float] | None = None
    compute_s: float | None = None
    host_s: float | None = None
    communication_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    mfu: float | None = None
    wall_h: float | None = None
    split_h: dict[str, float] | None = None
    evaluation_s: float | None = None


@dataclass(frozen=True)
class Storage:
    """Sizes on disk in GB: a resumable checkpoint, the exported adapter (0 for full), the model to deploy."""

    checkpoint_gb: float
    adapter_gb: float
    merged_gb: float


@dataclass(frozen=True)
class Prediction(Result):
    """The forecast of a recipe on a cluster: memory of one rank, time and storage."""

    parameters: int
    trainable_parameters: int
    memory: Memory
    time: Time
    storage: Storage
    warnings: tuple[str, ...]

    @property
    def figure(self) -> figures.Figure:
        """Allocated memory of one rank in each phase of a step, with the capacity."""
        memory = self.memory
        limit = ("capacity", memory.capacity_gib) if memory.capacity_gib else None
        return figures.bars("Memory by phase", "GiB a rank, allocated", memory.phases_gib, limit)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del plain["memory"]["warnings"]
        return plain

    def parts(self) -> Iterator[Part]:
        """Verdict, memory by phase, time, storage and warnings."""
        yield from self._memory_parts()
        yield from self._time_parts()
        stored = self.storage
        yield (
            f"Storage: checkpoint {stored.checkpoint_gb:.3g} GB, adapter {stored.adapter_gb:.3g} GB, "
            f"merged model {stored.merged_gb:.3g} GB"
        )
        yield from (f"Warning: {warning}" for warning in self.warnings)

    def _memory_parts(self) -> Iterator[Part]:
        memory = self.memory
        low, high = memory.device_gib
        yield (
            f"Memory: {memory.verdict}. Peak {memory.allocated_gib:.1f} GiB allocated in {memory.peak_phase}; "
            f"{low:.1f} to {high:.1f} GiB of {_gib(memory.capacity_gib)} on the device"
        )
        if memory.cheapest_fix:
            yield f"Cheapest change: {memory.cheapest_fix}"
        yield f"{self.parameters:,} parameters, {self.trainable_parameters:,} trained"
        yield self.figure

    def _time_parts(self) -> Iterator[Part]:
        time = self.time
        if time.step_s is None:
            return
        yield (
            f"Step: {format_duration(time.step_s)}, {time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
            f"MFU {time.mfu:.1%}; GPU {time.compute_s:.3g} s, host {time.host_s:.3g} s, "
            f"links {time.communication_s:.3g} s, overlapping"
        )
        if time.wall_h is not None and time.split_h is not None:
            split = ", ".join(f"{part} {format_duration(3600 * hours)}" for part, hours in time.split_h.items())
            yield f"Run: {time.optimizer_steps:,} steps in {format_duration(3600 * time.wall_h)} ({split})"


def _gib(capacity: float) -> str:
    return f"{capacity:.1f} GiB" if capacity else "an unknown capacity"


@dataclass(frozen=True)
class Sizes:
    """Rows and mean tokens a row of the train split, rows of the eval split; None where nothing is known."""

    train_rows: int | None
    eval_rows: int | None
    row_tokens: float

    @classmethod
    def of(cls, recipe: Recipe, manifest: dict[str, Any] | None) -> "Sizes":
        """From a prepared folder's manifest, else from the recipe's own tokens where rows are packed."""
        d = recipe.data
        if manifest:
            train, held_out = manifest["splits"]["train"], manifest["splits"].get("eval", {})
            return cls(train["rows"], held_out.get("rows", 0), train["tokens"] / max(train["rows"], 1))
        if d.tokens and d.packing:
            return cls(math.ceil(d.tokens / d.seq_len), math.ceil(d.eval_tokens / d.seq_len), float(d.seq_len))
        return cls(None, None, float(d.seq_len))


def rates(cluster: Cluster) -> tuple[float, float, float]:
    """FLOP/s of matmuls, bytes/s of other kernels, seconds that a kernel costs the host: of the profile, or of GPUS.

    A CPU process sustains nodes.gpu_bf16_tflops whatever it does.
    """
    n = cluster.nodes
    peak = n.gpu_bf16_tflops * 1e12
    if not n.gpus:
        return peak, math.inf, 0.0
    known = next((row for name, row in GPUS.items() if name in n.gpu), (EFFICIENCY, BYTES_PER_FLOP * peak / 1e9))
    return (
        peak * (n.gpu_efficiency or known[0]),
        (n.gpu_memory_gb_s or known[1]) * 1e9,
        KERNEL * (n.launch_us or LAUNCH_US) / 1e6,
    )


def _device(work: Work, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the GPU, and of the host that launches its kernels."""
    matmul, moved, kernel = rates(cluster)
    attention = matmul * (ATTENTION if cluster.nodes.gpus else 1.0)
    return work.matmul / matmul + work.attention / attention + work.moved / moved, work.kernels * kernel


def slowest_link(ranks: int, nodes: int, cluster: Cluster) -> tuple[str, Link] | None:
    """The link that a ring of so many ranks waits for: the intra link of each GPU, or the one NIC of each node."""
    links = {"intra": cluster.links.intra} if ranks > nodes else {}
    links |= {"inter": cluster.links.inter} if nodes > 1 else {}
    return min(links.items(), key=lambda item: _rate(item[1]), default=None)


def _ring(size: float, ranks: int, nodes: int, cluster: Cluster) -> float:
    """Seconds of an all-gather or reduce-scatter: each link of the ring carries (ranks - 1) / ranks of `size` bytes."""
    found = slowest_link(ranks, nodes, cluster)
    return size * (ranks - 1) / ranks / _rate(found[1]) if found else 0.0


def _rate(link: Link) -> float:
    if not link.gb_s:
        raise InputError(
            f"The cluster's {link.kind!r} link has gb_s = 0; write what it moves in one direction, in GB/s."
        )
    return link.gb_s * 1e9 * link.efficiency


def _communication(s: Shape, recipe: Recipe, cluster: Cluster) -> tuple[float, float]:
    """Seconds of communication in one optimizer step, and in one evaluation batch."""
    p, y, ga = recipe.parallel, Layout.of(recipe, cluster), recipe.schedule.grad_accum
    gradient = s.trainable(recipe) * y.compute
    if y.shards[0] == 1:  # DDP all-reduces once; ZeRO-1 and 2 reduce-scatter, ZeRO-2 in each micro-batch, and gather
        return ((ga if y.shards[1] > 1 else 1) + 1) * _ring(gradient, recipe.world_size, p.nodes, cluster), 0.0
    ranks, nodes = y.shards[0], p.nodes if y.shards[0] == recipe.world_size else 1
    weights = frozen_bytes(s, recipe.tuning.method, y.frozen)[0] + gradient
    root = {"fsdp1": s.embedding + s.head, "fsdp2": s.head or s.embedding}.get(p.strategy, 0) * y.compute
    again = 0 if p.sharding == "grad_op" else weights - root  # backward gathers what was not kept
    micro = _ring(weights + again, ranks, nodes, cluster)  # no third gather: checkpointing sits inside the unit
    step = ga * micro + _ring(gradient, ranks, nodes, cluster)
    if nodes < p.nodes:  # hybrid: the shards' gradients are all-reduced between nodes
        step += 2 * gradient * (p.nodes - 1) / p.nodes / _rate(cluster.links.inter)
    return step, _ring(weights, ranks, nodes, cluster)


def disk_rate(cluster: Cluster, path: str) -> float:
    """Bytes/s of the mount that holds the path; 1 GB/s where the profile gives none.

    Paths are compared by their components, relative ones from the working directory; the deepest mount wins.
    """
    place = Path(path).expanduser().absolute()
    mounts = {Path(mount.path).expanduser().absolute(): mount.gb_s for mount in cluster.storage.values() if mount.gb_s}
    holding = [mount for mount in mounts if place.is_relative_to(mount)]
    return mounts[max(holding, key=lambda mount: len(mount.parts))] * 1e9 if holding else 1e9


def _storage(s: Shape, recipe: Recipe, cluster: Cluster) -> Storage:
    """Weights that train and optimizer state; the adapter as trained; the merged model in the model's dtype."""
    y, n, full = Layout.of(recipe, cluster), s.trainable(recipe), recipe.tuning.method == "full"
    stored = 4 if recipe.model.dtype == "float32" else 2
    return Storage(n * (y.trained + y.optimizer) / 1e9, 0.0 if full else n * y.trained / 1e9, s.total * stored / 1e9)


def _time(s: Shape, recipe: Recipe, cluster: Cluster, sizes: Sizes, stored: Storage) -> Time:
    k = recipe.schedule
    steps = k.max_steps or (None if sizes.train_rows is None else recipe.optimizer_steps(sizes.train_rows))
    rate = cluster.nodes.gpu_bf16_tflops * 1e12
    if not rate:
        return Time(optimizer_steps=steps)
    row = sizes.row_tokens
    micro, _ = micro_batch(s, recipe, k.micro_batch * row, row)
    _, forward = micro_batch(s, recipe, k.eval_batch * row, row)
    last, comm, comm_eval = optimizer_step(s, recipe, cluster), *_communication(s, recipe, cluster)
    gpu, host = _device(micro * k.grad_accum, cluster)
    parts, update = (gpu, host, comm), max(_device(last, cluster))
    # GPU, host and links work at once and wait for each other now and then: between the longest and the sum
    low, high, step = (seconds + update for seconds in (max(parts), sum(parts), math.hypot(*parts)))
    tokens = k.micro_batch * k.grad_accum * row
    mfu = useful_flops(s, recipe, tokens, row) / step / rate
    time = Time(steps, step, (low, high), gpu + update, host, comm, tokens / step, mfu)
    if steps is None:
        return time
    batches = math.ceil((sizes.eval_rows or 0) / (k.eval_batch * recipe.world_size))
    evaluation = batches * math.hypot(*_device(forward, cluster), comm_eval)
    # kit.train evaluates at the start, every eval_every steps, and at the end
    evaluations = 1 + (math.ceil(steps / k.eval_every) if k.eval_every else 1)
    saves = math.ceil(steps / k.save_every) if k.save_every else 1
    seconds = {
        "train": steps * step,
        "eval": evaluations * evaluation,
        "save": saves * stored.checkpoint_gb * 1e9 / disk_rate(cluster, cluster.paths.runs),
        "load": recipe.parallel.nodes * stored.merged_gb * 1e9 / disk_rate(cluster, cluster.paths.hf_home),
    }
    split = {part: value / 3600 for part, value in seconds.items()}
    return replace(time, wall_h=sum(split.values()), split_h=split, evaluation_s=evaluation)


def _warnings(recipe: Recipe, cluster: Cluster, sizes: Sizes, time: Time) -> Iterator[str]:
    if sizes.train_rows is None and not recipe.schedule.max_steps:
        yield "The data's size is unknown, so only the step is forecast: prepare it, or set data.tokens with packing."
    elif sizes.eval_rows is None and recipe.schedule.eval_every:
        yield "The size of the eval split is unknown; the forecast leaves evaluation out."
    if time.step_s is None:
        yield f"Cluster {cluster.name} gives no nodes.gpu_bf16_tflops, so no times are forecast."
    elif recipe.parallel.offload:
        yield "Offloaded transfers and the optimizer step on the CPU take time that the forecast leaves out."
    if time.compute_s and time.communication_s and time.communication_s > 3 * time.compute_s:
        yield (
            f"Communication takes {time.communication_s / time.compute_s:.0f} times as long as compute: a larger "
            "micro_batch with less grad_accum, hybrid sharding where it fits, or a faster link, would pay."
        )
    if time.host_s and time.compute_s and time.host_s > 1.5 * time.compute_s:
        yield (
            f"The host takes {time.host_s:.2f} s to launch what the GPU does in {time.compute_s:.2f}: a larger "
            "micro_batch with less grad_accum would pay."
        )
    if recipe.parallel.strategy == "fsdp1" and recipe.tuning.method != "full" and recipe.world_size > 1:
        yield "FSDP1 gathers every lora_A and lora_B by itself, thousands of times a step; fsdp2 does not."
    if time.wall_h and time.split_h and time.split_h["eval"] > 0.25 * time.wall_h:
        yield f"Evaluation takes {time.split_h['eval'] / time.wall_h:.0%} of the run; raise eval_every or eval_batch."


def predict(
    recipe: Recipe, cluster: Cluster, manifest: dict[str, Any] | None = None, shape: Shape | None = None
) -> Prediction:
    """Memory, time and storage of a run; `manifest` is that of a prepared folder. Raises InputError.

    `shape`: the recipe's model, where it is already loaded.
    On a CPU cluster `nodes.gpu_bf16_tflops` is what one process sustains in fp32; on GPUs it is the dense bf16 peak.
    """
    s = shape or load_shape(recipe.model.name, cluster.paths.hf_home)
    sizes, found = Sizes.of(recipe, manifest), memory(recipe, cluster, s)
    stored = _storage(s, recipe, cluster)
    time = _time(s, recipe, cluster, sizes, stored)
    warnings = (*found.warnings, *_warnings(recipe, cluster, sizes, time))
    return Prediction(s.total, s.trainable(recipe), found, time, stored, warnings)
