"""Runs, tasks of sweeps and executed notebooks side by side: state, setting, loss, cost, and forecast beside fact."""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kit import files
from kit.chart import COLOURS, Chart, Line
from kit.config import schema
from kit.data.dataset import Dataset
from kit.errors import InputError
from kit.forecast.timing import predict
from kit.notebook.parameters import dotted, label, read_notebook
from kit.notebook.sweep import tasks
from kit.slurm.ledger import read_records
from kit.slurm.run import Run
from kit.slurm.states import FINAL_STATES, ExitRecord, Record, SacctRecord, SlurmRecord, StartRecord
from kit.watch.metrics import Metrics

Curve = tuple[Sequence[float], Sequence[float]]
ENDS = ("eval_loss_after", "eval_loss", "loss")  # what a run or a notebook is judged by: the first that it left


def result(run: Run) -> dict[str, Any]:
    """What training left when it ended well: steps, losses, seconds a step, peak memory; empty before."""
    path = run.path / "state" / "result.json"
    return dict(files.read_json(path)) if path.exists() else {}


def curves(run: Run) -> dict[str, Curve]:
    """Optimizer steps and losses by split, train and eval: every value that was logged."""
    metrics = Metrics(run.path)
    while metrics.poll():
        pass
    return {k: metrics.series[f"{k}/loss"][:2] for k in ("train", "eval") if f"{k}/loss" in metrics.series}


@dataclass(frozen=True)
class Entry:
    """A run or an executed notebook; `group` is its sweep, or its kind. Hours of its last job, until now or its end."""

    name: str
    group: str
    state: str
    settings: Mapping[str, Any]
    left: Mapping[str, Any]
    hours: float | None
    gpus: int
    run: Run | None = None

    @property
    def loss(self) -> float | None:
        """At the end: of the eval split, else of training. None before, and where it is not finite."""
        ends = (self.left.get(key) for key in ENDS)
        last = next((end[-1] if isinstance(end, list) else end for end in ends if end not in (None, [])), math.nan)
        return float(last) if math.isfinite(float(last)) else None

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Steps and losses by split; of a notebook, the lists `loss` and `eval_loss` of its `result`."""
        if self.run:
            return curves(self.run)
        named = {"train": self.left.get("loss"), "eval": self.left.get("eval_loss")}
        return {k: (range(len(v)), [float(one) for one in v]) for k, v in named.items() if isinstance(v, list)}


def gather(*folders: str | Path, only: str = "") -> list[Entry]:
    """Runs, tasks of sweeps and executed notebooks in these folders; `only` those with this in their name."""
    found: list[Entry] = []
    for folder in (Path(folder).absolute() for folder in folders):
        for path in sorted(folder.glob("*/run.json"), reverse=True):
            with contextlib.suppress(InputError):  # a damaged one hides no other
                found += _of_sweep(run) if ((run := Run(path.parent)).path / "sweep.json").exists() else [_of_run(run)]
        executed = (path for path in sorted(folder.glob("*.ipynb")) if "kit" in _metadata(path))
        found += [_of_notebook(path, path.stem, "notebook") for path in executed]
    return [entry for entry in found if only in entry.name]


def _of_sweep(sweep: Run) -> list[Entry]:
    found = []
    for task in tasks(sweep):
        named = f"{sweep.path.name} {task.number}", sweep.path.name, task.state, task.values
        found.append(_of_notebook(task.out, *named) if task.out.suffix == ".ipynb" else _of_run(Run(task.out), *named))
    return found


def _of_notebook(path: Path, name: str, group: str, now: str = "", settings: Any = None) -> Entry:
    meta = _metadata(path)
    kit = meta.get("kit", {})
    now = now or {None: "RUNNING", True: "FAILED", False: "COMPLETED"}[meta["papermill"]["exception"]]
    hours, gpus = kit["duration"] / 3600 if kit.get("duration") else None, len(kit.get("gpus", []))
    return Entry(name, group, now, settings or kit.get("parameters", {}), kit.get("result", {}), hours, gpus)


def _metadata(path: Path) -> dict[str, Any]:
    """Of a notebook; empty where it is not there, or is none of Python's."""
    with contextlib.suppress(InputError):
        return dict(read_notebook(path).metadata)
    return {}


def _is_end(record: Record) -> bool:
    state = record.state if isinstance(record, SlurmRecord | SacctRecord) else None
    return isinstance(record, ExitRecord) or (state is not None and state.final)


