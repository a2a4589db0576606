"""Fit: the memory of one rank as an interval, whether the cluster has it, and what to change where it has not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.activations import Terms
from kit.forecast.host import HostMemory
from kit.forecast.layout import GIB, Layout
from kit.forecast.memory import phases
from kit.forecast.shape import Shape, load_shape
from kit.forecast.split import check_formulas

Verdict = Literal["fits", "tight", "does not fit", "unknown"]


@dataclass(frozen=True)
class Memory:
    """The forecast for one rank in GiB; `reserved` is the allocator's, `device` what nvidia-smi or a process shows.

    host_gib: what all processes of a node take of its memory, of a job on GPUs.
    """

    allocated_gib: float
    reserved_gib: tuple[float, float]
    device_gib: tuple[float, float]
    peak_phase: str
    terms_gib: Terms
    capacity_gib: float
    verdict: Verdict
    cheapest_fix: str
    phases_gib: dict[str, Terms]
    warnings: tuple[str, ...]
    host_gib: Terms


@dataclass(frozen=True)
class Overhead:
    """What the allocator holds over what is allocated, as factors, and GiB of the process outside it: low and high."""

    reserved: tuple[float, float]
    process: tuple[float, float]

    # Cached and fragmented blocks, more where collectives have pools of their own: bounds of the rows of every second
    # model of tests/truth/h100.csv, which hold 33 of the 40 others (device: 35). Then the CUDA context, and NCCL.
    @classmethod
    def of(cls, recipe: Recipe, on_cpu: bool) -> "Overhead":
        """By whether ranks gather weights or are several; a CPU process has 0.4 to 1.2 GiB of libraries."""
        if on_cpu:
            return cls((1.0, 1.3), (0.4, 1.2))
        reserved = (1.03, 1.3) if _gathers(recipe) else (1.01, 1.12)
        return cls(reserved, (1.8, 2.0) if recipe.world_size > 1 else (1.3, 1.35))


def _gathers(recipe: Recipe) -> bool:
    return recipe.world_size > 1 and recipe.parallel.strategy not in ("ddp", "zero1", "zero2")


def memory(recipe: Recipe, cluster: Cluster, shape: Shape | None = None, fix: bool = True) -> Memory:
    """Does it fit, what is its peak made of, and which single change helps most cheaply. Raises InputError.

    shape: the recipe's model, where it is already loaded. fix: whether to look for that change.
    """
    shape = shape or load_shape(recipe.model.name, cluster.paths.hf_home)
    shape.check(recipe)
    check_formulas(recipe, cluster, shape)
    found = _forecast(shape, recipe, cluster)
    if found.verdict in ("fits", "unknown") or not fix:
        return found
    return replace(found, cheapest_fix=_cheapest_fix(shape, recipe, cluster))


def _forecast(shape: Shape, recipe: Recipe, cluster: Cluster) -> Memory:
    on_cpu = cluster.nodes.gpus == 0
    found = {
        phase: {term: size / GIB for term, size in terms.items() if size}
        for phase, terms in phases(shape, recipe, cluster).items()
    }
    peak = max(found, key=lambda phase: sum(found[phase].values()))
    allocated = sum(found[peak].values())
    overhead = Overhead.of(recipe, on_cpu)
    reserved = (
        overhead.reserved[0] * allocated,
        overhead.reserved[1] * allocated + _old_buckets(shape, recipe, cluster),
    )
    device = (reserved[0] + overhead.process[0], reserved[1] + overhead.process[1])
    capacity = cluster.nodes.ram_gib / recipe.parallel.gpus_per_node if on_cpu else cluster.nodes.gpu_memory_gib
    verdict = _verdict(device, capacity, sure=_is_sure(shape, recipe, on_cpu))
    host = None if on_cpu else HostMemory.of(shape, recipe, cluster)
    warnings = tuple(_warnings(shape, recipe, cluster, host))
    terms = host.terms() if host else {}
    return Memory(allocated, reserved, device, peak, found[peak], capacity, verdict, "", found, warnings, terms)


def _old_buckets(shape: Shape, recipe: Recipe, cluster: Cluster) -> float:
    """GiB of DDP's first buckets, which NCCL may still hold while their successors are there (README.md)."""
    if cluster.nodes.gpus == 0 or recipe.parallel.strategy != "ddp" or recipe.world_size == 1:
        return 0.0
    return shape.trainable(recipe) * Layout.of(recipe, cluster).trained_bytes / GIB


def _verdict(device: tuple[float, float], capacity: float, sure: bool) -> Verdict:
    """unknown: the profile does not give the memory of its GPUs. sure: nothing unexplained was seen in such jobs."""
    if not capacity:
        return "unknown"
    if device[0] > capacity:
        return "does not fit"
    return "fits" if sure and device[1] <= capacity else "tight"


def _is_sure(shape: Shape, recipe: Recipe, on_cpu: bool) -> bool:
    return shape.checked and not _quantized_shards(recipe) and not _foreach_hazard(shape, recipe, on_cpu)


