"""Explore: what other settings of a recipe would take, as the figures and tables of notebook 02."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kit import figures
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.figures import Figure
from kit.forecast.choices import resolve
from kit.forecast.fit import Memory
from kit.forecast.fit import memory as concrete_memory
from kit.forecast.gpus import GpuType
from kit.forecast.timing import Prediction, predict
from kit.show import Mark, Part, Result, Table

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16)
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
VERDICT_MARKS: dict[str, Mark] = {"tight": "warning", "does not fit": "bad"}
STRATEGIES = [(name, "full") for name in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")]
STRATEGIES += [("fsdp2", "grad_op"), ("fsdp1", "hybrid")]


@dataclass(frozen=True)
class Setting:
    """A recipe on a cluster, with the manifest of the data where they are prepared: one setting, one forecast."""

    recipe: Recipe
    cluster: Cluster
    manifest: Mapping[str, Any] | None = None

    def changed(self, **changes: Any) -> "Setting":
        """The setting with dotted keys of the recipe replaced; the manifest is that of rows of the new length.

        Raises InputError as `Recipe.override` does.
        """
        recipe = self.recipe.override(**changes)
        before, after = self.recipe.data.seq_len, recipe.data.seq_len
        manifest = _resized(self.manifest, before, after) if self.manifest and before != after else self.manifest
        return Setting(recipe, self.cluster, manifest)

    def on_gpus(self, gpu: GpuType) -> "Setting":
        """The setting on nodes with this kind of GPU; nothing that was measured on the others is kept."""
        nodes = replace(
            self.cluster.nodes, gpus=max(8, self.cluster.nodes.gpus), gpu=gpu.name, gpu_memory_gib=gpu.memory_gib,
            gpu_bf16_tflops=gpu.bf16_tflops, gpu_efficiency=0.0, gpu_memory_gb_s=0.0, launch_us=0.0,
        )  # fmt: skip
        links = replace(self.cluster.links, intra=gpu.link)
        return Setting(self.recipe, replace(self.cluster, nodes=nodes, links=links), self.manifest)

    def predict(self) -> Prediction:
        """The forecast. Raises InputError."""
        return predict(self.recipe, self.cluster, self.manifest)


def _resized(manifest: Mapping[str, Any], before: int, after: int) -> dict[str, Any]:
    """The manifest as if the same tokens were packed into rows of another length."""
    splits = {
        name: split | {"rows": math.ceil(split["rows"] * before / after)} for name, split in manifest["splits"].items()
    }
    return {**manifest, "splits": splits}


@dataclass(frozen=True)
class Alternatives(Result):
    """What other settings of a recipe would take."""

    memory_map: Figure
    time_by_nodes: Figure
    strategies: Table
    sizes: Table

    def as_dict(self) -> dict[str, Any]:
        """The tables as lists of rows."""
        tables = {"strategies": self.strategies, "sizes": self.sizes}
        return {
            name: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for name, table in tables.items()
        }

    def parts(self) -> Iterator[Part]:
        """The map, the node counts, the strategies and the GPU counts."""
        yield from (self.memory_map, self.time_by_nodes, self.strategies, self.sizes)


def alternatives(setting: Setting) -> Alternatives:
    """Everything that notebook 02 shows of other settings. Raises InputError as `predict` does."""
    return Alternatives(memory_map(setting), time_by_nodes(setting), strategies(setting), sizes(setting))


def memory(setting: Setting) -> Memory:
    """The memory of a recipe with each "auto" resolved. Raises InputError."""
    return concrete_memory(resolve(setting.recipe, setting.cluster, setting.manifest).recipe, setting.cluster)


def memory_map(setting: Setting) -> Figure:
    """Memory on the device (upper end, GiB) over row length and micro-batch, with the edge of what fits."""
    recipe = setting.recipe

    def upper_gib(seq_len: int, micro_batch: int) -> float:
        changed = setting.changed(**{"data.seq_len": seq_len, "schedule.micro_batch": micro_batch})
        return memory(changed).device_gib[1]

    lengths = sorted({*LENGTHS, recipe.data.seq_len})
    batches = sorted({*BATCHES, recipe.schedule.micro_batch})
    values = [[upper_gib(length, batch) for length in lengths] for batch in batches]
    capacity = memory(setting).capacity_gib
    title = f"Memory on the device, upper end, GiB of {capacity:.0f}" if capacity else "Memory on the device, GiB"
    here = (recipe.data.seq_len, recipe.schedule.micro_batch)
    limit = capacity or max(map(max, values))  # without a capacity no cell is above it
    return figures.heat(title, "tokens per row", "rows per micro-batch", lengths, batches, values, limit, here)


def time_by_nodes(setting: Setting, counts: tuple[int, ...] = (1, 2, 4, 8)) -> Figure:
    """Wall time by the number of nodes, or the time of a step where the size of the data is unknown.

    Accumulation is lowered to keep the batch. Where that is not possible the batch grows, and the label says so.
    """
    recipe = setting.recipe
    rows: dict[str, Mapping[str, float]] = {}
    for nodes in counts:
        accumulation, rest = divmod(recipe.parallel.nodes * recipe.schedule.grad_accum, nodes)
        kept = accumulation >= 1 and rest == 0
        spread = {"parallel.nodes": nodes, "schedule.grad_accum": accumulation if kept else 1}
        changed = setting.changed(**spread)
        time = changed.predict().time
        label = "1 node" if nodes == 1 else f"{nodes} nodes"
        if changed.recipe.batch != recipe.batch:
            label += f", batch {changed.recipe.batch}"
        rows[label] = time.split_h or {"step": time.step_s or 0.0}
    if any("step" in row for row in rows.values()):
        return figures.bars("Time by number of nodes", "seconds per step", rows)
    if max(sum(row.values()) for row in rows.values()) >= 2:
        return figures.bars("Time by number of nodes", "hours", rows)
    minutes = {label: {part: 60 * hours for part, hours in row.items()} for label, row in rows.items()}
    return figures.bars("Time by number of nodes", "minutes", minutes)


def strategies(setting: Setting) -> Table:
    """One row per strategy and sharding: peak, verdict and step."""
    rows: list[dict[str, Any]] = []
    marks: dict[int, Mark] = {}
    for strategy, sharding in STRATEGIES:
        found = setting.changed(**{"parallel.strategy": strategy, "parallel.sharding": sharding}).predict()
        low, high = found.memory.device_gib
        if mark := VERDICT_MARKS.get(found.memory.verdict):
            marks[len(rows)] = mark
        rows.append(
            {
                "strategy": strategy if sharding == "full" else f"{strategy} {sharding}",
                "allocated, GiB": found.memory.allocated_gib,
                "on the device, GiB": f"{low:.1f} to {high:.1f}",
                "verdict": found.memory.verdict,
                "s/step": found.time.step_s,
                "peak in": found.memory.peak_phase,
            }
        )
    return Table.of(rows, "By strategy (ZeRO needs DeepSpeed)", marks)


def sizes(setting: Setting) -> Table:
    """Memory of this recipe by the number of GPUs of the cluster's kind, nodes filled first."""
    rows: list[dict[str, Any]] = []
    marks: dict[int, Mark] = {}
    per_node = max(setting.cluster.nodes.gpus, setting.recipe.parallel.gpus_per_node)
    for gpus in GPU_COUNTS:
        local = min(gpus, per_node)
        if gpus % local:
            continue
        found = memory(setting.changed(**{"parallel.nodes": gpus // local, "parallel.gpus_per_node": local}))
        if mark := VERDICT_MARKS.get(found.verdict):
            marks[len(rows)] = mark
        row = {"GPUs": gpus, "allocated, GiB": found.allocated_gib, "on the device, up to, GiB": found.device_gib[1]}
        rows.append(row | {"verdict": found.verdict})
    return Table.of(rows, "By number of GPUs", marks)
