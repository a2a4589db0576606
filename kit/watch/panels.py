"""Panels of the board: which charts are drawn of the runs, and the header of each run."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kit.errors import InputError
from kit.figures.base import COLOURS
from kit.watch.charts import POINTS, Chart, Line
from kit.watch.metrics import Key
from kit.watch.samples import CPU, Reading
from kit.watch.status import BoardState, RunStatus

STEP, MINUTES = "optimizer step", "minutes since the first sample"
STEADY = ("Learning rate", "CPU memory", "GPU memory", "GPU temperature")  # panels that are never smoothed
TRAFFIC_SHOWN = 1e-4  # GB/s; below it the traffic is that of an idle node
RUNNING_STATES = (BoardState.RUNNING,)
SUCCESS_STATES = (BoardState.FINISHED, "COMPLETED")
BLUE, RED, GREEN, AMBER = COLOURS[:4]


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
TRAFFIC = {
    "Network": {"received": "net_gb_s_in", "sent": "net_gb_s_out"},
    "Disk": {"read": "disk_gb_s_read", "written": "disk_gb_s_write"},
}


@dataclass
class View:
    """How a person looks at the board: weight of the past in smoothing, panels on a log scale, zoom of the x axes."""

    smooth: float = 0.0
    log: list[str] = field(default_factory=list)
    zoom: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Header:
    """The header of a run above the panels; `done` is the part of its steps that is done, 0 to 1."""

    title: str
    status: str
    colour: str
    done: float


def header(run: RunStatus) -> Header:
    """Title, status line with its colour, and progress."""
    colour = RED if run.over else AMBER
    if run.state in RUNNING_STATES:
        colour = BLUE
    elif run.state in SUCCESS_STATES:
        colour = GREEN
    progress = run.progress
    done = min(1.0, progress.step / progress.steps) if progress.steps else 0.0
    return Header(run.title, run.line(), colour, done)


def charts(runs: Sequence[RunStatus], view: View, also: Sequence[str] = ()) -> list[Chart]:
    """The panels in reading order, `also` of other logged names; empty panels only before the first row."""
    panels = _Panels(runs, view)
    found = [*panels.logged(), *panels.others(also), *panels.hardware(), *panels.traffic()]
    early = not any(run.metrics.newest for run in runs)
    return [chart for chart in found if chart.lines or early]


def unknown(runs: Sequence[RunStatus], also: Sequence[str]) -> list[str]:
    """For each name in `also` that no run has logged, a sentence with the names that are known; none before a row."""
    sentences = []
    reporting = [run for run in runs if run.metrics.newest]
    for key in also:
        if reporting and all(key not in run.metrics.series for run in runs):
            try:
                reporting[0].metrics.line(key, POINTS)
            except InputError as error:
                sentences.append(str(error))
    return sentences


class _Panels:
    """Makes the charts of some runs in a view."""

    def __init__(self, runs: Sequence[RunStatus], view: View) -> None:
        self.runs, self.view = runs, view

    def logged(self) -> Iterator[Chart]:
        """Loss, throughput and what else every trainer logs."""
        for panel in LOGGED:
            lines = []
            for run in self.runs:
                for name, keys in panel.lines.items():
                    key = next((key for key in keys if key in run.metrics.series), None)
                    lines += [self._line(run, name, key, STEP)] if key else []
            yield self._chart(panel.title, STEP, panel.y_title, lines, panel.low)
            if panel.title == "Throughput":
                yield from self._mfu()

    def _mfu(self) -> Iterator[Chart]:
        """Model FLOPs utilisation as logged, or from tokens/s by the forecast's FLOPs a token and the GPU's peak."""
        lines = []
        for run in self.runs:
            key = next((key for key in ("train/mfu", "train/tokens_per_s") if key in run.metrics.series), "")
            factor = 1.0 if key == "train/mfu" else run.forecast.mfu_per_token_s
            if key and factor:
                line = self._line(run, "MFU", key, STEP)
                lines.append(Line(line.name, line.x, 100 * factor * np.asarray(line.y)))
        if lines:
            yield self._chart("MFU", STEP, "% of peak", lines, 0.0)

    def others(self, also: Sequence[str]) -> Iterator[Chart]:
        """A panel for each of the other names that is logged."""
        for key in also:
            lines = [self._line(run, key, key, STEP) for run in self.runs if key in run.metrics.series]
            if lines:
                yield self._chart(key, STEP, key.rpartition("/")[2], lines)

    def hardware(self) -> Iterator[Chart]:
        """Utilisation, memory, power and temperature of every GPU, or of every node where no GPU is seen."""
        devices = [(run, *device) for run in self.runs for device in _devices(run)]
        kind = "CPU" if devices and all(device == CPU for _, _, device in devices) else "GPU"
        for title, unit, name in (
            ("utilisation", "%", "util"),
            ("memory", "GiB", "mem_gib"),
            ("power", "W", "power_w"),
            ("temperature", "°C", "temp_c"),
        ):
            lines = []
            for run, host, device in devices:
                key = Reading(host, device, name)
                if key in run.metrics.series:
                    label = host if device == CPU else f"{host} GPU {device}"
                    lines.append(self._line(run, label if len(devices) <= len(COLOURS) else host, key, MINUTES, label))
            if name == "mem_gib":
                lines += self._capacity()
            if lines or name in ("util", "mem_gib"):
                low = math.inf if name == "temp_c" else 0.0
                high = 100.0 if name == "util" else -math.inf
                yield self._chart(f"{kind} {title}", MINUTES, unit, lines, low, high)

    def _capacity(self) -> list[Line]:
        """The memory of the smallest GPU, as a limit."""
        found = [
            (series, run)
            for run in self.runs
            for key, series in list(run.metrics.series.items())
            if isinstance(key, Reading) and key.name == "mem_total_gib"
        ]
        if not found:
            return []
        series, run = min(found, key=lambda pair: pair[0].values[-1])
        ends = np.array([series.steps[0], series.steps[-1]])
        return [Line("capacity", (ends - run.metrics.first_sample) / 60, [series.values[-1]] * 2, limit=True)]

    def traffic(self) -> Iterator[Chart]:
        """Network and disk rates of every node, where there is any traffic."""
        for title, ways in TRAFFIC.items():
            lines = []
            for run in self.runs:
                names = tuple(ways.values())
                keys = [key for key in list(run.metrics.series) if isinstance(key, Reading) and key.name in names]
                hosts = sorted({key.host for key in keys})
                a_line_each = 1 < len(hosts) <= len(COLOURS) // len(ways)
                for host in hosts:
                    for way, name in ways.items():
                        label, key = f"{host} {way}", Reading(host, CPU, name)
                        if key in run.metrics.series:
                            lines.append(self._line(run, label if a_line_each else way, key, MINUTES, label))
            if any(np.any(np.asarray(line.y) > TRAFFIC_SHOWN) for line in lines):
                yield self._chart(title, MINUTES, "GB/s", lines, 0.0)

    def _chart(
        self, title: str, x_title: str, y_title: str, lines: list[Line], low: float = math.inf, high: float = -math.inf
    ) -> Chart:
        log, smooth = title in self.view.log, self.view.smooth
        return Chart(title, x_title, y_title, lines, low, high, log, smooth, noisy=title not in STEADY)

    def _line(self, run: RunStatus, name: str, key: Key, axis: str, label: str = "") -> Line:
        """The line; what is zoomed into has as many points as the rest of it."""
        x, y = run.metrics.line(key, POINTS)
        series = run.metrics.series[key]
        begin, unit = (run.metrics.first_sample, 60.0) if axis == MINUTES else (0.0, 1.0)
        if axis in self.view.zoom and len(series.steps) > POINTS:
            low, high = (begin + unit * end for end in self.view.zoom[axis])
            fine_x, fine_y = series.part(low, high).thin(POINTS)
            before, behind = x < low, x > high
            x = np.concatenate([x[before], fine_x, x[behind]])
            y = np.concatenate([y[before], fine_y, y[behind]])
        prefix = f"{run.title} " if len(self.runs) > 1 else ""
        label = prefix + label if label else ""
        return Line(prefix + name, (x - begin) / unit, y, label=label, not_finite=len(series.not_finite))


def _devices(run: RunStatus) -> list[tuple[str, int | str]]:
    """(host, GPU) of every GPU; without any, (host, CPU) of every node."""
    devices = {(key.host, key.device) for key in list(run.metrics.series) if isinstance(key, Reading)}
    gpus = [one for one in devices if one[1] != CPU]
    return sorted(gpus or devices, key=str)