def _of_run(run: Run, name: str = "", group: str = "", now: str = "", settings: Any = None) -> Entry:
    now, records = now or run.state.state, read_records(run)
    starts = [record.time for record in records if isinstance(record, StartRecord)]
    ends = [record.time for record in records if _is_end(record)]
    end = min(ends, default=None) if now in FINAL_STATES else time.time()
    hours = (end - min(starts)) / 3600 if starts and end else None
    gpus = run.recipe.world_size if run.trains and run.cluster.nodes.gpus else 0
    settings = settings or (dotted(schema.as_dict(run.recipe)) if run.trains else {})
    name, group = name or run.path.name, group or ("run" if run.trains else "script")
    return Entry(name, group, now, settings, result(run), hours, gpus, run)


def differing(entry: Entry, found: Sequence[Entry]) -> str:
    """The settings in which it differs from the others of its group, in a line."""
    group = [other.settings for other in found if other.group == entry.group]
    keys = [k for k in entry.settings if len({str(s.get(k)) for s in group}) > 1]
    return label({key: entry.settings[key] for key in keys}) if keys else ""


def ranked(found: Sequence[Entry]) -> list[Entry]:
    """Lowest loss first, those that ended well before the others."""
    return sorted(found, key=lambda e: (e.loss is None, e.state != "COMPLETED", e.loss or 0.0))


def table(found: Sequence[Entry]) -> Any:
    """A DataFrame, lowest loss first: state, the settings that differ, losses, hours and GPU hours."""
    import pandas as pd

    rows = [
        {
            "name": e.name, "state": e.state, "setting": differing(e, found), "steps": e.left.get("steps"),
            "loss before": e.left.get("eval_loss_before"), "loss": e.loss, "hours": e.hours,
            "GPU hours": e.hours and e.hours * e.gpus,
        }
        for e in ranked(found)
    ]  # fmt: skip
    return pd.DataFrame(rows).round(4).astype(object).fillna("")


def summary(found: Sequence[Entry]) -> str:
    """A line a group: how many ended how, the best setting, and what all of them cost."""
    lines = []
    for group in dict.fromkeys(entry.group for entry in found):
        mine = [entry for entry in ranked(found) if entry.group == group]
        states = ", ".join(f"{n} {state}" for state, n in Counter(e.state for e in mine).most_common())
        hours, cost = sum(e.hours or 0.0 for e in mine), sum((e.hours or 0.0) * e.gpus for e in mine)
        first = mine[0]
        best = (
            f"; lowest loss {first.loss:.4f}: {differing(first, found) or first.name}" if first.loss is not None else ""
        )
        lines.append(f"{group}: {states}{best}; {hours:.2f} hours, {cost:.2f} GPU hours")
    return "\n".join(lines)


def losses(found: Sequence[Entry], split: str = "train") -> Chart:
    """Losses over steps: the lowest in a colour each, the same in the chart of either split, the others in one."""
    order = [entry for entry in ranked(found) if entry.curves]
    alone, lines = len(order) if len(order) <= len(COLOURS) else len(COLOURS) - 1, []
    one_group = len({entry.group for entry in order}) == 1
    for place, entry in enumerate(order):
        name = (one_group and differing(entry, found)) or entry.name
        lines.append(Line(name if place < alone else "the others", *entry.curves.get(split, ([], []))))
    return Chart(f"Loss, {split}", "optimizer step", "loss (nats a token)", lines)


def forecasts(found: Sequence[Entry]) -> Any:
    """A DataFrame of what trained: seconds a step, hours and peak GiB, forecast and actual."""
    import pandas as pd

    rows = []
    for entry in found:
        with contextlib.suppress(InputError):  # no recipe, or a family of models that the forecast does not know
            if entry.run and entry.run.trains:
                rows.append({"run": entry.name, **_beside(entry, entry.run)})
    return pd.DataFrame(rows).astype(object).fillna("")


def _beside(entry: Entry, run: Run) -> dict[str, Any]:
    """Name, forecast or actual, of each figure, to three digits."""
    known = predict(run.recipe, run.cluster, Dataset(Path(run.info["dataset"])).manifest)
    foreseen = {"s a step": known.time.step_s, "hours": known.time.wall_h, "peak GiB": known.memory.allocated_gib}
    actual = {"s a step": entry.left.get("step_s"), "hours": entry.hours, "peak GiB": entry.left.get("peak_gib")}
    pairs = {f"{k}, {w}": v[k] for k in foreseen for w, v in (("forecast", foreseen), ("actual", actual))}
    return {key: value and float(f"{value:.3g}") for key, value in pairs.items()}
