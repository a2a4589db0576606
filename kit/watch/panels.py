"""Panels of the board: what is drawn of the runs, as charts, as one SVG, as text, and as JSON for the widget."""

import math
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from kit.errors import InputError
from kit.watch.charts import BAD, COLOURS, GRID, INK, MUTED, POINTS, Chart, DrawnLine, Line, number
from kit.watch.metrics import Key
from kit.watch.samples import Reading
from kit.watch.series import thin
from kit.watch.status import Standing

WIDTH, COLUMN, PANEL = 960, 490, 230  # pixels
STEP, MINUTES = "optimizer step", "minutes since the first sample"
STEADY = ("Learning rate", "CPU memory", "GPU memory", "GPU temperature")  # not to be smoothed
TRICKLE = 1e-4  # GB/s, below which traffic is that of an idle node
SPARKS = "▁▂▃▄▅▆▇█"
_LOGGED = (  # title, y axis, lowest value, and of each line the names under which it is logged
    ("Loss", "cross-entropy (nats)", math.inf, {"train": ("train/loss", "loss"), "eval": ("eval/loss", "val_loss")}),
    ("Throughput", "tokens/s", 0.0, {"all ranks": ("train/tokens_per_s",)}),
    ("Learning rate", "learning rate", 0.0, {"learning rate": ("train/learning_rate",)}),
    ("Gradient norm", "norm", 0.0, {"gradient norm": ("train/grad_norm",)}),
)
_TRAFFIC = (
    ("Network", {"received": "net_gb_s_in", "sent": "net_gb_s_out"}),
    ("Disk", {"read": "disk_gb_s_read", "written": "disk_gb_s_write"}),
)


@dataclass
class View:
    """How a person wants to see it: weight of the past in smoothing, panels on a log scale, and the zoom of x axes."""

    smooth: float = 0.0
    log: list[str] = field(default_factory=list)
    zoom: dict[str, list[float]] = field(default_factory=dict)


def charts(runs: Sequence[Standing], view: View, also: Sequence[str] = ()) -> list[Chart]:
    """The panels in reading order, `also` of other logged names; empty ones only before the first row."""
    found = [*_logged(runs, view), *_others(runs, view, also), *_load(runs, view), *_traffic(runs, view)]
    early = not any(run.metrics.newest for run in runs)
    return [
        Chart(title, x, y, lines, low, high, title in view.log, view.smooth, title not in STEADY)
        for title, x, y, low, high, lines in found
        if lines or early
    ]


_Panel = tuple[str, str, str, float, float, list[Line]]


def _logged(runs: Sequence[Standing], view: View) -> Iterator[_Panel]:
    for title, y_title, low, names in _LOGGED:
        lines = []
        for run in runs:
            for name, keys in names.items():
                known = [key for key in keys if key in run.metrics.series][:1]
                lines += [_line(_named(run, name, runs), run, key, view, STEP) for key in known]
        yield title, STEP, y_title, low, math.inf, lines
        if title == "Throughput" and (lines := [line for run in runs for line in _mfu(run, runs, view)]):
            yield "MFU", STEP, "% of peak", 0.0, math.inf, lines


def _mfu(run: Standing, runs: Sequence[Standing], view: View) -> Iterator[Line]:
    """As logged, or from tokens/s by the forecast's FLOPs a token and peak."""
    key = next((key for key in ("train/mfu", "train/tokens_per_s") if key in run.metrics.series), "")
    factor = 1.0 if key == "train/mfu" else run.forecast[2]
    if key and factor:
        line = _line(_named(run, "MFU", runs), run, key, view, STEP)
        yield Line(line.name, line.x, 100 * factor * np.asarray(line.y))


def _others(runs: Sequence[Standing], view: View, also: Sequence[str]) -> Iterator[_Panel]:
    for key in also:
        lines = [_line(_named(run, key, runs), run, key, view, STEP) for run in runs if key in run.metrics.series]
        if lines:
            yield key, STEP, key.rpartition("/")[2], math.inf, -math.inf, lines


def unknown(runs: Sequence[Standing], also: Sequence[str]) -> list[str]:
    """A sentence for each wanted name that no run has logged, with those that there are; nothing before any is."""
    out = []
    for key in also:
        if all(key not in run.metrics.series for run in runs):
            for run in [run for run in runs if run.metrics.newest][:1]:
                try:
                    run.metrics.line(key, POINTS)
                except InputError as error:
                    out.append(str(error))
    return out


