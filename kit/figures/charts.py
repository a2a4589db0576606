"""Line charts: the model of one, and its drawing as static SVG, which needs no JavaScript.

kit/watch/board.js draws the same charts in JupyterLab; sizes, colours and number formats are the same in both.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import NamedTuple

import numpy as np

from kit.figures.palette import BAD, COLOUR_OF, COLOURS
from kit.figures.points import Floats, smoothed
from kit.figures.svg import GRID, INK, ticks

DOTTED = 24  # lines with so few points also get dots
LEFT, RIGHT, BOTTOM = 62, 22, 38  # margins around the plot, in pixels
TITLE_Y, LEGEND_ROW = 13, 15  # pixels
LETTER = 6.2  # mean width of a letter at 11 px, in pixels
DASHES = ("", "7 2", "2 2")  # for the first, second and third line of a colour
LIMIT_DASH = "4 3"
STEP = "optimizer step"  # title of an x axis
FEWEST = 5  # steps that such an axis shows at least, as there is nothing between two of them


@dataclass(frozen=True)
class Line:
    """One line of a chart. Lines of one name share a colour and an entry in the legend; a limit is grey and dashed."""

    name: str
    x: Sequence[float] | Floats
    y: Sequence[float] | Floats
    limit: bool = False
    label: str = ""  # the name in the tooltip, where it differs from `name`
    not_finite: int = 0  # values that are NaN or infinite, of which `y` holds some
    colour: str = ""  # where it is not the one of its name


class DrawnLine(NamedTuple):
    """A line as it is drawn: its points, its colour and its SVG stroke-dasharray."""

    line: Line
    x: Floats
    y: Floats
    colour: str
    dash: str

    @property
    def stroke(self) -> str:
        """Colour and dashes as SVG attributes."""
        return f'stroke="{self.colour}"' + (f' stroke-dasharray="{self.dash}"' if self.dash else "")


@dataclass(frozen=True)
class Chart:
    """A line chart. `low` and `high` are values that the y axis must include.

    On a logarithmic y axis, values that are not above 0 are left out.
    """

    title: str
    x_title: str
    y_title: str
    lines: list[Line] = field(default_factory=list)
    low: float = math.inf
    high: float = -math.inf
    log: bool = False
    smoothing: float = 0.0  # weight of the past in the moving average, 0 to 0.99
    noisy: bool = True  # False: smoothing is not applied, as the values have no noise
    hardware: bool = False  # whether it shows machines

    @property
    def not_finite(self) -> int:
        """How many values of all lines are NaN or infinite."""
        return sum(line.not_finite for line in self.lines)

    def drawn(self) -> list[DrawnLine]:
        """Each line that has points, with its colour. Whoever makes a chart chooses its points."""
        names = list(dict.fromkeys(line.name for line in self.lines if not line.limit))
        drawn = []
        for line in self.lines:
            x, y = np.asarray(line.x, float), np.asarray(line.y, float)
            if self.log:
                keep = ~(y <= 0)  # keeps NaN, which is drawn as a cross
                x, y = x[keep], y[keep]
            if not len(x):
                continue
            if line.limit:
                drawn.append(DrawnLine(line, x, y, INK, LIMIT_DASH))
                continue
            repeat, colour = divmod(names.index(line.name), len(COLOURS))
            fixed = line.colour or COLOUR_OF.get(line.name)
            drawn.append(DrawnLine(line, x, y, fixed or COLOURS[colour], "" if fixed else DASHES[repeat % len(DASHES)]))
        return drawn

    def svg(self, width: int = 470, height: int = 230) -> str:
        """The drawing. Values that are not finite are red crosses, and their number is given."""
        lines = self.drawn()
        legend, top = _legend(lines, width)
        body = _text(0, TITLE_Y, self.title, "start", f'font-weight="600" fill="{INK}"') + legend
        if lines:
            body += _Plot(self, lines, width, height, top).svg()
        else:
            body += _text(width / 2, height / 2, "nothing logged yet")
        if count := self.not_finite:
            style = f'font-weight="600" fill="{BAD}"'
            body += _text(width - RIGHT, TITLE_Y, f"NaN or infinite: {count:,}", "end", style)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-label="{escape(self.title)}" font-family="sans-serif" font-size="11" fill="{INK}">'
            f"{body}</svg>"
        )


class _Plot:
    """The part of a chart below its legend: axes and lines."""

    def __init__(self, chart: Chart, lines: list[DrawnLine], width: int, height: int, top: int) -> None:
        self.chart, self.lines = chart, lines
        self.top, self.right, self.bottom, self.height = top, width - RIGHT, height - BOTTOM, height
        self.crowded = len(lines) > len(COLOURS)

    @cached_property
    def x_range(self) -> tuple[float, float]:
        """The first and the last x."""
        values = np.concatenate([line.x for line in self.lines])
        if self.chart.x_title == STEP:
            return float(values.min()), max(float(values.max()), float(values.min()) + FEWEST)
        return _range(values, math.inf, -math.inf, 0.0)

    @cached_property
    def y_range(self) -> tuple[float, float]:
        """The range of the y axis; on a logarithmic one, of the powers of ten."""
        values = np.concatenate([line.y[np.isfinite(line.y)] for line in self.lines])
        if self.chart.log:
            return _range(np.log10(values), math.inf, -math.inf, 0.05)
        return _range(values, self.chart.low, self.chart.high, 0.05)

    def x_pixels(self, x: Floats) -> Floats:
        """Where the values are on the x axis."""
        return np.interp(x, self.x_range, [LEFT, self.right])

    def y_pixels(self, y: Floats) -> Floats:
        """Where the values are on the y axis; NaN for what is not finite."""
        known = np.where(np.isfinite(y), y, np.nan)
        return np.interp(np.log10(known) if self.chart.log else known, self.y_range, [self.bottom, self.top])

    def svg(self) -> str:
        """The drawing."""
        middle = (self.top + self.bottom) / 2
        out = _text((LEFT + self.right) / 2, self.height - 6, self.chart.x_title)
        out += _text(0, 0, self.chart.y_title, "middle", f'transform="translate(10 {middle}) rotate(-90)"')
        for value, y in self._y_ticks():
            out += f'<path d="M{LEFT} {y:.1f}H{self.right}" stroke="{GRID}"/>'
            out += _text(LEFT - 6, y + 4, number(value), "end")
        x_ticks = ticks(*self.x_range)
        for value, x in zip(x_ticks, self.x_pixels(np.array(x_ticks)), strict=True):
            out += f'<path d="M{x:.1f} {self.bottom}v4" stroke="{INK}"/>' + _text(x, self.bottom + 16, number(value))
        out += f'<path d="M{LEFT} {self.bottom}H{self.right}" stroke="{INK}"/>'
        return out + "".join(self._line(line) for line in self.lines)

    def _y_ticks(self) -> Iterator[tuple[float, float]]:
        """(value, pixel) of each number on the y axis; on a logarithmic one powers of ten where there are two."""
        low, high = self.y_range
        values = ticks(low, high)
        if self.chart.log:
            powers = range(math.ceil(low), math.floor(high) + 1)
            values = [10.0**power for power in powers[:: len(powers) // 6 + 1]]
            if len(values) < 2:
                values = [value for value in ticks(10**low, 10**high) if value > 0]
        levels = np.log10(values) if self.chart.log else values
        return zip(values, np.interp(levels, self.y_range, [self.bottom, self.top]), strict=True)

    def _line(self, line: DrawnLine) -> str:
        xs, ys, faint = self.x_pixels(line.x), line.y, ""
        if self.chart.smoothing and self.chart.noisy and not line.line.limit:
            pen = f'{line.stroke} stroke-width="1" stroke-opacity="0.25"'
            faint = _path(xs, self.y_pixels(line.y), pen, self.top, dotted=False)
            ys = smoothed(line.y, self.chart.smoothing)
        pen = f"{line.stroke} " + ('stroke-width="1" stroke-opacity="0.5"' if self.crowded else 'stroke-width="1.5"')
        dotted = len(line.x) <= DOTTED and not line.line.limit and not self.crowded
        return faint + _path(xs, self.y_pixels(ys), pen, self.top, dotted)


def number(value: float) -> str:
    """A value in a few digits: 0.00005 is 5e-5, 12345.6 is 12,346."""
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _legend(lines: list[DrawnLine], width: int) -> tuple[str, int]:
    """(SVG of names with their last values, or the mean of the lines of that name; y where the plot may start)."""
    out, x, y = "", 0.0, TITLE_Y + LEGEND_ROW
    names = {drawn.line.name: drawn for drawn in lines}
    for name, drawn in names.items():
        last = [one.y[-1] for one in lines if one.line.name == name]
        text = f"{name} {number(sum(last) / len(last))}"
        if len(last) > 1 and len(names) <= len(COLOURS):
            text += f" (mean of {len(last)})"
        if x and x + 18 + LETTER * len(text) > width:
            x, y = 0.0, y + LEGEND_ROW
        out += f'<path d="M{x:.0f} {y - 4}h14" {drawn.stroke} stroke-width="2"/>' + _text(x + 18, y, text, "start")
        x += 30 + LETTER * len(text)
    return out, y + 10


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'


def _range(values: Floats, low: float, high: float, margin: float) -> tuple[float, float]:
    """The range of the values, `low` and `high`, never empty; with a margin, except at an end that is low or high."""
    known = [*values, *(end for end in (low, high) if math.isfinite(end))] or [0.0]
    first, last = float(min(known)), float(max(known))
    room = margin * (last - first) if last > first else abs(first) * 0.1 or 0.5
    return first if first == low else first - room, last if last == high else last + room


def _path(xs: Floats, ys: Floats, stroke: str, top: float, dotted: bool) -> str:
    """A line with a gap and a red cross at each NaN; `dotted` adds a dot at each point.

    Coordinates are tenths of a pixel, relative to the point before: half as long as absolute ones.
    """
    line = dots = crosses = ""
    pen_x = pen_y = math.nan
    for x, y in zip(np.rint(10 * xs), np.rint(10 * ys), strict=True):
        if math.isnan(y):
            crosses += f"M{x / 10 - 4:.1f} {top}l8 8m0 -8l-8 8"
        else:
            lifted = math.isnan(pen_y)
            line += f"M{x / 10:g} {y / 10:g}" if lifted else f"l{(x - pen_x) / 10:g} {(y - pen_y) / 10:g}"
            dots += f"M{x / 10:g} {y / 10:g}h0" if dotted else ""
        pen_x, pen_y = x, y
    out = f'<path d="{line.replace(" -", "-")}" fill="none" {stroke} stroke-linejoin="round"/>'
    if dots:
        out += f'<path d="{dots}" {stroke} style="stroke-width:4.5" stroke-linecap="round"/>'
    if crosses:
        out += f'<path d="{crosses}" stroke="{BAD}" stroke-width="2"/>'
    return out
