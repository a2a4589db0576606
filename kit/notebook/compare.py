"""Compare runs, tasks of sweeps and executed notebooks: state, settings, loss, cost, forecast and fact."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kit import figures, files
from kit.config import schema
from kit.data.dataset import Dataset
from kit.errors import InputError
from kit.figures.base import COLOURS, Figure
from kit.notebook.forecast_error import ForecastError, forecast_error
from kit.notebook.grid import dotted, label
from kit.notebook.parameters import read_notebook
from kit.notebook.run_time import seconds_run
from kit.notebook.sweep import Sweep, notebook_state
from kit.show import Mark, Part, Result, Table
from kit.slurm.run import Run, roots
from kit.slurm.states import FINAL_STATES, JobState
from kit.watch.metrics import Metrics

Curve = tuple[Sequence[float], Sequence[float]]  # optimizer steps, losses
FINAL_LOSSES = ("eval_loss_after", "eval_loss", "loss")  # names in a result; the first that is there is compared
SPLITS = ("train", "eval")
CLEAR_DIFFERENCE = 0.1  # relative; the forecast's own median error is about 8 % (kit/forecast/timing.py)
LINES = 50  # of a figure; beyond that a line cannot be followed
FAILED = {*FINAL_STATES} - {JobState.COMPLETED}


def training_result(run: Run) -> dict[str, Any]:
    """What training wrote when it completed: steps, losses, seconds a step, peak memory; empty before."""
    path = run.path / "state" / "result.json"
    return dict(files.read_json(path)) if path.exists() else {}


def loss_curves(run: Run) -> dict[str, Curve]:
    """Every logged loss by split, train and eval."""
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    return {split: metrics.series[f"{split}/loss"][:2] for split in SPLITS if f"{split}/loss" in metrics.series}


@dataclass(frozen=True)
class Entry:
    """A run or an executed notebook. `group` is its sweep, else "run", "script" or "notebook"."""

    name: str
    group: str
    state: str
    settings: Mapping[str, Any]
    result: Mapping[str, Any]
    hours: float | None  # that it ran; None before it started
    gpus: int
    run: Run | None = None

    @property
    def loss(self) -> float | None:
        """The final loss, of the eval split if there is one; None before the end and where it is not finite."""
        found = next((self.result[key] for key in FINAL_LOSSES if self.result.get(key) not in (None, [])), None)
        last = found[-1] if isinstance(found, list) else found
        return float(last) if last is not None and math.isfinite(float(last)) else None

    @property
    def gpu_hours(self) -> float | None:
        """Hours times GPUs."""
        return None if self.hours is None else self.hours * self.gpus

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Losses by split; of a notebook, the lists `loss` and `eval_loss` of its `result`."""
        if self.run:
            return loss_curves(self.run)
        lists = {"train": self.result.get("loss"), "eval": self.result.get("eval_loss")}
        return {
            split: (range(len(losses)), [float(loss) for loss in losses])
            for split, losses in lists.items()
            if isinstance(losses, list)
        }

    @cached_property
    def forecast_error(self) -> ForecastError | None:
        """Forecast and fact; None for a script or a notebook, and for models that cannot be forecast."""
        if not self.run or not self.run.trains:
            return None
        with contextlib.suppress(InputError):
            manifest = Dataset(Path(self.run.info["dataset"])).manifest
            measured = {key: self.result.get(key) for key in ("step_s", "peak_gib")}
            return forecast_error(self.run.recipe, self.run.cluster, manifest, hours=self.hours, **measured)
        return None


