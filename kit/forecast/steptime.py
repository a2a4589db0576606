"""Seconds of a step, of a run and of its saves, in closed form: what GPU, host, links and disks do in them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit.config.cluster import Cluster, Link
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast.layout import FrozenWeights, Layout
from kit.forecast.paths import FP8_SPEED, VARLEN_ATTENTION
from kit.forecast.shape import Shape
from kit.forecast.split import check_formulas
from kit.forecast.work import Work, micro_batch, optimizer_step, useful_flops

# By GPU: what a large matmul reaches of the bf16 peak, and GB/s that kernels get of its memory: 78 % of the data sheet.
# H100: kit.check.probe's 743 TFLOP/s. H200: both as probed (tests/truth/probe_h200x2.json). A100: 250 TFLOP/s, which
# agrees with the published runs.
GPUS = {"H100": (0.75, 2600.0), "H200": (0.77, 2700.0), "A100": (0.8, 1590.0)}
EFFICIENCY, BYTES_PER_FLOP = 0.5, 0.003  # of any other GPU; H100 and A100 move 0.0026 and 0.005
LAUNCH_US = 10.0  # between the two hosts that were probed, both virtual machines: 8.6 and 11.6
# A host that was not probed may launch kernels in half or twice that: the range of a step without a probe says so.
UNPROBED_LAUNCH_US = (5.0, 20.0)
# These two, kit.forecast.work.UNIT and the 78 % were fitted on the 36 rows of Llama-3.2-1B, -3B and TinyLlama in
# tests/truth/h100.csv and frozen: median error 7 % there, 9 % on the other 49 rows, and 8 % on 202 published ones of
# llm-foundry, fms-acceleration and fms-fsdp.
ATTENTION = 0.5  # of a matmul's rate, masked or not; FlashAttention-2 gets 35 % of an H100 (Shah et al. 2024)
KERNEL = 3.5  # launches: a kernel with its views, its Python and its node in the autograd graph


@dataclass(frozen=True)
class Time:
    """Seconds of one optimizer step and hours of the run; None where the profile or the sizes do not say enough.

    GPU (compute_s), host (host_s, launching kernels) and links work side by side: the range runs from the longest of
    them to their sum, and step_s, their root sum of squares, is between. mfu counts the model's FLOPs (attention
    inside of documents only), hfu also those of recomputation and of pairs that are masked out, both over the peak;
    of_matmul_rate the model's FLOPs over the measured rate of a large matmul, where the profile has one. bound: which
    of the three takes longest: GPU, host or links. probed: whether the profile has measured rates; without them the
    range is that of a faster and a slower host.
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
    hfu: float | None = None
    of_matmul_rate: float | None = None
    bound: str | None = None
    probed: bool = False


@dataclass(frozen=True)
class Storage:
    """Sizes on disk in GB: a resumable checkpoint, the exported adapter (0 for full), the model to deploy."""

    checkpoint_gb: float
    adapter_gb: float
    merged_gb: float


@dataclass(frozen=True)
class Sizes:
    """Rows and mean tokens a row of the train split, rows of the eval split; None where nothing is known.

    document_tokens: the mean length of a document, weighted by tokens, from the manifest's histogram of lengths.
    """

    train_rows: int | None
    eval_rows: int | None
    row_tokens: float
    document_tokens: float | None = None

    @classmethod
    def of(cls, recipe: Recipe, manifest: Mapping[str, Any] | None) -> "Sizes":
        """From a prepared folder's manifest, else from the recipe's own tokens where rows are packed."""
        d = recipe.data
        if manifest:
            train, held_out = manifest["splits"]["train"], manifest["splits"].get("eval", {})
            mean = train["tokens"] / max(train["rows"], 1)
            return cls(train["rows"], held_out.get("rows", 0), mean, _document_tokens(manifest))
        if d.tokens and d.packing:
            return cls(math.ceil(d.tokens / d.seq_len), math.ceil(d.eval_tokens / d.seq_len), float(d.seq_len))
        return cls(None, None, float(d.seq_len))


def _document_tokens(manifest: Mapping[str, Any]) -> float | None:
    """Sum of squared lengths over the sum of lengths; documents count as the upper edge of their bin."""
    lengths = manifest.get("lengths") or {"upto": [], "documents": []}
    pairs = list(zip(lengths["upto"], lengths["documents"], strict=True))
    tokens = sum(count * edge for edge, count in pairs)
    return sum(count * edge**2 for edge, count in pairs) / tokens if tokens else None


