"""Step time, wall time and storage of a recipe on a cluster, in closed form; `predict` adds the memory."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from kit import figures
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast import limits
from kit.forecast.choices import Decision, resolve
from kit.forecast.fit import Memory, memory
from kit.forecast.paths import describe
from kit.forecast.shape import Shape, load_shape
from kit.forecast.steptime import Sizes, Storage, Time, storage_of, time_of
from kit.show import Part, Result, format_bytes, format_count, format_duration


@dataclass(frozen=True)
class Prediction(Result):
    """The forecast of a recipe on a cluster: memory of one rank, time and storage.

    path: which code the numbers hold for. choices: what each "auto" of the recipe became. notes: advice.
    """

    parameters: int
    trainable_parameters: int
    memory: Memory
    time: Time
    storage: Storage
    warnings: tuple[str, ...]
    path: str = ""
    choices: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def figure(self) -> figures.Figure:
        """Allocated memory of one rank in each phase of a step, with the capacity."""
        memory = self.memory
        limit = ("capacity", memory.capacity_gib) if memory.capacity_gib else None
        return figures.bars("Memory by phase", "GiB/rank, allocated", memory.phases_gib, limit)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        del plain["memory"]["warnings"]
        return plain

    def parts(self) -> Iterator[Part]:
        """Verdict, memory by phase, time, storage and warnings."""
        yield from self._memory_parts()
        yield from self._time_parts()
        sizes = (self.storage.checkpoint_gb, self.storage.adapter_gb, self.storage.merged_gb)
        checkpoint, adapter, merged = (format_bytes(1e9 * size) for size in sizes)
        yield f"Storage: checkpoint {checkpoint}, adapter {adapter}, merged model {merged}"
        yield f"Numbers hold for: {self.path}"
        yield from (f"Chosen: {choice}" for choice in self.choices)
        yield from (f"Note: {note}" for note in self.notes)
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
        yield f"{format_count(self.parameters)} parameters, {format_count(self.trainable_parameters)} trained"
        yield self.figure

    def _time_parts(self) -> Iterator[Part]:
        time = self.time
        if time.step_s is None:
            return
        yield (
            f"Step: {format_duration(time.step_s)}, {time.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
            f"{_utilisation(time)}; GPU {time.compute_s:.3g} s, host {time.host_s:.3g} s, "
            f"links {time.communication_s:.3g} s, overlapping; bound by the {time.bound}"
        )
        if time.step_range_s and not time.probed:
            low, high = map(format_duration, time.step_range_s)
            yield f"The cluster is not probed, so a step may take {low} to {high}; kit check --probe narrows that."
        if time.wall_h is not None and time.split_h is not None:
            split = ", ".join(f"{part} {format_duration(3600 * hours)}" for part, hours in time.split_h.items())
            yield f"Run: {time.optimizer_steps:,} steps in {format_duration(3600 * time.wall_h)} ({split})"


def _utilisation(time: Time) -> str:
    """MFU, HFU where it differs, and the share of the measured matmul rate where the profile has one."""
    text = f"MFU {time.mfu:.1%}"
    if time.hfu and time.mfu and time.hfu > 1.02 * time.mfu:
        text += f" (HFU {time.hfu:.1%}, with recomputation and masked pairs)"
    if time.of_matmul_rate:
        text += f", {time.of_matmul_rate:.0%} of the measured matmul rate"
    return text


def _gib(capacity: float) -> str:
    return f"{capacity:.1f} GiB" if capacity else "an unknown capacity"


def _warnings(recipe: Recipe, cluster: Cluster, sizes: Sizes, time: Time) -> Iterator[str]:
    if sizes.train_rows is None and not recipe.schedule.max_steps:
        yield "The data's size is unknown, so only the step is forecast: prepare it, or set data.tokens with packing."
    elif sizes.eval_rows is None and recipe.schedule.eval_every:
        yield "The size of the eval split is unknown; the forecast leaves evaluation out."
    if time.step_s is None:
        yield f"No times are forecast: set nodes.gpu_bf16_tflops in the profile of {cluster.name}."
    elif recipe.parallel.offloads:
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
    recipe: Recipe,
    cluster: Cluster,
    manifest: Mapping[str, Any] | None = None,
    shape: Shape | None = None,
    compiler: bool | None = None,
) -> Prediction:
    """Memory, time and storage of a run; `manifest` is that of a prepared folder. Raises InputError.

    shape: the recipe's model, where it is already loaded. compiler: whether the nodes have a C compiler; None: as the
    profile says. Each "auto" of the recipe is resolved first.
    On a CPU cluster `nodes.gpu_bf16_tflops` is what one process sustains in fp32; on GPUs it is the dense bf16 peak.
    """
    s = shape or load_shape(recipe.model.name, cluster.paths.hf_home)
    if problem := limits.attention_problem(recipe, cluster):
        raise InputError(problem)
    resolved = resolve(recipe, cluster, manifest, s, compiler)
    recipe = resolved.recipe
    sizes, found = Sizes.of(recipe, manifest), memory(recipe, cluster, s)
    stored = storage_of(s, recipe, cluster)
    time = time_of(s, recipe, cluster, sizes, stored)
    refused = limits.problems(recipe, cluster, compiler)
    warnings = (*found.warnings, *_warnings(recipe, cluster, sizes, time), *refused)
    path = describe(recipe, cluster.nodes.gpus > 0, sizes.document_tokens is not None)
    return Prediction(
        s.total,
        s.trainable(recipe),
        found,
        time,
        stored,
        warnings,
        path,
        resolved.decisions,
        resolved.notes,
    )