@dataclass(frozen=True)
class Comparison(Result):
    """Entries side by side, lowest loss first; those that completed before the others."""

    entries: Sequence[Entry]

    def as_dict(self) -> dict[str, Any]:
        """The rows of all tables."""
        tables = {"groups": self.groups(), "runs": self.table(), "forecasts": self.forecasts()}
        rows = {
            name: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for name, table in tables.items()
        }
        return rows | {"corrections": self.corrections()}

    def parts(self) -> Iterator[Part]:
        """Groups, entries, and forecasts."""
        if not self.entries:
            yield "No runs and no executed notebooks were found."
            return
        yield self.groups()
        yield self.table()
        yield from (self.losses(split) for split in SPLITS if self.curves(split))
        forecasts = self.forecasts()
        if forecasts.rows:
            yield forecasts
        yield from (f"{name}: {advice}" for name, advice in self.corrections().items())

    def groups(self) -> Table:
        """A row for each group: how many ended how, the lowest loss and its setting, the cost."""
        rows = []
        for group in dict.fromkeys(entry.group for entry in self.entries):
            entries = [entry for entry in self.entries if entry.group == group]
            best = entries[0]
            states = Counter(entry.state for entry in entries).most_common()
            rows.append(
                [
                    group,
                    ", ".join(f"{count} {state}" for state, count in states),
                    best.loss,
                    (self.setting(best) or best.name) if best.loss is not None else "",
                    sum(entry.hours or 0.0 for entry in entries),
                    sum(entry.gpu_hours or 0.0 for entry in entries),
                ]
            )
        return Table(["group", "states", "lowest loss", "of", "hours", "GPU hours"], rows)

    def table(self) -> Table:
        """A row for each entry: state, the settings that differ within its group, losses, hours and GPU hours."""
        columns = ["name", "state", "setting", "steps", "loss before", "loss", "hours", "GPU hours"]
        rows = [
            [
                entry.name,
                entry.state,
                self.setting(entry),
                entry.result.get("steps"),
                entry.result.get("eval_loss_before"),
                entry.loss,
                entry.hours,
                entry.gpu_hours,
            ]
            for entry in self.entries
        ]
        marks: dict[int, Mark] = {n: "bad" for n, entry in enumerate(self.entries) if entry.state in FAILED}
        return Table(columns, rows, marks=marks)

    def setting(self, entry: Entry) -> str:
        """The settings in which it differs from the others of its group, in a line."""
        group = [other.settings for other in self.entries if other.group == entry.group]
        differ = {
            key: value for key, value in entry.settings.items() if len({str(other.get(key)) for other in group}) > 1
        }
        return label(differ) if differ else ""

    def forecasts(self) -> Table:
        """A row for each run that trained: seconds a step, hours and peak GiB, forecast and actual."""
        names = {"step_s": "s a step", "hours": "hours", "peak_gib": "peak GiB"}
        columns = ["run", *(f"{name}, {kind}" for name in names.values() for kind in ("forecast", "actual"))]
        rows = [
            [entry.name, *(value for key in names for value in getattr(entry.forecast_error, key))]
            for entry in self.entries
            if entry.forecast_error
        ]
        return Table(columns, rows, title="Forecast and fact")

    def corrections(self) -> dict[str, str]:
        """By run, the rate in its cluster profile that explains a step which differs clearly from its forecast."""
        found = {entry.name: entry.forecast_error for entry in self.entries if entry.forecast_error}
        return {
            name: error.correction.advice
            for name, error in found.items()
            if error.correction and (error.step_s.off or 0.0) > CLEAR_DIFFERENCE
        }

    def losses(self, split: str = "train") -> Figure:
        """A figure of losses over steps; `split` is "train" or "eval". An entry has the same colour in both."""
        colours = {name: COLOURS[min(place, len(COLOURS) - 1)] for place, name in enumerate(self._named())}
        curves = self.curves(split)
        return figures.lines(f"Loss, {split}", "optimizer step", "loss (nats per token)", curves, colours)

    def curves(self, split: str) -> dict[str, Curve]:
        """Steps and losses of the LINES best entries, by setting; by name if settings do not tell them apart."""
        return {name: entry.curves[split] for name, entry in self._named().items() if split in entry.curves}

    def _named(self) -> dict[str, Entry]:
        entries = [entry for entry in self.entries if entry.curves][:LINES]
        settings = {self.setting(entry) for entry in entries} - {""}
        one_group = len({entry.group for entry in entries}) == 1
        by_setting = one_group and len(settings) == len(entries)
        return {self.setting(entry) if by_setting else entry.name: entry for entry in entries}


