"""Explore: what other settings of a recipe would take, as the figures and tables of notebook 02."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kit import figures
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.figures import Figure
from kit.forecast.memory import memory
from kit.forecast.timing import predict
from kit.show import Part, Result, Table

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16)
GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
STRATEGIES = [(name, "full") for name in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")]
STRATEGIES += [("fsdp2", "grad_op"), ("fsdp1", "hybrid")]
CONTROLS: dict[str, tuple[Any, ...]] = {  # the keys that the explorer changes, with their choices
    "tuning.method": ("full", "lora", "qlora"),
    "parallel.strategy": ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"),
    "parallel.sharding": ("full", "grad_op", "hybrid"),
    "parallel.nodes": (1, 2, 4, 8),
    "parallel.gpus_per_node": (1, 2, 4, 8),
    "parallel.activation_checkpointing": (True, False),
    "schedule.micro_batch": BATCHES,
    "schedule.grad_accum": (1, 2, 4, 8, 16),
    "data.seq_len": LENGTHS,
}


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


def alternatives(recipe: Recipe, cluster: Cluster) -> Alternatives:
    """Everything that notebook 02 shows of other settings. Raises InputError as `predict` does."""
    return Alternatives(
        memory_map(recipe, cluster),
        time_by_nodes(recipe, cluster),
        strategies(recipe, cluster),
        sizes(recipe, cluster),
    )


def value(recipe: Recipe, key: str) -> Any:
    """A recipe's value by its dotted key."""
    table, _, name = key.rpartition(".")
    return getattr(getattr(recipe, table), name)


def memory_map(recipe: Recipe, cluster: Cluster) -> Figure:
    """Memory on the device (upper end, GiB) over row length and micro-batch, with the edge of what fits."""

    def upper_gib(seq_len: int, micro_batch: int) -> float:
        changed = recipe.override(**{"data.seq_len": seq_len, "schedule.micro_batch": micro_batch})
        return memory(changed, cluster).device_gib[1]

    lengths = sorted({*LENGTHS, recipe.data.seq_len})
    batches = sorted({*BATCHES, recipe.schedule.micro_batch})
    values = [[upper_gib(length, batch) for length in lengths] for batch in batches]
    capacity = memory(recipe, cluster).capacity_gib
    title = f"Memory on the device, upper end, GiB of {capacity:.0f}" if capacity else "Memory on the device, GiB"
    here = (recipe.data.seq_len, recipe.schedule.micro_batch)
    limit = capacity or max(map(max, values))  # without a capacity no cell is above it
    return figures.heat(title, "tokens per row", "rows per micro-batch", lengths, batches, values, limit, here)


def time_by_nodes(recipe: Recipe, cluster: Cluster, counts: tuple[int, ...] = (1, 2, 4, 8)) -> Figure:
    """Wall time by the number of nodes, or the time of a step where the size of the data is unknown.

    Accumulation is lowered to keep the batch. Where that is not possible the batch grows, and the label says so.
    """
    rows: dict[str, Mapping[str, float]] = {}
    for nodes in counts:
        accumulation, rest = divmod(recipe.parallel.nodes * recipe.schedule.grad_accum, nodes)
        kept = accumulation >= 1 and rest == 0
        changed = recipe.override(**{"parallel.nodes": nodes, "schedule.grad_accum": accumulation if kept else 1})
        time = predict(changed, cluster).time
        label = "1 node" if nodes == 1 else f"{nodes} nodes"
        if changed.batch != recipe.batch:
            label += f", batch {changed.batch}"
        rows[label] = time.split_h or {"step": time.step_s or 0.0}
    if any("step" in row for row in rows.values()):
        return figures.bars("Time by number of nodes", "seconds per step", rows)
    if max(sum(row.values()) for row in rows.values()) >= 2:
        return figures.bars("Time by number of nodes", "hours", rows)
    minutes = {label: {part: 60 * hours for part, hours in row.items()} for label, row in rows.items()}
    return figures.bars("Time by number of nodes", "minutes", minutes)


def strategies(recipe: Recipe, cluster: Cluster) -> Table:
    """One row per strategy and sharding: peak, verdict and step."""
    rows = []
    for strategy, sharding in STRATEGIES:
        found = predict(recipe.override(**{"parallel.strategy": strategy, "parallel.sharding": sharding}), cluster)
        low, high = found.memory.device_gib
        rows.append(
            {
                "strategy": strategy if sharding == "full" else f"{strategy} {sharding}",
                "allocated, GiB": found.memory.allocated_gib,
                "on the device, GiB": f"{low:.1f} to {high:.1f}",
                "verdict": found.memory.verdict,
                "s per step": found.time.step_s,
                "peak in": found.memory.peak_phase,
            }
        )
    return Table.of(rows, "By strategy (ZeRO can be forecast, not launched)")


def sizes(recipe: Recipe, cluster: Cluster) -> Table:
    """Memory of this recipe by the number of GPUs of the cluster's kind, nodes filled first."""
    rows = []
    per_node = max(cluster.nodes.gpus, recipe.parallel.gpus_per_node)
    for gpus in GPU_COUNTS:
        local = min(gpus, per_node)
        if gpus % local:
            continue
        spread = {"parallel.nodes": gpus // local, "parallel.gpus_per_node": local}
        found = memory(recipe.override(**spread), cluster)
        row = {"GPUs": gpus, "allocated, GiB": found.allocated_gib, "on the device, up to, GiB": found.device_gib[1]}
        rows.append(row | {"verdict": found.verdict})
    return Table.of(rows, "By number of GPUs")