def _quantized_shards(recipe: Recipe) -> bool:
    """One published run of this kind took 10 GiB more than the arithmetic."""
    return recipe.tuning.method == "qlora" and _gathers(recipe)


def _foreach_hazard(shape: Shape, recipe: Recipe, on_cpu: bool) -> bool:
    """Seen on 4 H100s, cause unknown: some 40 GiB beyond the arithmetic in the first step of Llama-8B and Qwen2-7B.

    Not seen on Mistral-7B and TinyLlama (untied, 32k words) and Llama-3B (tied): so of an untied head of 128k words.
    """
    foreach = recipe.schedule.optimizer == "adamw_torch" and recipe.parallel.strategy == "fsdp2" and not on_cpu
    large = not shape.tied and shape.vocab >= 128_000 and shape.total >= 7e9
    return foreach and recipe.tuning.method == "full" and large


def _warnings(shape: Shape, recipe: Recipe, cluster: Cluster, host: HostMemory | None) -> Iterator[str]:
    parallel, nodes, layout = recipe.parallel, cluster.nodes, Layout.of(recipe, cluster)
    if nodes.gpus and not nodes.gpu_memory_gib:
        yield f"No verdict: set nodes.gpu_memory_gib in the profile of {cluster.name}."
    yield from shape.notes
    rows = min(shape.hidden, *(linear.outputs for linear in shape.linears))
    if recipe.tuning.method != "full":
        rows = min(rows, recipe.tuning.r)
    if parallel.strategy == "fsdp2" and layout.weight_ranks > rows:
        yield (
            f"FSDP2 spreads rows over {layout.weight_ranks} ranks, and the smallest tensor has {rows}: some ranks hold "
            "none of it."
        )
    if _foreach_hazard(shape, recipe, nodes.gpus == 0):
        yield (
            "adamw_torch (foreach) under FSDP2 ran out of 80 GB in the first optimizer step of full fine-tunes like "
            "this one, 40 GiB above the forecast; set schedule.optimizer = adamw_torch_fused."
        )
    if parallel.nodes > nodes.count or 0 < nodes.gpus < parallel.gpus_per_node:
        yield (
            f"The recipe asks for {parallel.nodes} x {parallel.gpus_per_node} processes; cluster {cluster.name} has "
            f"{nodes.count} nodes of {nodes.gpus or nodes.cpus}."
        )
    if recipe.tuning.method == "qlora" and parallel.strategy.startswith("fsdp"):
        yield "The forecast takes bnb_4bit_quant_storage = bfloat16; FSDP does not shard 4-bit weights stored as uint8."
    if host and host.peak > nodes.ram_gib:
        yield (
            f"The processes of a node take {host.peak:.0f} GiB of its memory as they {host.fullest}, and nodes.ram_gib "
            f"is {nodes.ram_gib:.0f}."
        )


def _changes(recipe: Recipe, on_cpu: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Single changes that may save memory, as a section of the recipe and its new values; the least costly first."""
    parallel, schedule, method = recipe.parallel, recipe.schedule, recipe.tuning.method
    every_linear: dict[str, Any] = {"target_modules": ("all-linear",)} if method == "full" else {}
    if schedule.optimizer == "adamw_torch" and not on_cpu:
        yield "schedule", {"optimizer": "adamw_torch_fused"}
    if not parallel.recomputes:
        yield "parallel", {"activation_checkpointing": True}
    if schedule.micro_batch > 1:
        yield "schedule", {"micro_batch": 1, "grad_accum": schedule.grad_accum * schedule.micro_batch}
    if parallel.sharding != "full":
        yield "parallel", {"sharding": "full"}
    if parallel.strategy != "fsdp2" and recipe.world_size > 1:
        yield "parallel", {"strategy": "fsdp2"}
    if method == "full":
        yield "tuning", {"method": "lora"} | every_linear
    if method != "qlora" and recipe.model.base != "fp8" and not on_cpu:
        yield "tuning", {"method": "qlora"} | every_linear
    if not parallel.offloads and not on_cpu:
        yield "parallel", {"offload": "cpu"}
    yield from (("parallel", {"nodes": parallel.nodes * times}) for times in (2, 4, 8))


def _cheapest_fix(shape: Shape, recipe: Recipe, cluster: Cluster) -> str:
    """The first single change that fits, else that is tight, else the one that saves most, with its new GiB."""
    tried: dict[str, Memory] = {}
    for section, values in _changes(recipe, cluster.nodes.gpus == 0):
        words = ", ".join(f"{section}.{key} = {json.dumps(value)}" for key, value in values.items())
        changed = replace(recipe, **{section: replace(getattr(recipe, section), **values)})
        tried[words] = _forecast(shape, changed, cluster)
    for verdict, words in (("fits", "it fits"), ("tight", "it is tight")):
        for change, found in tried.items():
            if found.verdict == verdict:
                return f"With {change} {words}: {found.allocated_gib:.1f} GiB allocated."
    change, found = min(tried.items(), key=lambda item: item[1].allocated_gib)
    return f"No single change is enough; {change} comes closest with {found.allocated_gib:.1f} GiB."
