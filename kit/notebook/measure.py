"""Measure the fastest settings of `kit.tune` in a short job: tokens per second and memory, with the forecast's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from kit import files
from kit.config.cluster import Cluster
from kit.config.recipe import Recipe
from kit.errors import KitError
from kit.forecast.steptime import Sizes
from kit.forecast.tune import Choice, Choices
from kit.notebook.grid import Setting
from kit.notebook.sweep import Sweep, Task, measure
from kit.show import Mark, Part, Result, Table, progress_bar
from kit.slurm import launch as slurm
from kit.slurm.run import Run

LIMIT_S, LIMIT = 1800.0, "00:30:00"  # of a measurement: short jobs start sooner
POLL_S = 2.0


@dataclass(frozen=True)
class Measured:
    """A setting with what its short run found; None where it found nothing, and then `reason` says why.

    tokens_per_s: of all ranks. peak_gib: allocated on the first rank's GPU; None on CPUs.
    """

    choice: Choice
    run: Path
    tokens_per_s: float | None = None
    step_s: float | None = None
    peak_gib: float | None = None
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: measured, and as forecast."""
        found = {"tokens_per_s": self.tokens_per_s, "step_s": self.step_s, "peak_gib": self.peak_gib}
        return self.choice.as_dict() | {"measured": found, "run": str(self.run), "failed": self.reason}


@dataclass(frozen=True)
class Measurement(Result, Sequence[Measured]):
    """The measured settings, fastest first, then those that failed. `choices`: every setting that fits."""

    measured: tuple[Measured, ...]
    choices: Choices

    def __len__(self) -> int:
        return len(self.measured)

    def __getitem__(self, index: Any) -> Any:
        return self.measured[index]

    def as_dict(self) -> dict[str, Any]:
        """As for the forecast, with the measured settings under "measured"."""
        return self.choices.as_dict() | {"measured": [each.as_dict() for each in self.measured]}

    def parts(self) -> Iterator[Part]:
        """A table of measured and forecast figures, and the options of the fastest."""
        marks: dict[int, Mark] = {place: "bad" for place, each in enumerate(self.measured) if each.reason}
        yield Table.of([_row(each) for each in self.measured], marks=marks)
        best = self.measured[0]
        if best.reason:
            yield "No setting could be measured."
        elif options := best.choice.options():
            yield f"The fastest as measured: kit launch RECIPE {options}"
        else:
            yield "The fastest as measured is the recipe's own setting."
        yield from (f"Note: {note}" for note in self.choices.notes)


def _row(each: Measured) -> dict[str, Any]:
    choice, recipe = each.choice, each.choice.recipe
    return {
        "strategy": f"{recipe.parallel.strategy} {recipe.parallel.sharding}",
        "micro_batch x grad_accum": f"{recipe.schedule.micro_batch} x {recipe.schedule.grad_accum}",
        "checkpointing": recipe.parallel.activation_checkpointing,
        "compiled": choice.compiled,
        "tokens/s": each.tokens_per_s,
        "forecast": choice.tokens_per_s,
        "GiB": each.peak_gib,
        "forecast, GiB": choice.allocated_gib,
        "failed": each.reason,
    }


def measure_choices(
    recipe: Recipe, cluster: Cluster, choices: Choices, manifest: dict[str, Any], top: int, steps: int
) -> Measurement:
    """Run the `top` choices for `steps` optimizer steps each, and wait. Raises as `kit.launch` does."""
    short = _short(cluster)
    chosen = sorted(choices[:top], key=lambda choice: choice.recipe.parallel.nodes)
    found: list[Measured] = []
    with progress_bar(len(chosen), "measure", "setting") as bar:
        for _, group in groupby(chosen, key=lambda choice: choice.recipe.parallel.nodes):
            found += _measure(recipe, short, list(group), steps, manifest, bar)
    return Measurement(tuple(sorted(found, key=lambda each: -(each.tokens_per_s or 0.0))), choices)


def _short(cluster: Cluster) -> Cluster:
    """The cluster with a time limit that suits a few steps."""
    if cluster.slurm.limit_s <= LIMIT_S:
        return cluster
    return replace(cluster, slurm=replace(cluster.slurm, time=LIMIT))


def _measure(
    recipe: Recipe, cluster: Cluster, choices: Sequence[Choice], steps: int, manifest: dict[str, Any], bar: Any
) -> list[Measured]:
    """What one job finds; its tasks run one after another, so that none disturbs another."""
    settings = [_setting(choice, cluster, steps, manifest) for choice in choices]
    sweep = measure(recipe, settings, cluster)
    _wait(sweep, bar)
    return [_read(choice, task, manifest) for choice, task in zip(choices, sweep.tasks(), strict=True)]


def _setting(choice: Choice, cluster: Cluster, steps: int, manifest: dict[str, Any]) -> Setting:
    """What changes the recipe into a short run of this choice.

    The open choices are made for the recipe's own steps first, since nothing is compiled for a run of few steps.
    """
    resolved = slurm.choose(choice.recipe, cluster, manifest).recipe
    return choice.override | {
        "model.attention": resolved.model.attention,
        "parallel.activation_checkpointing": resolved.parallel.activation_checkpointing,
        "parallel.compile": resolved.parallel.compile,
        "schedule.max_steps": steps,
        "schedule.log_every": 1,
        "schedule.eval_every": 0,
        "schedule.save_every": 0,
    }


def _wait(sweep: Sweep, bar: Any) -> None:
    """Until the job has ended; Ctrl-C ends the job, since its result would not be read."""
    done = 0
    try:
        while True:
            state, tasks = sweep.run.state, sweep.tasks()
            ended = sum((task.out / "state" / "result.json").exists() for task in tasks)
            bar.update(ended - done)
            done = ended
            if state.ended:
                return
            _pause(sweep.run)
    except KeyboardInterrupt:
        sweep.run.cancel()
        raise


def _pause(run: Run) -> None:
    try:
        run.wait(timeout=POLL_S)
    except KitError:  # it goes on
        return


def _read(choice: Choice, task: Task, manifest: dict[str, Any]) -> Measured:
    result = task.out / "state" / "result.json"
    if not result.exists():
        state = Run(task.out).state
        return Measured(choice, task.out, reason=state.cause or str(task.state) or "it did not run")
    values = files.read_json(result)
    if not values["step_s"]:
        return Measured(choice, task.out, reason="no step was timed")
    tokens = choice.recipe.batch * Sizes.of(choice.recipe, manifest).row_tokens
    return Measured(choice, task.out, tokens / values["step_s"], values["step_s"], values["peak_gib"])