@dataclass(frozen=True)
class Rates:
    """FLOP/s of matmuls, bytes/s of other kernels, seconds that a kernel costs the host: of the profile, or of GPUS."""

    matmul: float
    moved: float
    kernel_s: float

    @classmethod
    def of(cls, cluster: Cluster) -> "Rates":
        """The rates of one GPU. A CPU process sustains nodes.gpu_bf16_tflops whatever it does."""
        nodes = cluster.nodes
        peak = nodes.gpu_bf16_tflops * 1e12
        if not nodes.gpus:
            return cls(peak, math.inf, 0.0)
        other = (EFFICIENCY, BYTES_PER_FLOP * peak / 1e9)
        efficiency, gb_s = next((row for name, row in GPUS.items() if name in nodes.gpu), other)
        return cls(
            peak * (nodes.gpu_efficiency or efficiency),
            (nodes.gpu_memory_gb_s or gb_s) * 1e9,
            KERNEL * (nodes.launch_us or LAUNCH_US) / 1e6,
        )


@dataclass(frozen=True)
class DeviceSeconds:
    """Seconds of the GPU for some work, and of the host that launches its kernels."""

    gpu: float
    host: float

    @classmethod
    def of(cls, work: Work, recipe: Recipe, cluster: Cluster) -> "DeviceSeconds":
        """By the rates of the cluster."""
        rates = Rates.of(cluster)
        share = VARLEN_ATTENTION if recipe.model.attention == "varlen" else ATTENTION
        attention = rates.matmul * (share if cluster.nodes.gpus else 1.0)
        products = work.matmul / rates.matmul + work.fp8 / (rates.matmul * FP8_SPEED)
        return cls(products + work.attention / attention + work.moved / rates.moved, work.kernels * rates.kernel_s)

    @property
    def longest(self) -> float:
        """Of the two."""
        return max(self.gpu, self.host)


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


@dataclass(frozen=True)
class Communication:
    """Seconds of communication: in one optimizer step, and in one batch of an evaluation."""

    step_s: float
    evaluation_s: float

    @classmethod
    def of(cls, shape: Shape, recipe: Recipe, cluster: Cluster) -> "Communication":
        """All-gathers and reduce-scatters of a ring, one after another."""
        layout = Layout.of(recipe, cluster)
        gradient = shape.trainable(recipe) * layout.compute_bytes
        if layout.weight_ranks == 1:
            return cls._of_gradients(gradient, layout, recipe, cluster)
        return cls._of_shards(gradient, layout, shape, recipe, cluster)

    @classmethod
    def _of_gradients(cls, gradient: float, layout: Layout, recipe: Recipe, cluster: Cluster) -> "Communication":
        """DDP all-reduces once; ZeRO-1 and 2 reduce-scatter, ZeRO-2 in each micro-batch, and gather."""
        reductions = recipe.schedule.grad_accum if layout.gradient_ranks > 1 else 1
        return cls((reductions + 1) * _ring(gradient, recipe.world_size, recipe.parallel.nodes, cluster), 0.0)

    @classmethod
    def _of_shards(
        cls, gradient: float, layout: Layout, shape: Shape, recipe: Recipe, cluster: Cluster
    ) -> "Communication":
        """Each micro-batch gathers the weights in forward and, what was not kept, in backward.

        Recomputation under activation checkpointing gathers nothing more: it is inside the FSDP unit.
        """
        parallel, ranks = recipe.parallel, layout.weight_ranks
        nodes = parallel.nodes if ranks == recipe.world_size else 1
        weights = FrozenWeights.of(shape, recipe, layout.frozen_bytes).model + gradient
        root = {"fsdp1": shape.embedding + shape.head, "fsdp2": shape.head or shape.embedding}.get(parallel.strategy, 0)
        again = 0 if parallel.sharding == "grad_op" else weights - root * layout.compute_bytes
        gathers = recipe.schedule.grad_accum * _ring(weights + again, ranks, nodes, cluster)
        step = gathers + _ring(gradient, ranks, nodes, cluster)
        if nodes < parallel.nodes:  # hybrid: the shards' gradients are all-reduced between nodes
            step += 2 * gradient * (parallel.nodes - 1) / parallel.nodes / _rate(cluster.links.inter)
        return cls(step, _ring(weights, ranks, nodes, cluster))


def disk_rate(cluster: Cluster, path: str) -> float:
    """Bytes/s of the mount that holds the path; 1 GB/s where the profile gives none.

    Paths are compared by their components, relative ones from the working directory; the deepest mount wins.
    """
    place = Path(path).expanduser().absolute()
    mounts = {Path(mount.path).expanduser().absolute(): mount.gb_s for mount in cluster.storage.values() if mount.gb_s}
    holding = [mount for mount in mounts if place.is_relative_to(mount)]
    return mounts[max(holding, key=lambda mount: len(mount.parts))] * 1e9 if holding else 1e9


