"""Tuning: the fastest settings of a recipe that fit a cluster, with the same effective batch, and why."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast.timing import Prediction, predict

TIE = 0.02  # of the step: forecasts closer than this are not told apart, and the one with more memory to spare wins
KEYS = (
    "parallel.strategy", "parallel.sharding", "parallel.nodes", "parallel.activation_checkpointing",
    "schedule.micro_batch", "schedule.grad_accum",
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A setting that fits: `override` makes it out of the recipe, `reason` is in words, spare_gib on the device."""

    recipe: Recipe
    override: dict[str, Any]
    step_s: float
    tokens_per_s: float
    allocated_gib: float
    spare_gib: float
    reason: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; the recipe is the caller's with `override`."""
        return {k: v for k, v in vars(self).items() if k != "recipe"} | {"setting": setting(self.recipe)}

    def row(self) -> dict[str, Any]:
        """For a table: the setting in words, seconds a step, tokens/s of all ranks, GiB, and the reason."""
        p, k = self.recipe.parallel, self.recipe.schedule
        words = f"{p.strategy} {p.sharding}, {p.nodes} x {p.gpus_per_node}, {k.micro_batch} x {k.grad_accum} rows"
        words += ", checkpointing" * p.activation_checkpointing
        numbers = {"s a step": self.step_s, "tokens/s": self.tokens_per_s}
        numbers |= {"allocated, GiB": self.allocated_gib, "to spare, GiB": self.spare_gib}
        return {"setting": words, **numbers, "why": self.reason}


def setting(recipe: Recipe) -> dict[str, Any]:
    """The keys that tuning may change, with their values."""
    return {key: getattr(getattr(recipe, table), name) for key in KEYS for table, name in [key.split(".")]}


def tune(recipe: Recipe, cluster: Cluster, nodes: bool = False) -> list[Choice]:
    """Every setting that kit.train can launch and whose forecast fits, fastest first.

    `nodes` also tries other node counts up to the cluster's. Raises InputError where nothing fits, naming the closest.
    """
    if recipe.tuning.method == "qlora":
        raise InputError("tuning.method qlora can be forecast but not launched, so there is nothing to tune; use lora.")
    found = [(r, predict(r, cluster)) for r in _settings(recipe, cluster, nodes)]
    fits = [(r, p) for r, p in found if p.memory.verdict == "fits" and p.time.step_s]
    if not fits:
        raise InputError(_nothing(recipe, cluster, found))
    now = predict(recipe, cluster)
    return [_choice(r, p, recipe, now) for r, p in _ranked(fits)]


def _ranked(fits: list[tuple[Recipe, Prediction]]) -> list[tuple[Recipe, Prediction]]:
    """By step time; of those within TIE of the fastest left, the one with most memory to spare is next."""
    left, ranked = sorted(fits, key=lambda pair: pair[1].time.step_s or 0.0), []
    while left:
        limit = (left[0][1].time.step_s or 0.0) * (1 + TIE)
        best = min((p for p in left if (p[1].time.step_s or 0.0) <= limit), key=lambda p: p[1].memory.device_gib[1])
        left.remove(best)
        ranked.append(best)
    return ranked