def _load(runs: Sequence[Standing], view: View) -> Iterator[_Panel]:
    places = [(run, place) for run in runs for place in _places(run)]
    kind = "CPU" if places and all(index == "cpu" for _, (_, index) in places) else "GPU"
    for title, unit, reading, high in (
        ("utilisation", "%", "util", 100.0),
        ("memory", "GiB", "mem_gib", -math.inf),
        ("power", "W", "power_w", -math.inf),
        ("temperature", "°C", "temp_c", -math.inf),
    ):
        lines = []
        for run, (host, index) in places:
            if (host, index, reading) in run.metrics.series:
                label = f"{host} GPU {index}" if index != "cpu" else host
                name = _named(run, label if len(places) <= len(COLOURS) else host, runs)
                lines.append(_line(name, run, Reading(host, index, reading), view, MINUTES, _named(run, label, runs)))
        if reading == "mem_gib":
            lines += _capacity(runs)
        if lines or reading in ("util", "mem_gib"):
            yield f"{kind} {title}", MINUTES, unit, 0.0 if reading != "temp_c" else math.inf, high, lines


def _places(run: Standing) -> list[tuple[str, int | str]]:
    """(host, GPU index) of every GPU, or (host, "cpu") of every node where no GPU is seen."""
    places = {key[:2] for key in list(run.metrics.series) if isinstance(key, tuple)}
    return sorted((p for p in places if p[1] != "cpu"), key=str) or sorted(places, key=str)


def _capacity(runs: Sequence[Standing]) -> list[Line]:
    """The memory of the smallest GPU."""
    sizes = [
        (series.values[-1], run, series)
        for run in runs
        for key, series in list(run.metrics.series.items())
        if key[2:] == ("mem_total_gib",)
    ]
    for size, run, series in sorted(sizes, key=lambda found: found[0])[:1]:
        ends = np.array([series.steps[0], series.steps[-1]])
        return [Line("capacity", (ends - run.metrics.first_sample) / 60, [size, size], limit=True)]
    return []


def _traffic(runs: Sequence[Standing], view: View) -> Iterator[_Panel]:
    for title, ways in _TRAFFIC:
        lines = []
        for run in runs:
            hosts = sorted({key[0] for key in list(run.metrics.series) if key[2:] == (next(iter(ways.values())),)})
            for host in hosts:
                for way, reading in ways.items():
                    label = _named(run, f"{host} {way}", runs)
                    name = label if 1 < len(hosts) <= len(COLOURS) // 2 else _named(run, way, runs)
                    if (host, "cpu", reading) in run.metrics.series:
                        lines.append(_line(name, run, Reading(host, "cpu", reading), view, MINUTES, label))
        if any(np.any(np.asarray(line.y) > TRICKLE) for line in lines):
            yield title, MINUTES, "GB/s", 0.0, -math.inf, lines


def _named(run: Standing, name: str, runs: Sequence[Standing]) -> str:
    return f"{run.title} {name}" if len(runs) > 1 else name


def _line(name: str, run: Standing, key: Key, view: View, axis: str, label: str = "") -> Line:
    """The line, in the stretch that is zoomed into as fine as the rest is altogether."""
    x, y = run.metrics.line(key, POINTS)
    series = run.metrics.series[key]
    begin, unit = (run.metrics.first_sample, 60.0) if axis == MINUTES else (0.0, 1.0)
    if axis in view.zoom and len(series.steps) > POINTS:
        low, high = (begin + unit * end for end in view.zoom[axis])
        fine_x, fine_y = series.part(low, high).thin(POINTS)
        before, behind = x < low, x > high
        x, y = (np.concatenate([w[before], f, w[behind]]) for w, f in ((x, fine_x), (y, fine_y)))
    return Line(name, (x - begin) / unit, y, label=label, not_finite=len(series.not_finite))


def header(run: Standing) -> dict[str, Any]:
    """Title, status line, its colour, and which part is done."""
    good = {"RUNNING": COLOURS[0], "COMPLETED": COLOURS[2], "FINISHED": COLOURS[2]}
    colour = good.get(run.state, COLOURS[1] if run.over else COLOURS[3])
    step, steps, _ = run.progress()
    done = min(1.0, step / steps) if steps else 0.0
    return {"title": run.title, "status": run.status(), "colour": colour, "done": done}