def storage_of(shape: Shape, recipe: Recipe, cluster: Cluster) -> Storage:
    """Weights that train and optimizer state; the adapter as trained; the merged model in the model's dtype."""
    layout, trained = Layout.of(recipe, cluster), shape.trainable(recipe)
    stored = 4 if recipe.model.dtype == "float32" else 2
    return Storage(
        checkpoint_gb=trained * (layout.trained_bytes + layout.optimizer_bytes) / 1e9,
        adapter_gb=0.0 if recipe.tuning.method == "full" else trained * layout.trained_bytes / 1e9,
        merged_gb=shape.total * stored / 1e9,
    )


def time_of(shape: Shape, recipe: Recipe, cluster: Cluster, sizes: Sizes, stored: Storage) -> Time:
    """Seconds of a step and hours of the run; None in all but the steps where the profile has no peak of its GPUs.

    Raises InputError for a recipe without formulas.
    """
    check_formulas(recipe, cluster, shape)
    schedule = recipe.schedule
    steps = schedule.max_steps or (None if sizes.train_rows is None else recipe.optimizer_steps(sizes.train_rows))
    if not cluster.nodes.gpu_bf16_tflops:
        return Time(optimizer_steps=steps)
    communication = Communication.of(shape, recipe, cluster)
    time = replace(_step(shape, recipe, cluster, sizes, communication), optimizer_steps=steps)
    if steps is None or time.step_s is None:
        return time
    evaluation = _evaluation_s(shape, recipe, cluster, sizes, communication)
    # kit.train evaluates at the start, every eval_every steps, and at the end
    evaluations = 1 + (math.ceil(steps / schedule.eval_every) if schedule.eval_every else 1)
    saves = math.ceil(steps / schedule.save_every) if schedule.save_every else 1
    seconds = {
        "train": steps * time.step_s,
        "eval": evaluations * evaluation,
        "save": saves * stored.checkpoint_gb * 1e9 / disk_rate(cluster, cluster.paths.runs),
        "load": recipe.parallel.nodes * stored.merged_gb * 1e9 / disk_rate(cluster, cluster.paths.hf_home),
    }
    split = {part: value / 3600 for part, value in seconds.items()}
    return replace(time, wall_h=sum(split.values()), split_h=split, evaluation_s=evaluation)


def _step(shape: Shape, recipe: Recipe, cluster: Cluster, sizes: Sizes, communication: Communication) -> Time:
    """One optimizer step: GPU, host and links work at once and wait for each other now and then."""
    schedule, row = recipe.schedule, sizes.row_tokens
    work = micro_batch(shape, recipe, schedule.micro_batch * row, row, sizes.document_tokens).training
    work = work * schedule.grad_accum
    device = DeviceSeconds.of(work, recipe, cluster)
    update = DeviceSeconds.of(optimizer_step(shape, recipe, cluster), recipe, cluster).longest
    parts = (device.gpu, device.host, communication.step_s)
    step = math.hypot(*parts) + update
    probed = not cluster.nodes.gpus or bool(cluster.nodes.launch_us)
    low, high = max(parts), sum(parts)
    if not probed:
        faster, slower = (device.host * launch_us / LAUNCH_US for launch_us in UNPROBED_LAUNCH_US)
        low, high = max(device.gpu, faster, communication.step_s), device.gpu + slower + communication.step_s
    tokens, peak = schedule.micro_batch * schedule.grad_accum * row, cluster.nodes.gpu_bf16_tflops * 1e12
    model_rate = useful_flops(shape, recipe, tokens, sizes.document_tokens or row) / step
    measured = bool(cluster.nodes.gpus and cluster.nodes.gpu_efficiency)
    return Time(
        step_s=step,
        step_range_s=(low + update, high + update),
        compute_s=device.gpu + update,
        host_s=device.host,
        communication_s=communication.step_s,
        tokens_per_s_per_gpu=tokens / step,
        mfu=model_rate / peak,
        hfu=work.flops / step / peak,
        of_matmul_rate=model_rate / Rates.of(cluster).matmul if measured else None,
        bound=max(zip(parts, ("GPU", "host", "links"), strict=True))[1],
        probed=probed,
    )


def _evaluation_s(shape: Shape, recipe: Recipe, cluster: Cluster, sizes: Sizes, communication: Communication) -> float:
    """Seconds of one evaluation of the held-out split."""
    row, rows = sizes.row_tokens, recipe.schedule.eval_batch
    work = micro_batch(shape, recipe, rows * row, row, sizes.document_tokens).evaluation
    device = DeviceSeconds.of(work, recipe, cluster)
    batches = math.ceil((sizes.eval_rows or 0) / (rows * recipe.world_size))
    return batches * math.hypot(device.gpu, device.host, communication.evaluation_s)