def compare(folder: str | Path | None = None, notebooks: str | Path | None = None, only: str = "") -> Comparison:
    """Compare the runs and sweeps in `folder`, and the executed notebooks in `folder` and `notebooks`.

    Without a folder: the runs in ./runs and in every other folder in which this user launched one. `only` keeps the
    entries with this text in their name. Raises InputError if a named folder does not exist.
    """
    named = list(dict.fromkeys(Path(one).absolute() for one in (folder, notebooks) if one))
    for one in named:
        if not one.is_dir():
            raise InputError(f"{one} is not a folder; name one that holds runs or executed notebooks.")
    found = [entry for one in (named if folder else [*roots(), *named]) for entry in _entries(one)]
    return Comparison(ranked([entry for entry in _unique(found) if only in entry.name]))


def _unique(entries: Sequence[Entry]) -> list[Entry]:
    """Every run once: a sweep's own runs folder is also one of the folders in which the user launched runs."""
    of_sweeps = {entry.run for entry in entries if entry.group not in ("run", "script")}
    return [entry for entry in entries if entry.group not in ("run", "script") or entry.run not in of_sweeps]


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Lowest final loss first, those that completed before the others, those without a loss last."""
    return sorted(entries, key=lambda entry: (entry.loss is None, entry.state != "COMPLETED", entry.loss or 0.0))


def _entries(folder: Path) -> Iterator[Entry]:
    """Newest runs first, then notebooks. A damaged run is left out, so that it does not hide the others."""
    for path in sorted(folder.glob("*/run.json"), reverse=True):
        with contextlib.suppress(InputError):
            run = Run(path.parent)
            if (run.path / "sweep.json").exists():
                yield from _sweep_entries(run)
            else:
                yield _run_entry(run)
    for path in sorted(folder.glob("*.ipynb")):
        metadata = _metadata(path)
        if "kit" in metadata:
            yield _notebook_entry(metadata, path.stem, "notebook", notebook_state(metadata))


def _sweep_entries(sweep: Run) -> Iterator[Entry]:
    for task in Sweep(sweep).tasks():
        name, group = f"{sweep.path.name} {task.number}", sweep.path.name
        if task.out.suffix == ".ipynb":
            yield _notebook_entry(_metadata(task.out), name, group, task.state, task.values)
        else:
            yield _run_entry(Run(task.out), name, group, task.state, task.values)


def _notebook_entry(
    metadata: Mapping[str, Any], name: str, group: str, state: str, settings: Mapping[str, Any] | None = None
) -> Entry:
    kit = metadata.get("kit", {})
    hours = kit["duration"] / 3600 if kit.get("duration") else None
    settings = kit.get("parameters", {}) if settings is None else settings
    return Entry(name, group, state, settings, kit.get("result", {}), hours, len(kit.get("gpus", [])))


def _metadata(path: Path) -> dict[str, Any]:
    """The metadata of a notebook; empty if there is none or it cannot be read."""
    with contextlib.suppress(InputError):
        return dict(read_notebook(path).metadata)
    return {}


def _run_entry(
    run: Run, name: str = "", group: str = "", state: str = "", settings: Mapping[str, Any] | None = None
) -> Entry:
    state = state or str(run.state.state)
    if settings is None:
        settings = dotted(schema.as_dict(run.recipe)) if run.trains else {}
    seconds = seconds_run(run, state in FINAL_STATES, time.time())
    return Entry(
        name or run.path.name,
        group or ("run" if run.trains else "script"),
        state,
        settings,
        training_result(run),
        None if seconds is None else seconds / 3600,
        run.recipe.world_size if run.trains and run.cluster.nodes.gpus else 0,
        run,
    )
