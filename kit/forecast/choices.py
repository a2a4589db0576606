"""Choices: each "auto" of a recipe becomes a value for one cluster, with the reason.

`resolve` is what predict, tune, plan and launch share: a run trains the resolved recipe.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import InputError
from kit.forecast.attention import varlen_gap
from kit.forecast.fit import Memory, memory
from kit.forecast.limits import compiler_place, is_sharded, known_compiler
from kit.forecast.shape import Shape, load_config, shape_of
from kit.forecast.steptime import Sizes, storage_of, time_of

COMPILE_S = 21.0  # seconds that the first step takes longer with compiled layers, at most: 7 to 21 on H100 and H200
COMPILED_ATTENTIONS = ("varlen", "sdpa")
SHORT = 100  # steps below which nothing is compiled where no step time can be forecast
SURE = 0.05  # of a step: what compiling has to save, since the forecast of the two may be wrong by that
FASTER = 1.02  # times by which DDP has to be faster before a plan says so
FP8_COST = (
    "fp8 frozen weights change the result: gradients of the adapters differ by 21 to 27% from fp32 (2 to 3% in bf16), "
    "and on a model of 135M parameters the loss rose by an eighth of what nf4 costs"
)
BF16_WEIGHTS = (  # tests/gpu/h200x2_strategies.json
    "A full fine-tune under ddp keeps its weights in bf16, which rounds small updates away: after 8 steps on two H200s "
    "the loss of a small model was 9.190, and 9.095 under fsdp2, fsdp1 and ZeRO, which keep them in fp32. Set "
    "parallel.strategy to fsdp2 where they fit"
)


@dataclass(frozen=True)
class Decision:
    """A value that was chosen for a key of the recipe, and why."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        name = self.key.rpartition(".")[2].replace("activation_checkpointing", "activation checkpointing")
        value = {True: "on", False: "off"}.get(self.value, self.value)
        return f"{name}: {value}, {self.reason}"


@dataclass(frozen=True)
class Resolution:
    """The recipe without any "auto", and the decisions that made it so; `notes`: what else a person should know."""

    recipe: Recipe
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()


def resolve(
    recipe: Recipe,
    cluster: Cluster,
    manifest: Mapping[str, Any] | None = None,
    shape: Shape | None = None,
    compiler: bool | None = None,
) -> Resolution:
    """The recipe with a value for each "auto", for this cluster. Nothing is raised for a model without a forecast.

    manifest: of the prepared dataset, for the number of steps. shape: the recipe's model, where it is already loaded.
    compiler: whether the nodes have a C compiler; None: as the profile says.
    """
    return _Resolver(recipe, cluster, manifest, shape, compiler).resolve()


