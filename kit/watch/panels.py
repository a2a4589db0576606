"""Panels of the board: which charts are drawn of the runs, and the header of each run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kit.figures.charts import Chart, Line
from kit.figures.palette import BAD, BLUE, GOOD, ORANGE
from kit.figures.points import Floats
from kit.watch.hardware import hardware, traffic
from kit.watch.status import BoardState, RunStatus
from kit.watch.verdict import verdict
from kit.watch.view import AXIS_KEYS, AXIS_TITLES, View, XAxis, chart, points

RUNNING_STATES = (BoardState.RUNNING,)
SUCCESS_STATES = (BoardState.FINISHED, "COMPLETED")


@dataclass(frozen=True)
class LoggedPanel:
    """A panel of logged metrics: of each line the names under which trainers log it, the first known one counts."""

    title: str
    y_title: str
    lines: Mapping[str, Sequence[str]]
    low: float = 0.0


LOGGED = (
    LoggedPanel(
        "Loss", "cross-entropy (nats)", {"train": ("train/loss", "loss"), "eval": ("eval/loss", "val_loss")}, math.inf
    ),
    LoggedPanel("Throughput", "tokens/s", {"all ranks": ("train/tokens_per_s",)}),
    LoggedPanel("Learning rate", "learning rate", {"learning rate": ("train/learning_rate",)}),
    LoggedPanel("Gradient norm", "norm", {"gradient norm": ("train/grad_norm",)}),
)


@dataclass(frozen=True)
class Header:
    """The header of a run above the panels; `done` is the part of its steps that is done, 0 to 1.

    `verdict` says what its GPUs wait for, and is empty where they are busy.
    """

    title: str
    status: str
    colour: str
    done: float
    verdict: str = ""


def header(run: RunStatus) -> Header:
    """Title, status line with its colour, and progress."""
    colour = BAD if run.over else ORANGE
    if run.state in RUNNING_STATES:
        colour = BLUE
    elif run.state in SUCCESS_STATES:
        colour = GOOD
    progress = run.progress
    done = min(1.0, progress.step / progress.steps) if progress.steps else 0.0
    found = None if run.over else verdict(run)
    return Header(run.title, run.line(), colour, done, str(found) if found else "")


def charts(runs: Sequence[RunStatus], view: View, also: Sequence[str] = ()) -> list[Chart]:
    """The panels in reading order, `also` of other logged names; empty panels only before the first row."""
    panels = _Panels(runs, view)
    found = [*panels.logged(), *panels.others(also), *hardware(runs, view), *traffic(runs, view)]
    early = not any(run.metrics.newest for run in runs)
    return [chart for chart in found if chart.lines or early]


def unknown(runs: Sequence[RunStatus], also: Sequence[str]) -> list[str]:
    """For each name in `also` that no run has logged, a sentence with the names that are known; none before a row."""
    sentences = []
    reporting = [run for run in runs if run.metrics.newest]
    for key in also:
        if reporting and all(key not in run.metrics.series for run in runs):
            sentences.append(reporting[0].metrics.suggestion(key))
    return sentences


def axes(runs: Sequence[RunStatus]) -> list[XAxis]:
    """The x axes that all runs with rows have."""
    reporting = [run for run in runs if run.metrics.newest]
    known = [axis for axis, key in AXIS_KEYS.items() if all(key in run.metrics.series for run in reporting)]
    return [XAxis.STEP, *(known if reporting else [])]


class _Panels:
    """Makes the charts of some runs in a view."""

    def __init__(self, runs: Sequence[RunStatus], view: View) -> None:
        self.runs, self.view = runs, view
        self.axis = XAxis(view.axis) if view.axis in axes(runs) else XAxis.STEP

    def logged(self) -> Iterator[Chart]:
        """Loss, throughput and what else every trainer logs."""
        for panel in LOGGED:
            found = [
                (run, name, key)
                for run in self.runs
                for name, keys in panel.lines.items()
                if (key := next((key for key in keys if key in run.metrics.series), None))
            ]
            lines = [self._logged_line(run, name, key, len(found)) for run, name, key in found]
            yield self._chart(panel.title, panel.y_title, lines, panel.low)
            if panel.title == "Throughput":
                yield from self._mfu()

    def _mfu(self) -> Iterator[Chart]:
        """Model FLOPs utilisation as logged, or from tokens/s by the forecast's FLOPs a token and the GPU's peak."""
        lines = []
        for run in self.runs:
            key = next((key for key in ("train/mfu", "train/tokens_per_s") if key in run.metrics.series), "")
            factor = 1.0 if key == "train/mfu" else run.forecast.mfu_per_token_s
            if key and factor:
                line = self._logged_line(run, "MFU", key, len(self.runs))
                lines.append(replace(line, y=100 * factor * np.asarray(line.y)))
        if lines or any(run.forecast.mfu_per_token_s for run in self.runs):
            yield self._chart("MFU", "% of peak", lines, 0.0)

    def others(self, also: Sequence[str]) -> Iterator[Chart]:
        """A panel for each of the other names that is logged."""
        for key in also:
            found = [run for run in self.runs if key in run.metrics.series]
            lines = [self._logged_line(run, key, key, len(found)) for run in found]
            if lines:
                yield self._chart(key, key.rpartition("/")[2], lines)

    def _chart(self, title: str, y_title: str, lines: list[Line], low: float = math.inf) -> Chart:
        return chart(self.view, title, (AXIS_TITLES[self.axis], y_title), lines, low)

    def _logged_line(self, run: RunStatus, name: str, key: str, lines: int) -> Line:
        """A line of a logged metric in a panel of so many lines."""
        ends = self.view.zoom.get(AXIS_TITLES[self.axis])
        x, y = points(run, key, lines)
        if ends:
            low, high = (self._step(run, end) for end in ends)
            fine_x, fine_y = points(run, key, lines, (low, high))
            before, behind = x < low, x > high  # these count in a moving average
            x = np.concatenate([x[before], fine_x, x[behind]])
            y = np.concatenate([y[before], fine_y, y[behind]])
        prefix = f"{run.title} " if len(self.runs) > 1 else ""
        return Line(prefix + name, self._x(run, x), y, not_finite=len(run.metrics.series[key].not_finite))

    def _x(self, run: RunStatus, steps: Floats) -> Floats:
        """Where the steps are on the x axis."""
        if self.axis is XAxis.STEP:
            return steps
        x = np.interp(steps, *run.metrics.series[AXIS_KEYS[self.axis]].arrays())
        return (x - run.began) / 60 if self.axis is XAxis.TIME else x

    def _step(self, run: RunStatus, x: float) -> float:
        """The step at a place of the x axis."""
        if self.axis is XAxis.STEP:
            return x
        steps, values = run.metrics.series[AXIS_KEYS[self.axis]].arrays()
        return float(np.interp(run.began + 60 * x if self.axis is XAxis.TIME else x, values, steps))