def _settings(recipe: Recipe, cluster: Cluster, nodes: bool) -> Iterator[Recipe]:
    """Recipes of the same effective batch that kit.slurm.launch.check lets through."""
    p = recipe.parallel
    for count in range(1, cluster.nodes.count + 1) if nodes else (p.nodes,):
        rows, rest = divmod(recipe.batch, count * p.gpus_per_node)
        for strategy, sharding in () if rest else _layouts(recipe, cluster, count):
            for checkpointing in (False, True):
                for micro in (m for m in range(1, rows + 1) if rows % m == 0):
                    changed = replace(
                        p, strategy=strategy, sharding=sharding, nodes=count, activation_checkpointing=checkpointing
                    )
                    schedule = replace(recipe.schedule, micro_batch=micro, grad_accum=rows // micro)
                    yield replace(recipe, parallel=changed, schedule=schedule)


def _layouts(recipe: Recipe, cluster: Cluster, nodes: int) -> list[tuple[Any, Any]]:
    """Strategy and sharding. Of a full fine-tune FSDP trains fp32 masters and DDP bf16: neither replaces the other."""
    full, sharded = recipe.tuning.method == "full", recipe.parallel.strategy != "ddp"
    if nodes * recipe.parallel.gpus_per_node == 1:
        return [("ddp", "full")]
    layouts = [] if full and sharded and cluster.nodes.gpus else [("ddp", "full")]
    if not full or sharded or not cluster.nodes.gpus:
        layouts += [("fsdp2", "full"), ("fsdp2", "grad_op")]
        if cluster.nodes.gpus:
            layouts += [("fsdp1", "full"), ("fsdp1", "grad_op"), *([("fsdp1", "hybrid")] if nodes > 1 else [])]
    return layouts


def _choice(recipe: Recipe, found: Prediction, old: Recipe, before: Prediction) -> Choice:
    was, t, m = setting(old), found.time, found.memory
    override = {key: value for key, value in setting(recipe).items() if value != was[key]}
    step, spare = t.step_s or 0.0, m.capacity_gib - m.device_gib[1]
    why = "; ".join(_reasons(override, was, found, before)) or "the recipe's own setting"
    tokens = (t.tokens_per_s_per_gpu or 0.0) * recipe.world_size
    return Choice(recipe, override, step, tokens, m.allocated_gib, spare, why)


def _reasons(override: dict[str, Any], was: dict[str, Any], found: Prediction, before: Prediction) -> Iterator[str]:
    """What each change does to its part of the step."""

    def change(part: str) -> str:
        now, then = getattr(found.time, part) or 0.0, getattr(before.time, part) or 0.0
        name, was, will = part.removesuffix("_s"), f"{then:.2g}", f"{now:.2g}"
        return f"{name} {was} to {will} s" if was != will else f"{name} stays {will} s"

    new = {key.rpartition(".")[2]: value for key, value in override.items()}
    if "activation_checkpointing" in new:
        yield f"checkpointing {'on' if new['activation_checkpointing'] else 'off'}: {change('compute_s')}"
    if "micro_batch" in new:
        yield f"micro-batches of {new['micro_batch']}, not {was['schedule.micro_batch']}: {change('host_s')}"
    if layout := [new[key] for key in ("strategy", "sharding") if key in new]:
        yield f"{' '.join(layout)}: {change('communication_s')}"
    if "nodes" in new:
        yield f"{new['nodes']} nodes, not {was['parallel.nodes']}: step from {before.time.step_s or 0.0:.3g} s"


def _nothing(recipe: Recipe, cluster: Cluster, found: Sequence[tuple[Recipe, Prediction]]) -> str:
    if not found:
        return f"A batch of {recipe.batch} rows cannot be spread over {recipe.world_size} ranks otherwise."
    if not cluster.nodes.gpu_bf16_tflops:
        return f"Cluster {cluster.name} gives no nodes.gpu_bf16_tflops, so no setting is faster than another."
    closest, p = min(found, key=lambda pair: pair[1].memory.device_gib[1])
    need, words = p.memory, ", ".join(f"{k} = {v}" for k, v in setting(closest).items())
    return (
        f"Nothing fits {cluster.name} for sure with {recipe.batch} rows a step; {words} comes closest with up to "
        f"{need.device_gib[1]:.1f} of {need.capacity_gib:.1f} GiB. {need.cheapest_fix}"
    )


def table(choices: Sequence[Choice]) -> str:
    """The choices as text, one a line, fastest first."""
    rows = [c.row() for c in choices]
    head = f"{'s a step':>8} {'tokens/s':>10} {'GiB':>6} {'spare':>6}  setting"
    return "\n".join(
        [head, *(f"{s:8.3f} {t:10,.0f} {a:6.1f} {m:6.1f}  {w}: {r}" for w, s, t, a, m, r in map(dict.values, rows))]
    )
