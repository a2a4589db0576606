"""Explore: the pictures of notebooks 01 and 02, for one set of choices. HTML that needs no JavaScript."""

from collections.abc import Mapping
from html import escape
from typing import Any

from kit.bars import Bars
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.data.dataset import Dataset
from kit.data.pack import pack
from kit.errors import InputError, KitError
from kit.forecast.memory import memory
from kit.forecast.timing import predict
from kit.heat import Heat

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16)
STRATEGIES = [(s, "full") for s in ("ddp", "zero1", "zero2", "zero3", "fsdp1", "fsdp2")]
STRATEGIES += [("fsdp2", "grad_op"), ("fsdp1", "hybrid")]
CONTROLS = {  # what notebook 02 lets one change
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


def value(recipe: Recipe, key: str) -> Any:
    """A recipe's value by its dotted key."""
    table, _, name = key.rpartition(".")
    return getattr(getattr(recipe, table), name)


def forecast_html(recipe: Recipe, cluster: Cluster, **changes: Any) -> str:
    """Verdict, memory by phase and time of the recipe with these changes."""
    found = predict(recipe.override(**changes), cluster)
    picture = Bars("Memory by phase", "GiB a rank, allocated", found.memory.phases_gib,
                   ("capacity", found.memory.capacity_gib))  # fmt: skip
    lines = "".join(f'<div style="font-size:13px">{escape(line)}</div>' for line in found.lines())
    return lines + picture._repr_svg_()


def memory_map(recipe: Recipe, cluster: Cluster) -> Heat:
    """The upper end of the memory that a device needs, over row length and micro-batch, with the edge of what fits."""

    def upper(seq_len: int, batch: int) -> float:
        changed = recipe.override(**{"data.seq_len": seq_len, "schedule.micro_batch": batch})
        return memory(changed, cluster).device_gib[1]

    values = [[upper(n, b) for n in LENGTHS] for b in BATCHES]
    capacity = memory(recipe, cluster).capacity_gib
    title = f"Memory on the device, upper end, GiB of {capacity:.0f}"
    return Heat(title, "tokens a row", "rows a micro-batch", LENGTHS, BATCHES, values, capacity)


def by_nodes(recipe: Recipe, cluster: Cluster, counts: tuple[int, ...] = (1, 2, 4, 8)) -> Bars:
    """Wall time, or the time of a step where the size of the data is unknown, by the number of nodes.

    The batch stays what it is where accumulation can give way; else it grows with the ranks, and the row says so.
    """
    rows: dict[str, Mapping[str, float]] = {}
    for nodes in counts:
        accumulation = recipe.parallel.nodes * recipe.schedule.grad_accum / nodes
        kept = accumulation >= 1 and accumulation == int(accumulation)
        changes = {"parallel.nodes": nodes, "schedule.grad_accum": int(accumulation) if kept else 1}
        changed = recipe.override(**changes)
        time = predict(changed, cluster).time
        label = f"{nodes} node{'s' * (nodes > 1)}" + (
            "" if changed.batch == recipe.batch else f", batch {changed.batch}"
        )
        rows[label] = time.split_h or {"step": time.step_s or 0.0}
    whole = all("train" in row for row in rows.values())
    short = whole and max(sum(row.values()) for row in rows.values()) < 2
    if short:
        rows = {label: {part: 60 * hours for part, hours in row.items()} for label, row in rows.items()}
    return Bars("Time by number of nodes", "minutes" if short else "hours" if whole else "seconds a step", rows)


def strategies(recipe: Recipe, cluster: Cluster) -> list[dict[str, Any]]:
    """One row a way of spreading the work: peak, verdict, step and what each rank holds."""
    rows = []
    for strategy, sharding in STRATEGIES:
        found = predict(recipe.override(**{"parallel.strategy": strategy, "parallel.sharding": sharding}), cluster)
        m, step = found.memory, found.time.step_s
        rows.append(
            {
                "strategy": strategy if sharding == "full" else f"{strategy} {sharding}",
                "allocated, GiB": round(m.allocated_gib, 1),
                "on the device, GiB": f"{m.device_gib[0]:.1f} to {m.device_gib[1]:.1f}",
                "verdict": m.verdict,
                "s a step": step and round(step, 2),
                "peak in": m.peak_phase,
            }
        )
    return rows


def tokens_spent(manifest: dict[str, Any]) -> Bars:
    """Where the tokens went: trained on, read as context, or dropped for a reason."""
    splits, ledger = manifest["splits"], manifest["ledger"]
    counted = sum(s["loss_tokens"] for s in splits.values())
    parts = {"trained on": counted, "context": ledger["kept_tokens"] - counted, **ledger["dropped"]}
    return Bars("Where the tokens went", "tokens", {"read": {k: float(v) for k, v in parts.items() if v}})


def lengths_of(manifest: dict[str, Any]) -> Bars:
    """Documents by length in tokens."""
    found = zip(manifest["lengths"]["upto"], manifest["lengths"]["documents"], strict=True)
    rows = {f"up to {n:,}": {"documents": float(count)} for n, count in found if count}
    return Bars("Documents by length", "documents (length in tokens)", rows)


def steps_html(dataset: Dataset, recipe: Recipe, seq_len: int, longest: int, epochs: float, batch: int) -> str:
    """What the train split would give with documents up to `longest` tokens in rows of `seq_len`."""
    import numpy as np

    lengths = np.concatenate([np.asarray(row, dtype=np.int64) for row in dataset.rows("train")["seq_lengths"]])
    fitting = lengths[lengths <= min(seq_len, longest)]
    if not len(fitting):
        raise KitError(f"No document has {min(seq_len, longest)} tokens or fewer.")
    rows = len(pack(fitting, seq_len, recipe.schedule.seed)[1]) - 1 if recipe.data.packing else len(fitting)
    if batch % recipe.world_size:
        raise InputError(f"A batch of {batch} rows does not divide among {recipe.world_size} ranks.")
    schedule = {"epochs": epochs, "micro_batch": 1, "grad_accum": batch // recipe.world_size, "max_steps": 0}
    steps = recipe.override(**{f"schedule.{k}": v for k, v in schedule.items()}).optimizer_steps(rows)
    lost = len(lengths) - len(fitting)
    full = fitting.sum() / rows / seq_len
    return (
        f"<b>{steps} optimizer steps</b>: {rows:,} rows of {seq_len:,} tokens, {full:.1%} full, "
        f"{fitting.sum():,} tokens" + (f"; {lost:,} longer documents left out" if lost else "")
    )
