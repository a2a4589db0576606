"""Panels of the machines: a heat map of every GPU by time, curves of GPUs, and traffic of nodes."""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kit.figures.charts import Chart, Line
from kit.figures.palette import COLOUR_OF, COLOURS
from kit.figures.points import Floats
from kit.watch.alerts import DIFFERENT
from kit.watch.maps import Device, HeatMap, deviations
from kit.watch.samples import CPU, Reading
from kit.watch.status import RunStatus
from kit.watch.view import MIN_POINTS, MINUTES, View, chart, points

TRAFFIC_SHOWN = 1e-4  # GB/s; below it the traffic is that of an idle node
CROWD_POINTS = 1200  # of all curves of more devices than there are colours: means, from their heat map
PALEST = 16  # opacity of the lowest value, of 255; board.js has the same
LEVELS = 255  # shades of a heat map; 0 is left for cells without samples


class Kind(NamedTuple):
    """A reading of devices: its words, and values that the y axis includes."""

    title: str
    unit: str
    low: float
    high: float


KINDS = {
    "util": Kind("utilisation", "%", 0.0, 100.0),
    "mem_gib": Kind("memory", "GiB", 0.0, -math.inf),
    "power_w": Kind("power", "W", 0.0, -math.inf),
    "temp_c": Kind("temperature", "\N{DEGREE SIGN}C", math.inf, -math.inf),
}
TRAFFIC = {
    "Network": {"received": "net_gb_s_in", "sent": "net_gb_s_out"},
    "Disk": {"read": "disk_gb_s_read", "written": "disk_gb_s_write"},
}


class Place(NamedTuple):
    """A GPU of a run, or a node of a run without GPUs, its name on the board and that of its node."""

    run: RunStatus
    device: Device
    label: str
    node: str


def places(runs: Sequence[RunStatus]) -> list[Place]:
    """Every GPU of the runs, or of each run without GPUs every node, in order of nodes."""
    found = []
    for run in runs:
        prefix = f"{run.title} " if len(runs) > 1 else ""
        for host, device in _devices(run):
            node = prefix + host
            found.append(Place(run, (host, device), node if device == CPU else f"{node} GPU {device}", node))
    return found


def _devices(run: RunStatus) -> list[Device]:
    devices = {(key.host, key.device) for key in list(run.metrics.series) if isinstance(key, Reading)}
    gpus = [one for one in devices if one[1] != CPU]
    return sorted(gpus or devices, key=lambda one: (one[0], str(one[1]).zfill(4)))


def hardware(runs: Sequence[RunStatus], view: View) -> Iterator[Chart]:
    """Utilisation, memory, power and temperature of the selected devices, or of all where none is selected."""
    everything = places(runs)
    shown = [place for place in everything if place.label in view.selected] or everything
    noun = _noun(everything)
    maps = {run.title: run.maps_now() for run in runs}
    for name, kind in KINDS.items():
        having = [place for place in shown if Reading(*place.device, name) in place.run.metrics.series]
        crowded = len(having) > len(COLOURS)
        lines: list[Line] = []
        for run in runs:
            own = [place for place in having if place.run is run]
            if crowded and MINUTES not in view.zoom:
                lines += _mean_curves(own, maps[run.title].maps[name], CROWD_POINTS // len(having))
            else:
                lines += [_curve(place, name, len(having), view) for place in own]
        if name == "mem_gib":
            lines += _capacity(runs)
        if lines or name in ("util", "mem_gib"):
            title, titles = f"{noun} {kind.title}", (MINUTES, kind.unit)
            yield chart(view, title, titles, lines, kind.low, high=kind.high, hardware=True)


def _noun(found: Sequence[Place]) -> str:
    return "CPU" if found and all(place.device[1] == CPU for place in found) else "GPU"


def _mean_curves(having: Sequence[Place], heat_map: HeatMap, size: int) -> Iterator[Line]:
    """Curves of a crowd of devices: means, of which so many fit, as single samples would be a band of zigzags."""
    x, means = heat_map.means(max(MIN_POINTS, size))
    for place in having:
        if place.device in heat_map.devices:
            y = means[heat_map.devices[place.device]]
            known = ~np.isnan(y)
            yield Line(place.node, (x[known] - place.run.began) / 60, y[known], label=place.label)


def _curve(place: Place, name: str, count: int, view: View) -> Line:
    """The samples of one of so many devices."""
    run, key, zoom = place.run, Reading(*place.device, name), view.zoom.get(MINUTES)
    x, y = points(run, key, count, [run.began + 60 * end for end in zoom] if zoom else None)
    line_name = place.node if count > len(COLOURS) else place.label
    not_finite = len(run.metrics.series[key].not_finite)
    return Line(line_name, (x - run.began) / 60, y, label=place.label, not_finite=not_finite)


def _capacity(runs: Sequence[RunStatus]) -> list[Line]:
    """The memory of the smallest GPU, as a limit."""
    found = [
        (series, run)
        for run in runs
        for key, series in list(run.metrics.series.items())
        if isinstance(key, Reading) and key.name == "mem_total_gib"
    ]
    if not found:
        return []
    series, run = min(found, key=lambda pair: pair[0].values[-1])
    ends = np.array([series.steps[0], series.steps[-1]])
    return [Line("capacity", (ends - run.began) / 60, [series.values[-1]] * 2, limit=True)]


def traffic(runs: Sequence[RunStatus], view: View) -> Iterator[Chart]:
    """Network and disk rates of every node, where there is any traffic."""
    for title, ways in TRAFFIC.items():
        names = {name: way for way, name in ways.items()}
        found = [
            (run, key)
            for run in runs
            for key in sorted((key for key in list(run.metrics.series) if isinstance(key, Reading)), key=str)
            if key.name in names
        ]
        a_line_each = 1 < len({(run.title, key.host) for run, key in found}) <= len(COLOURS) // len(ways)
        lines = []
        for run, key in found:
            prefix, zoom = f"{run.title} " if len(runs) > 1 else "", view.zoom.get(MINUTES)
            x, y = points(run, key, len(found), [run.began + 60 * end for end in zoom] if zoom else None)
            label = f"{key.host} {names[key.name]}"
            name = prefix + (label if a_line_each else names[key.name])
            lines.append(Line(name, (x - run.began) / 60, y, label=prefix + label))
        if any(np.any(np.asarray(line.y) > TRAFFIC_SHOWN) for line in lines):
            yield chart(view, title, (MINUTES, "GB/s"), lines, 0.0, hardware=True)


@dataclass(frozen=True)
class MapPicture:
    """A heat map as it is drawn: a row for each device, a column for each part of time.

    `start` and `width` of the columns are in minutes since the start. `levels` has a byte for each cell, column by
    column: 0 without samples, 1 for `low` to 255 for `high`. `slowest_first` orders the rows by how far a device was
    lately from the median of all; `marked` are the rows that are far from it.
    """

    run: str
    name: str
    title: str
    unit: str
    low: float
    high: float
    labels: list[str]
    start: float
    width: float
    levels: bytes
    slowest_first: list[int]
    marked: list[int]

    def values(self, columns: int) -> tuple[Floats, float]:
        """Values (devices, at most about so many columns), NaN without samples; and the minutes of a column."""
        levels = np.frombuffer(self.levels, np.uint8).reshape(-1, len(self.labels)).T.astype(float)
        known = np.where(levels > 0, self.low + (levels - 1) / (LEVELS - 1) * (self.high - self.low), 0.0)
        join = math.ceil(levels.shape[1] / columns)
        edges = np.arange(0, levels.shape[1], join)
        sums, counts = (np.add.reduceat(part, edges, 1) for part in (known, (levels > 0).astype(float)))
        return np.asarray(sums / np.where(counts > 0, counts, np.nan)), self.width * join

    def png(self) -> bytes:
        """The cells as a PNG of one pixel each; without samples it is clear."""
        from PIL import Image

        levels = np.frombuffer(self.levels, np.uint8).reshape(-1, len(self.labels)).T
        colour = COLOUR_OF[KINDS[self.name].title]
        pixels = np.zeros((*levels.shape, 4), np.uint8)
        pixels[..., :3] = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        shade = PALEST + (levels.astype(float) - 1) / (LEVELS - 1) * (LEVELS - PALEST)
        pixels[..., 3] = np.where(levels > 0, shade, 0)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "PNG")
        return out.getvalue()


