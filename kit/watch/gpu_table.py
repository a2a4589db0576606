"""The newest readings of every GPU as rows, for tables and terminals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kit.show import Table
from kit.watch.alerts import DIFFERENT
from kit.watch.hardware import places
from kit.watch.maps import deviations
from kit.watch.samples import Reading
from kit.watch.status import RunStatus

SPARKS = "▁▂▃▄▅▆▇█"
COURSE = 24  # characters


@dataclass(frozen=True)
class GpuRow:
    """A GPU, or a node of a run without GPUs: newest readings (%, GiB, W, degrees C; None where unknown).

    `node` is the name of its node. `course` is its utilisation over all of the run, from 0 to 100 %. `marked`: whether
    it is far from the median of all.
    """

    label: str
    node: str
    util: float | None
    memory: float | None
    capacity: float | None
    power: float | None
    temperature: float | None
    course: str
    marked: bool


def gpu_rows(run: RunStatus) -> list[GpuRow]:
    """A row for every GPU of every node."""
    maps, far = run.maps_now(), deviations(run.maps)
    heat_map = maps.maps["util"]
    _, means = heat_map.means(COURSE)
    rows = []
    for place in places([run]):
        names = ("util", "mem_gib", "mem_total_gib", "power_w", "temp_c")
        util, memory, capacity, power, temperature = (run.metrics.last(Reading(*place.device, name)) for name in names)
        course = _course(means[heat_map.devices[place.device]]) if place.device in heat_map.devices else ""
        marked = far.get(place.device, 0.0) > DIFFERENT
        rows.append(GpuRow(place.label, place.node, util, memory, capacity, power, temperature, course, marked))
    return rows


def spark(percent: float) -> str:
    """A block as high as the percentage."""
    return SPARKS[round((len(SPARKS) - 1) * min(100.0, max(0.0, percent)) / 100)]


def _course(percents: Sequence[float]) -> str:
    return "".join(" " if np.isnan(value) else spark(value) for value in percents)


def gpu_table(runs: Sequence[RunStatus]) -> Table:
    """The rows of all runs as a table, with those marked that are far from the median of all."""
    found = [(run, row) for run in runs for row in gpu_rows(run)]
    prefix = {run.title: f"{run.title} " if len(runs) > 1 else "" for run in runs}
    rows = [
        (prefix[run.title] + row.label, row.course, row.util, _rounded(row.memory), row.power, row.temperature)
        for run, row in found
    ]
    marks = {index: "warning" for index, (_, row) in enumerate(found) if row.marked}
    return Table(("device", "utilisation", "%", "GiB", "W", "°C"), rows, marks=marks)  # type: ignore[arg-type]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
