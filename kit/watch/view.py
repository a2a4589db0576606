"""How a person looks at the board, and how many points of a metric a panel gets in that view."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kit.figures.charts import STEP, Chart, Line
from kit.figures.points import Floats
from kit.watch.metrics import Key
from kit.watch.status import RunStatus

POINTS = 600  # of all lines of a chart together: three in two pixels, about 5 kB
ZOOM_POINTS = 12_000  # the same for the part that is zoomed into: all samples of 40 GPUs in five minutes
MIN_POINTS = 20  # of each line, however many lines there are
MINUTES = "minutes since the start"
STEADY = ("Learning rate", "CPU memory", "GPU memory", "GPU temperature")  # panels that are never smoothed


class XAxis(StrEnum):
    """What the x axis of logged panels counts."""

    STEP = "step"
    TIME = "time"
    TOKENS = "tokens"


AXIS_TITLES = {XAxis.STEP: STEP, XAxis.TIME: MINUTES, XAxis.TOKENS: "tokens so far"}
AXIS_KEYS = {XAxis.TIME: "_timestamp", XAxis.TOKENS: "train/num_tokens"}  # the logged names that steps become


@dataclass
class View:
    """How a person looks at the board.

    smooth: weight of the past in the moving average. log: titles of panels on a log scale. zoom: ends of x axes by
    their title. axis: of logged panels. map: the reading of the heat map. slowest_first: order of its rows. selected:
    labels of the devices that hardware panels show; all where it is empty.
    """

    smooth: float = 0.0
    log: list[str] = field(default_factory=list)
    zoom: dict[str, list[float]] = field(default_factory=dict)
    axis: str = XAxis.STEP
    map: str = "util"
    slowest_first: bool = False
    selected: list[str] = field(default_factory=list)


def chart(
    view: View, title: str, titles: tuple[str, str], lines: list[Line], low: float = math.inf, **options: Any
) -> Chart:
    """A panel in a view. `titles` are those of the x and the y axis; `low` is a value that the y axis includes."""
    log, noisy = title in view.log, title not in STEADY
    return Chart(title, *titles, lines, low, log=log, smoothing=view.smooth, noisy=noisy, **options)


def points(run: RunStatus, key: Key, lines: int, zoom: Sequence[float] | None = None) -> tuple[Floats, Floats]:
    """Steps and values of a metric for one of so many lines; between the ends of a zoom, as many as these allow."""
    if zoom is None:
        return run.metrics.line(key, max(MIN_POINTS, POINTS // max(1, lines)))
    low, high = zoom
    x, y = run.metrics.series[key].part(low, high).thin(max(MIN_POINTS, ZOOM_POINTS // max(1, lines)))
    inside = (x >= low) & (x <= high)
    return x[inside], y[inside]
