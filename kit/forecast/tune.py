"""Tuning: the fastest settings of a recipe that fit a cluster, with the same effective batch, and why."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.forecast.shape import load_shape
from kit.forecast.timing import Prediction, predict
from kit.show import Part, Result, Table

TIE = 0.02  # of the step: forecasts closer than this are equal, and the one with more memory to spare comes first
SHOWN = 12  # rows of the table
KEYS = (
    "parallel.strategy", "parallel.sharding", "parallel.nodes", "parallel.activation_checkpointing",
    "schedule.micro_batch", "schedule.grad_accum",
)  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """A setting that fits. `override` changes the given recipe into it; `spare_gib` is free on the device.

    compiled: whether its layers are compiled, where the recipe leaves that open.
    """

    recipe: Recipe
    override: dict[str, Any]
    step_s: float
    tokens_per_s: float
    allocated_gib: float
    spare_gib: float
    reason: str
    compiled: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {k: v for k, v in vars(self).items() if k != "recipe"} | {"setting": setting(self.recipe)}

    def options(self) -> str:
        """The override as options of `kit launch`."""
        return " ".join(f"-s {key}={_text(value)}" for key, value in self.override.items())


@dataclass(frozen=True)
class Choices(Result, Sequence[Choice]):
    """Settings that fit, fastest first. Where it is empty, `reason` says why. `notes`: advice about the recipe."""

    choices: tuple[Choice, ...]
    reason: str = ""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.choices)

    def __getitem__(self, index: Any) -> Any:
        return self.choices[index]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "choices": [choice.as_dict() for choice in self.choices],
            "reason": self.reason,
            "notes": list(self.notes),
        }

    def parts(self) -> Iterator[Part]:
        """A table of the fastest settings and the options of the first, or the reason why there are none."""
        if not self.choices:
            yield self.reason
            return
        yield Table.of([_row(choice) for choice in self.choices[:SHOWN]])
        if len(self.choices) > SHOWN:
            yield f"{len(self.choices) - SHOWN} slower settings also fit."
        if options := self.choices[0].options():
            yield f"The fastest: kit launch RECIPE {options}"
        yield from (f"Note: {note}" for note in self.notes)


def _row(choice: Choice) -> dict[str, Any]:
    parallel, schedule = choice.recipe.parallel, choice.recipe.schedule
    return {
        "strategy": f"{parallel.strategy} {parallel.sharding}",
        "nodes x GPUs": f"{parallel.nodes} x {parallel.gpus_per_node}",
        "micro_batch x grad_accum": f"{schedule.micro_batch} x {schedule.grad_accum}",
        "checkpointing": parallel.activation_checkpointing,
        "compiled": choice.compiled,
        "s/step": choice.step_s,
        "tokens/s": choice.tokens_per_s,
        "allocated, GiB": choice.allocated_gib,
        "to spare, GiB": choice.spare_gib,
        "why": choice.reason,
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def setting(recipe: Recipe) -> dict[str, Any]:
    """The keys that tuning may change, with their values."""
    return {key: getattr(getattr(recipe, table), name) for key in KEYS for table, name in [key.split(".")]}


def tune(recipe: Recipe, cluster: Cluster, nodes: bool = False, manifest: Mapping[str, Any] | None = None) -> Choices:
    """Every setting that can be launched and whose forecast fits, fastest first; empty with a reason where none does.

    With `nodes`, node counts up to the cluster's are tried as well. manifest: of the prepared dataset.
    """
    if not cluster.nodes.gpu_bf16_tflops:
        return Choices((), f"No step time is known: set nodes.gpu_bf16_tflops in the profile of {cluster.name}.")
    shape = load_shape(recipe.model.name, cluster.paths.hf_home)
    candidates = _settings(recipe, cluster, nodes)
    found = [(candidate, predict(candidate, cluster, manifest, shape)) for candidate in candidates]
    fits = [(candidate, forecast) for candidate, forecast in found if forecast.memory.verdict == "fits"]
    if not fits:
        return Choices((), _why_nothing_fits(recipe, cluster, found))
    present = predict(recipe, cluster, manifest, shape)
    ranked = (_choice(candidate, forecast, recipe, present) for candidate, forecast in _ranked(fits))
    return Choices(tuple(ranked), notes=present.notes)


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
    """Recipes of the same effective batch that can be launched."""
    parallel = recipe.parallel
    for count in range(1, cluster.nodes.count + 1) if nodes else (parallel.nodes,):
        rows, rest = divmod(recipe.batch, count * parallel.gpus_per_node)
        if rest:
            continue
        divisors = [micro_batch for micro_batch in range(1, rows + 1) if rows % micro_batch == 0]
        layouts = _layouts(recipe, cluster, count)
        for (strategy, sharding), checkpointing, micro_batch in product(layouts, (False, True), divisors):
            spread = replace(
                parallel, strategy=strategy, sharding=sharding, nodes=count, activation_checkpointing=checkpointing
            )
            schedule = replace(recipe.schedule, micro_batch=micro_batch, grad_accum=rows // micro_batch)
            yield replace(recipe, parallel=spread, schedule=schedule)


def _layouts(recipe: Recipe, cluster: Cluster, nodes: int) -> list[tuple[Any, Any]]:
    """Strategies with their sharding.

    In a full fine-tune FSDP trains fp32 master weights and DDP bf16 weights, so that neither replaces the other.
    """
    full, sharded, gpus = recipe.tuning.method == "full", recipe.parallel.strategy != "ddp", cluster.nodes.gpus > 0
    if nodes * recipe.parallel.gpus_per_node == 1 or recipe.model.base in ("fp8", "nf4"):  # FSDP does not shard these
        return [("ddp", "full")]
    layouts = []
    if not (full and sharded and gpus):
        layouts += [("ddp", "full")]
    if not full or sharded or not gpus:
        layouts += [("fsdp2", "full"), ("fsdp2", "grad_op")]
        if gpus:
            layouts += [("fsdp1", "full"), ("fsdp1", "grad_op")]
        if gpus and nodes > 1:
            layouts += [("fsdp1", "hybrid")]
    return layouts


def _choice(candidate: Recipe, forecast: Prediction, given: Recipe, present: Prediction) -> Choice:
    before, time, memory = setting(given), forecast.time, forecast.memory
    override = {key: value for key, value in setting(candidate).items() if value != before[key]}
    return Choice(
        candidate,
        override,
        step_s=time.step_s or 0.0,
        tokens_per_s=(time.tokens_per_s_per_gpu or 0.0) * candidate.world_size,
        allocated_gib=memory.allocated_gib,
        spare_gib=memory.capacity_gib - memory.device_gib[1],
        reason="; ".join(_reasons(override, before, forecast, present)) or "the recipe's own setting",
        compiled=_compiled(candidate, forecast),
    )


def _compiled(candidate: Recipe, forecast: Prediction) -> bool:
    chosen = {decision.key: decision.value for decision in forecast.choices}
    return bool(chosen.get("parallel.compile", candidate.parallel.compile) == "on")


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


def _why_nothing_fits(recipe: Recipe, cluster: Cluster, found: Sequence[tuple[Recipe, Prediction]]) -> str:
    if not found:
        return f"No other micro_batch x grad_accum gives a batch of {recipe.batch} rows on {recipe.world_size} ranks."
    closest, forecast = min(found, key=lambda pair: pair[1].memory.device_gib[1])
    memory, words = forecast.memory, ", ".join(f"{key} = {_text(value)}" for key, value in setting(closest).items())
    if memory.verdict == "unknown":
        return f"It is unknown what fits: set nodes.gpu_memory_gib in the profile of {cluster.name}."
    return (
        f"No setting is sure to fit {cluster.name} with {recipe.batch} rows per step. Closest: {words}, with up to "
        f"{memory.device_gib[1]:.1f} of {memory.capacity_gib:.1f} GiB. {memory.cheapest_fix}"
    )