def svg(heads: Sequence[Mapping[str, Any]], warnings: Sequence[str], panels: Sequence[Chart]) -> str:
    """The picture, with the time at which it was drawn."""
    body, y = f'<text x="{WIDTH}" y="18" text-anchor="end">as of {time.strftime("%Y-%m-%d %H:%M:%S")}</text>', 18
    for head in heads:
        body += f'<circle cx="6" cy="{y - 5}" r="5" fill="{head["colour"]}"/>'
        body += f'<text x="18" y="{y}" font-size="15" font-weight="600" fill="{INK}">{escape(head["title"])}</text>'
        for line in textwrap.wrap(head["status"], 150):
            y += 18
            body += f'<text y="{y}" fill="{INK}">{escape(line)}</text>'
        y += 10
        for width, fill in ((WIDTH, GRID), (WIDTH * head["done"], head["colour"])):
            body += f'<rect y="{y}" width="{width:.0f}" height="4" rx="2" fill="{fill}"/>'
        y += 28
    for warning in warnings:
        for i, line in enumerate(textwrap.wrap(warning, 140)):
            mark = f'<path d="M1 {y - 1}h10l-5 -9z" fill="{BAD}"/>' if i == 0 else ""
            body += f'{mark}<text x="18" y="{y}" fill="{BAD}">{escape(line)}</text>'
            y += 18
    top = y - 4
    for i, chart in enumerate(panels):
        place = f"translate({i % 2 * COLUMN} {top + i // 2 * PANEL})"
        body += f'<g transform="{place}">{chart.svg(height=PANEL - 10)}</g>'
    height = top + PANEL * math.ceil(len(panels) / 2)
    return (
        f'<svg style="max-width:100%;height:auto" xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="{MUTED}"><rect width="100%" height="100%" fill="#fff"/>'
        f"{body}</svg>"
    )


def text(heads: Sequence[Mapping[str, Any]], warnings: Sequence[str], panels: Sequence[Chart]) -> str:
    """For a terminal: the status lines, what is wrong, and of each line its course and its newest value."""
    lines = [f"{head['title']}: {head['status']}" if len(heads) > 1 else head["status"] for head in heads]
    lines += [f"! {warning}" for warning in warnings]
    for chart in panels:
        for drawn in {d.line.name: d for d in chart.drawn() if not d.line.limit}.values():
            same = drawn.line.name.lower() == chart.title.lower()
            name = chart.title if same else f"{chart.title}, {drawn.line.name}"
            lines.append(f"{name:30}  {_sparks(drawn):32}  {number(drawn.y[-1])} {chart.y_title}")
    return "\n".join(lines)


def _sparks(drawn: DrawnLine) -> str:
    _, y = thin(drawn.x, drawn.y, 32)
    known = y[np.isfinite(y)]
    low, height = (known.min(), np.ptp(known) or 1.0) if len(known) else (0.0, 1.0)
    return "".join(SPARKS[int(7 * (v - low) / height)] if math.isfinite(v) else "x" for v in y[-32:])


def plain(chart: Chart) -> dict[str, Any]:
    """A chart as JSON: None where a value is not finite."""
    digits = 7 if chart.x_title == STEP else 5
    lines = [
        {"name": d.line.name, "label": d.line.label or d.line.name, "limit": d.line.limit, "colour": d.colour,
         "dash": d.dash, "x": _numbers(d.x, digits), "y": _numbers(d.y)}
        for d in chart.drawn()
    ]  # fmt: skip
    ends = {"low": _numbers([chart.low])[0], "high": _numbers([chart.high])[0]}
    told = {
        "title": chart.title,
        "x_title": chart.x_title,
        "y_title": chart.y_title,
        "bad": chart.count_not_finite(),
        "noisy": chart.noisy,
    }
    return told | ends | {"lines": lines}


def _numbers(values: Any, digits: int = 5) -> list[float | None]:
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values]


def delta(before: Mapping[str, Any], now: Mapping[str, Any], anew: int = -1) -> dict[str, Any]:
    """What the widget needs for `now` when it knows `before`: of each line how many points to keep, and the others.

    The panel with the number `anew` is sent whole.
    """
    panels = []
    for i, panel in enumerate(now["panels"]):
        known = before["panels"][i]["lines"] if i < len(before["panels"]) and i != anew else []
        lines = []
        for j, line in enumerate(panel["lines"]):
            keep = _common(known[j], line) if j < len(known) else 0
            lines.append(line | {"keep": keep, "x": line["x"][keep:], "y": line["y"][keep:]})
        panels.append(panel | {"lines": lines})
    return {**now, "panels": panels}


def _common(before: Mapping[str, Any], now: Mapping[str, Any]) -> int:
    pairs = zip(before["x"], before["y"], now["x"], now["y"], strict=False)
    return next((i for i, (a, b, x, y) in enumerate(pairs) if a != x or b != y), min(len(before["x"]), len(now["x"])))
