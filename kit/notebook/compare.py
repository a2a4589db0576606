"""Compare runs, tasks of sweeps and executed notebooks: state, settings, loss, cost, forecast and fact."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from kit import figures, files
from kit.config import schema
from kit.data.dataset import Dataset
from kit.errors import InputError
from kit.figures import Figure
from kit.figures.palette import COLOURS
from kit.forecast.timing import Prediction, predict
from kit.notebook.grid import dotted, label
from kit.notebook.parameters import read_notebook
from kit.notebook.run_time import seconds_run
from kit.notebook.sweep import Sweep, notebook_state
from kit.show import Hours, Mark, Part, Result, Table, progress_bar
from kit.slurm.ended import EndedRuns
from kit.slurm.run import Run, roots
from kit.slurm.states import FINAL_STATES, JobState
from kit.watch.metrics import Metrics

Curve = tuple[Sequence[float], Sequence[float]]  # optimizer steps, losses
FINAL_LOSSES = ("eval_loss_after", "eval_loss", "loss")  # names in a result; the first that is there is compared
SPLITS = ("train", "eval")
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
    def took(self) -> Hours | None:
        """The hours that it ran, as tables show them."""
        return None if self.hours is None else Hours(self.hours)

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
    def forecast(self) -> Prediction | None:
        """The forecast of a run on its dataset; None for a script or a notebook, and for unknown models."""
        if not self.run or not self.run.trains:
            return None
        with contextlib.suppress(InputError):
            return _forecast(self.run)
        return None


_forecasts: dict[tuple[str, str, str], Prediction] = {}  # by recipe, cluster and dataset


def _forecast(run: Run) -> Prediction:
    """The forecast of a run; one for all that differ in nothing but what neither time nor memory depends on."""
    schedule = replace(run.recipe.schedule, lr=1.0, seed=0, scheduler="constant", warmup_ratio=0.0, weight_decay=0.0)
    recipe, dataset = replace(run.recipe, name="compared", schedule=schedule), Path(run.info["dataset"])
    key = (repr(recipe), repr(run.cluster), str(dataset))
    if key not in _forecasts:
        _forecasts[key] = predict(run.recipe, run.cluster, Dataset(dataset).manifest)
    return _forecasts[key]


@dataclass(frozen=True)
class Comparison(Result):
    """Entries side by side, lowest loss first; those that completed before the others."""

    entries: Sequence[Entry]

    def as_dict(self) -> dict[str, Any]:
        """The rows of all tables."""
        tables = {"groups": self.groups(), "runs": self.table(), "forecasts": self.forecasts()}
        return {
            name: [dict(zip(table.columns, row, strict=True)) for row in table.rows] for name, table in tables.items()
        }

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
                    Hours(sum(entry.hours or 0.0 for entry in entries)),
                    sum(entry.gpu_hours or 0.0 for entry in entries),
                ]
            )
        return Table(["group", "states", "lowest loss", "of", "ran for", "GPU hours"], rows)

    def table(self) -> Table:
        """A row for each entry: state, the settings that differ within its group, losses, hours and GPU hours."""
        columns = ["name", "state", "setting", "steps", "loss before", "loss", "ran for", "GPU hours"]
        rows = [
            [
                entry.name,
                entry.state,
                self.setting(entry),
                entry.result.get("steps"),
                entry.result.get("eval_loss_before"),
                entry.loss,
                entry.took,
                entry.gpu_hours,
            ]
            for entry in self.entries
        ]
        marks: dict[int, Mark] = {n: "bad" for n, entry in enumerate(self.entries) if entry.state in FAILED}
        return Table(columns, rows, marks=marks)

    def setting(self, entry: Entry) -> str:
        """The settings in which it differs from the others of its group, in a line."""
        names = self._different[entry.group]
        differ = {key: value for key, value in entry.settings.items() if key in names}
        return label(differ) if differ else ""

    @cached_property
    def _different(self) -> dict[str, set[str]]:
        """For each group the names of the settings in which its entries differ."""
        found: dict[str, set[str]] = {}
        first: dict[str, Mapping[str, Any]] = {}
        for entry in self.entries:
            other = first.setdefault(entry.group, entry.settings)
            names = found.setdefault(entry.group, set())
            names |= {
                key for key in {*other, *entry.settings} - names if str(other.get(key)) != str(entry.settings.get(key))
            }
        return found

    def forecasts(self) -> Table:
        """A row for each run that trained: seconds a step, hours and peak GiB allocated, forecast and actual."""
        names = ("s/step", "ran for", "peak GiB")
        columns = ["run", *(f"{name}, {kind}" for name in names for kind in ("forecast", "actual"))]
        rows = [_forecast_row(entry, entry.forecast) for entry in self.entries if entry.forecast]
        return Table(columns, rows, title="Forecast and fact")

    def losses(self, split: str = "train") -> Figure:
        """A figure of losses over steps; `split` is "train" or "eval". An entry has the same colour in both."""
        colours = {name: COLOURS[min(place, len(COLOURS) - 1)] for place, name in enumerate(self._named())}
        curves = self.curves(split)
        return figures.lines(f"Loss, {split}", "optimizer step", "loss (nats per token)", curves, colours)

    def curves(self, split: str) -> dict[str, Curve]:
        """Steps and losses of the LINES best entries, by setting; by name if settings do not tell them apart."""
        return {name: entry.curves[split] for name, entry in self._named().items() if split in entry.curves}

    @cached_property
    def _best(self) -> list[Entry]:
        """The LINES best that have curves; the logs of the others are not read."""
        return list(islice((entry for entry in self.entries if entry.curves), LINES))

    def _named(self) -> dict[str, Entry]:
        entries = self._best
        settings = {self.setting(entry) for entry in entries} - {""}
        one_group = len({entry.group for entry in entries}) == 1
        by_setting = one_group and len(settings) == len(entries)
        return {self.setting(entry) if by_setting else entry.name: entry for entry in entries}


def _forecast_row(entry: Entry, forecast: Prediction) -> list[Any]:
    step = [forecast.time.step_s, entry.result.get("step_s")]
    hours = [None if forecast.time.wall_h is None else Hours(forecast.time.wall_h), entry.took]
    return [entry.name, *step, *hours, forecast.memory.allocated_gib, entry.result.get("peak_gib")]


def compare(
    folder: str | Path | None = None, notebooks: str | Path | None = None, only: str = "", progress: bool = False
) -> Comparison:
    """Compare the runs and sweeps in `folder`, and the executed notebooks in `folder` and `notebooks`.

    Without a folder: the runs in ./runs and in every other folder in which this user launched one. `only` keeps the
    entries with this text in their name, and `progress` shows a bar.

    Raises InputError if a named folder does not exist.
    """
    named = list(dict.fromkeys(Path(one).absolute() for one in (folder, notebooks) if one))
    for one in named:
        if not one.is_dir():
            raise InputError(f"{one} is not a folder; name one that holds runs or executed notebooks.")
    places = [place for one in (named if folder else [*roots(), *named]) for place in _places(one)]
    found: list[Entry] = []
    ended = EndedRuns()
    with progress_bar(len(places), "compare", shown=progress) as bar:
        for place in places:
            found += _entries(place, ended)
            bar.update(1)
    ended.save()
    return Comparison(ranked([entry for entry in _unique(found) if only in entry.name]))


def _unique(entries: Sequence[Entry]) -> list[Entry]:
    """Every run once: a sweep's own runs folder is also one of the folders in which the user launched runs."""
    of_sweeps = {entry.run for entry in entries if entry.group not in ("run", "script")}
    return [entry for entry in entries if entry.group not in ("run", "script") or entry.run not in of_sweeps]