@dataclass
class _Resolver:
    recipe: Recipe
    cluster: Cluster
    manifest: Mapping[str, Any] | None
    shape: Shape | None
    compiler: bool | None

    def __post_init__(self) -> None:
        self.compiler = known_compiler(self.cluster, self.compiler)
        self.config: dict[str, Any] = {}
        with suppress(InputError):
            self.config = load_config(self.recipe.model.name, self.cluster.paths.hf_home)
            self.shape = self.shape or shape_of(self.config, self.recipe.model.name)

    def resolve(self) -> Resolution:
        """Attention first, since memory and time of the other choices depend on it."""
        decisions: list[Decision] = []
        job = self.recipe
        if job.model.attention == "auto":
            decisions.append(self._attention())
            job = job.override(**{"model.attention": decisions[-1].value})
        open_keys = [
            key
            for key, value in (
                ("parallel.activation_checkpointing", job.parallel.activation_checkpointing),
                ("parallel.compile", job.parallel.compile),
            )
            if value == "auto"
        ]
        if open_keys:
            checkpointing, compiled = self._checkpointing_and_compile(job)
            decisions += [each for each in (checkpointing, compiled) if each.key in open_keys]
            job = _with(job, bool(checkpointing.value), str(compiled.value))
        return Resolution(job, tuple(decisions), tuple(self._notes(job)))

    def _attention(self) -> Decision:
        key, data = "model.attention", self.recipe.data
        if not self.config:
            return Decision(key, "sdpa", "the model's config is not here")
        if self.shape is None:
            kind = self.config.get("model_type")
            return Decision(key, "sdpa", f"the kit does not know models of type {kind}; set varlen by hand to try it")
        gap = varlen_gap(
            self.config, self.recipe.model.dtype, self.cluster.nodes.gpu, on_gpus := self.cluster.nodes.gpus > 0
        )
        fallback = self._without_varlen(on_gpus)
        if gap:
            return Decision(key, fallback, f"variable-length attention is not possible: {gap}")
        if not data.packing and not self.shape.masked(self.recipe) and fallback == "sdpa":
            return Decision(key, "sdpa", "rows are not packed, so no mask is made and torch's causal kernels apply")
        if not on_gpus:
            return Decision(key, "varlen", "each document of a packed row by itself, as CPUs have no kernel for them")
        return Decision(key, "varlen", "torch's variable-length attention for packed rows")

    def _without_varlen(self, on_gpus: bool) -> str:
        """The fastest of the other attentions that the model has; flex_attention has no backward pass on CPUs."""
        known = self.shape.attentions if self.shape else ("sdpa",)
        order = ("sdpa", "flex_attention", "eager") if on_gpus else ("sdpa", "eager")
        return next((name for name in order if name in known), "eager")

    def _checkpointing_and_compile(self, job: Recipe) -> tuple[Decision, Decision]:
        """Checkpointing is off where the job fits without it, compiled if need be; then compilation where it pays."""
        checkpointing = job.parallel.activation_checkpointing
        if checkpointing != "auto":
            return Decision("parallel.activation_checkpointing", checkpointing, ""), self._compile(job, checkpointing)
        key = "parallel.activation_checkpointing"
        compiled = self._compile(job, recompute=False)
        found = self._memory(_with(job, False, compiled.value))
        if found is None:
            return Decision(key, True, "the model has no forecast"), self._compile(job, recompute=True)
        if found.verdict == "unknown":
            reason = f"the profile {self.cluster.name} does not give the memory of its GPUs"
            return Decision(key, True, reason), self._compile(job, recompute=True)
        if found.verdict == "fits":
            return Decision(key, False, f"fits without it: {_of_capacity(found)}"), compiled
        if job.parallel.compile == "auto" and compiled.value == "off" and not self._never_compiled(job):
            smaller = self._memory(_with(job, False, "on"))
            if smaller is not None and smaller.verdict == "fits":
                reason = f"fits without it: {_of_capacity(smaller)}"
                return Decision(key, False, reason), Decision(
                    "parallel.compile", "on", "compiled layers keep fewer activations, so that none are recomputed"
                )
        return Decision(key, True, f"without it the job is not sure to fit: {_of_capacity(found)}"), self._compile(
            job, recompute=True
        )

    def _memory(self, job: Recipe) -> Memory | None:
        with suppress(InputError):
            return memory(job, self.cluster, self.shape, fix=False)
        return None

    def _compile(self, job: Recipe, recompute: bool) -> Decision:
        key, given = "parallel.compile", job.parallel.compile
        if given != "auto":
            return Decision(key, given, "")
        if reason := self._never_compiled(job):
            return Decision(key, "off", reason)
        plain, fused = (self._step(_with(job, recompute, value)) for value in ("off", "on"))
        steps = self._steps(job)
        if plain is None or fused is None:
            if steps is not None and steps <= SHORT:
                return Decision(key, "off", f"the run has only {steps} steps")
            return Decision(key, "on", "each decoder layer, in place; the first step takes up to 21 s longer")
        if fused > (1 - SURE) * plain:
            why = "a compiled layer that is recomputed gains too little" if recompute else "it gains too little"
            return Decision(key, "off", f"{why}: {_seconds(fused)} a step, not {_seconds(plain)}, by the forecast")
        saved = f"{_seconds(plain)} a step becomes {_seconds(fused)}"
        if steps is not None and steps * (plain - fused) < COMPILE_S:
            reason = f"the run has only {steps} steps: {saved}, and the first step takes up to {COMPILE_S:.0f} s longer"
            return Decision(key, "off", reason)
        return Decision(key, "on", f"{saved}; the first step takes 7 to {COMPILE_S:.0f} s longer")

    def _never_compiled(self, job: Recipe) -> str:
        """Why nothing is compiled whatever the job gains from it; empty where it may be."""
        if not self.cluster.nodes.gpus:
            return "the processes run on CPUs"
        if self.compiler is False:
            return f"{compiler_place(self.cluster)} no C compiler"
        if self.shape is None:
            return "the kit does not know this family of models"
        if any(linear.copies > 1 for linear in self.shape.linears):
            return "which experts a token goes to changes with the data, so that the graph would, too"
        if job.parallel.split:
            return "layers that are split over ranks are not compiled"
        if job.parallel.strategy.startswith("zero"):
            return "DeepSpeed's hooks run between the operations of a layer"
        if job.model.attention not in COMPILED_ATTENTIONS:
            return f"{job.model.attention} attention is not compiled here"
        return ""

    def _steps(self, job: Recipe) -> int | None:
        rows = Sizes.of(job, self.manifest).train_rows
        return job.schedule.max_steps or (None if rows is None else job.optimizer_steps(rows))

    def _step(self, job: Recipe) -> float | None:
        """Seconds of a step; None where it cannot be forecast."""
        if self.shape is None:
            return None
        with suppress(InputError):
            stored = storage_of(self.shape, job, self.cluster)
            return time_of(self.shape, job, self.cluster, Sizes.of(job, self.manifest), stored).step_s
        return None

    def _notes(self, job: Recipe) -> Iterator[str]:
        if job.model.base == "fp8":
            yield f"{FP8_COST}."
        if self._trains_bf16_weights(job):
            yield f"{BF16_WEIGHTS}."
        if note := self._ddp_note(job):
            yield note

    def _trains_bf16_weights(self, job: Recipe) -> bool:
        full, narrow = job.tuning.method == "full", job.model.dtype != "float32"
        return full and narrow and job.parallel.strategy == "ddp" and self.cluster.nodes.gpus > 0

    def _ddp_note(self, job: Recipe) -> str:
        """For adapters under FSDP on a model that fits each GPU: how much faster DDP is by the forecast."""
        if job.tuning.method == "full" or not is_sharded(job) or not self.cluster.nodes.gpus:
            return ""
        other = replace(job, parallel=replace(job.parallel, strategy="ddp", sharding="full"))
        found, now, then = self._memory(other), self._step(job), self._step(other)
        if found is None or found.verdict != "fits" or not now or not then or now < FASTER * then:
            return ""
        return (
            f"The model fits each GPU, and DDP is {now / then - 1:.0%} faster by the forecast ({_seconds(then)} a "
            f'step, not {_seconds(now)}; {_of_capacity(found)}): set parallel.strategy = "ddp".'
        )


def _with(job: Recipe, recompute: bool, compiled: str) -> Recipe:
    value: Literal["on", "off"] = "on" if compiled == "on" else "off"
    return replace(job, parallel=replace(job.parallel, activation_checkpointing=recompute, compile=value))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _of_capacity(found: Memory) -> str:
    """The upper end of the forecast and the capacity, such as "up to 43 of 139 GiB"."""
    return f"up to {found.device_gib[1]:.3g} of {found.capacity_gib:.3g} GiB"