def heat_maps(runs: Sequence[RunStatus], view: View) -> list[MapPicture]:
    """The map of each run that has samples, of the reading and the part of time that the view chooses."""
    everything = places(runs)
    found = []
    for run in runs:
        own = [place for place in everything if place.run is run]
        picture = _heat_map(run, own, view) if own else None
        found += [picture] if picture else []
    return found


def _heat_map(run: RunStatus, own: Sequence[Place], view: View) -> MapPicture | None:
    zoom = view.zoom.get(MINUTES)
    maps = run.maps_between(*[run.began + 60 * end for end in zoom]) if zoom else run.maps_now()
    name = view.map if maps.maps[view.map].devices else "util"
    heat_map, kind = maps.maps[name], KINDS[name]
    shown = [place for place in own if place.device in heat_map.devices]
    if not shown:
        return None
    middles, means = heat_map.means()
    means = means[[heat_map.devices[place.device] for place in shown]]
    low, high = _scale(run, name, means)
    far = deviations(run.maps)
    shares = [far.get(place.device, 0.0) for place in shown]
    order = sorted(range(len(shown)), key=lambda row: -shares[row])
    marked = [row for row in order if shares[row] > DIFFERENT]
    labels = [place.label for place in shown]
    noun = "node" if _noun(own) == "CPU" else "GPU"
    width = heat_map.width / 60
    start = (float(middles[0]) - run.began) / 60 - width / 2
    levels = _levels(means, low, high)
    title = f"{kind.title.capitalize()} of every {noun}"
    return MapPicture(run.title, name, title, kind.unit, low, high, labels, start, width, levels, order, marked)


def _scale(run: RunStatus, name: str, means: Floats) -> tuple[float, float]:
    """The values of the palest and the strongest colour: for memory up to the largest GPU's."""
    kind, known = KINDS[name], means[np.isfinite(means)]
    totals = [
        series.values[-1]
        for key, series in list(run.metrics.series.items())
        if name == "mem_gib" and isinstance(key, Reading) and key.name == "mem_total_gib"
    ]
    low = float(min(kind.low, known.min(initial=math.inf)))
    high = float(max([kind.high, known.max(initial=-math.inf), *totals]))
    return low, max(high, low + 1.0)


def _levels(means: Floats, low: float, high: float) -> bytes:
    shade = 1 + np.rint((LEVELS - 1) * np.clip((means - low) / (high - low), 0, 1))
    return np.where(np.isnan(means), 0, shade).astype(np.uint8).T.tobytes()