def ranked(entries: Sequence[Entry]) -> list[Entry]:
    """Lowest final loss first, those that completed before the others, those without a loss last."""
    return sorted(entries, key=lambda entry: (entry.loss is None, entry.state != "COMPLETED", entry.loss or 0.0))


def _places(folder: Path) -> list[Path]:
    """The records of runs, newest first, then notebooks."""
    return [*sorted(folder.glob("*/run.json"), reverse=True), *sorted(folder.glob("*.ipynb"))]


def _entries(place: Path, ended: EndedRuns) -> Iterator[Entry]:
    """The entries of a run or of a notebook. One that is damaged is left out, so that it does not hide the others."""
    if place.suffix == ".ipynb":
        metadata = _metadata(place)
        if "kit" in metadata:
            yield _notebook_entry(metadata, place.stem, "notebook", notebook_state(metadata))
        return
    with contextlib.suppress(InputError):
        run = Run(place.parent)
        if (run.path / "sweep.json").exists():
            yield from _sweep_entries(run)
        else:
            yield _run_entry(run, state=str(ended.state_of(run).state))


def _sweep_entries(sweep: Run) -> Iterator[Entry]:
    for task in Sweep(sweep).tasks():
        name, group = f"{sweep.path.name} {task.number}", sweep.path.name
        if task.out.suffix == ".ipynb":
            yield _notebook_entry(_metadata(task.out), name, group, task.state, task.values)
        else:
            yield _run_entry(Run(task.out), name, group, state=task.state, settings=task.values)


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
    run: Run, name: str = "", group: str = "", *, state: str, settings: Mapping[str, Any] | None = None
) -> Entry:
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
