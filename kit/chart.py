"""Line charts as plain SVG: readable in a notebook, in HTML, on a code host and in a mail, without JavaScript."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#64748b")
LIMIT, BAD, INK, MUTED, GRID = "#334155", "#dc2626", "#0f172a", "#64748b", "#e2e8f0"
POINTS = 600  # of all lines of a chart together: three in two pixels, about 5 kB; and of each at least FEW
FEW = 24
LEFT, RIGHT, BOTTOM, ROW, LETTER = 62, 22, 38, 15, 6.2  # pixels; LETTER is a mean width at 11 px
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """Points of one line. Lines of one name share a colour and an entry in the legend; a limit is grey and dashed."""

    name: str
    x: Sequence[float] | Floats
    y: Sequence[float] | Floats
    limit: bool = False
    label: str = ""  # what it is called where it is pointed at, if not by its name
    bad: int = 0  # values that are not finite, where these points are not all of them


class Drawn(NamedTuple):
    """A line as it is drawn: the points that are left, its colour, and its stroke in SVG's words."""

    line: Line
    x: Floats
    y: Floats
    colour: str
    dash: str


def thin(x: Any, y: Any, points: int) -> tuple[Floats, Floats]:
    """About `points` of the points, every extreme among them, and some of those that are not finite."""
    x, y = np.array(x, float), np.array(y, float)
    if len(x) <= points:
        return x, y
    size = math.ceil(2 * len(y) / points)  # values a bucket, of which the lowest and the highest stay
    finite = np.isfinite(y)
    starts = np.arange(0, len(y), size)
    padded = np.full((2, len(starts) * size), np.inf)
    padded[:, : len(y)] = np.where(finite, y, np.inf), np.where(finite, -y, np.inf)
    extremes = padded.reshape(2, -1, size).argmin(axis=2) + starts
    bad = np.flatnonzero(~finite)
    keep = np.unique(np.concatenate([extremes.ravel(), bad[:: len(bad) // 20 + 1], [0, len(y) - 1]]))
    return x[keep], y[keep]


def smoothed(y: Floats, weight: float) -> Floats:
    """The exponential moving average, in which the start does not weigh more; what is not finite stays as it is."""
    out, mean, sum_of_weights = y.copy(), 0.0, 0.0
    for i in np.flatnonzero(np.isfinite(y)):
        mean = weight * mean + (1 - weight) * y[i]
        sum_of_weights = weight * sum_of_weights + 1 - weight
        out[i] = mean / sum_of_weights
    return out


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from low to high."""
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= rough * 0.999)
    return [round(n * step, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def frame(title: str, width: int, height: int, body: str) -> str:
    """A white drawing of this size, in pixels, with text in the reader's sans-serif."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif" font-size="11" fill="{MUTED}">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>{body}</svg>'
    )


def fluid(svg: str) -> str:
    """The drawing, shrinking with a narrow page; for the outermost one."""
    return svg.replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)


def number(value: float) -> str:
    """A value as a person reads it: 0.00005 is 5e-5, 12345.6 is 12,346."""
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e6:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


@dataclass(frozen=True)
class Chart:
    """A line chart; `low` and `high` are values that the y axis must include, `smooth` is the weight of the past.

    On a logarithmic y axis only values above 0 have a place.
    """

    title: str
    x_title: str
    y_title: str
    lines: list[Line] = field(default_factory=list)
    low: float = math.inf
    high: float = -math.inf
    log: bool = False
    smooth: float = 0.0
    noisy: bool = True  # whether smoothing does it good

    @property
    def bad(self) -> int:
        """How many values are not finite."""
        return sum(line.bad or int(np.sum(~np.isfinite(np.asarray(line.y, float)))) for line in self.lines)

    def svg(self, width: int = 470, height: int = 230) -> str:
        """The drawing, text in the reader's sans-serif. Values that are not finite are red crosses, and counted."""
        lines = self.drawn()
        legend, top = _legend(lines, width)
        body = _text(0, 13, self.title, "start", f'font-weight="600" fill="{INK}"') + legend
        body += self._plot(lines, width, height, top) if lines else _text(width / 2, height / 2, "nothing logged yet")
        if self.bad:
            body += _text(width - RIGHT, 13, f"NaN or infinite: {self.bad:,}", "end", f'font-weight="600" fill="{BAD}"')
        return frame(self.title, width, height, body)

    def _repr_svg_(self) -> str:
        return fluid(self.svg(640, 280))

    def drawn(self) -> list[Drawn]:
        """Each line that has points, thinned so that the whole chart keeps about POINTS, with its colour."""
        budget = max(FEW, POINTS // max(1, len(self.lines)))
        names = list(dict.fromkeys(line.name for line in self.lines if not line.limit))
        out = []
        for line in self.lines:
            x, y = thin(line.x, line.y, budget)
            if self.log:
                x, y = x[~(y <= 0)], y[~(y <= 0)]
            around, place = (0, 0) if line.limit else divmod(names.index(line.name), len(COLOURS))
            dash = "4 3" if line.limit else ("", "7 2", "2 2")[around % 3]
            out += [Drawn(line, x, y, LIMIT if line.limit else COLOURS[place], dash)] if len(x) else []
        return out

    def _plot(self, lines: list[Drawn], width: int, height: int, top: int) -> str:
        x0, x1 = _span(np.concatenate([line.x for line in lines]), math.inf, -math.inf, 0)
        y0, y1 = self._heights(lines)
        right, bottom = width - RIGHT, height - BOTTOM
        out = _text((LEFT + right) / 2, height - 6, self.x_title)
        out += _text(0, 0, self.y_title, "middle", f'transform="translate(10 {(top + bottom) / 2}) rotate(-90)"')
        for value, text in self._marks(y0, y1):
            y = float(np.interp(value, [y0, y1], [bottom, top]))
            out += f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>' + _text(LEFT - 6, y + 4, text, "end")
        for value in ticks(x0, x1):
            x = float(np.interp(value, [x0, x1], [LEFT, right]))
            out += f'<path d="M{x:.1f} {bottom}v4" stroke="{MUTED}"/>' + _text(x, bottom + 16, number(value))
        out += f'<path d="M{LEFT} {bottom}H{right}" stroke="{MUTED}"/>'
        crowded = len(lines) > len(COLOURS)
        for line in lines:
            xs = np.interp(line.x, [x0, x1], [LEFT, right])
            pen = 'stroke-width="1" stroke-opacity="0.5"' if crowded else 'stroke-width="1.5"'
            shown = line.y
            if self.smooth and self.noisy and not line.line.limit:
                faint = 'stroke-width="1" stroke-opacity="0.25"'
                out += _path(xs, self._place(line.y, y0, y1, bottom, top), f"{_stroke(line)} {faint}", top, False)
                shown = smoothed(line.y, self.smooth)
            dots = len(line.x) <= FEW and not line.line.limit and not crowded
            out += _path(xs, self._place(shown, y0, y1, bottom, top), f"{_stroke(line)} {pen}", top, dots)
        return out

    def _heights(self, lines: list[Drawn]) -> tuple[float, float]:
        """The range of the y axis; of the logarithms on a logarithmic one."""
        values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
        low, high = (math.inf, -math.inf) if self.log else (self.low, self.high)
        return _span(np.log10(values) if self.log else values, low, high, 0.05)

    def _place(self, y: Floats, y0: float, y1: float, bottom: float, top: float) -> Floats:
        known = np.where(np.isfinite(y), y, np.nan)
        return np.interp(np.log10(known) if self.log else known, [y0, y1], [bottom, top])

    def _marks(self, low: float, high: float) -> list[tuple[float, str]]:
        """Where the y axis has its numbers, and these: round ones, or powers of ten if they are two at least."""
        if not self.log:
            return [(value, number(value)) for value in ticks(low, high)]
        powers = range(math.ceil(low), math.floor(high) + 1)
        few = [10.0**n for n in powers[:: len(powers) // 6 + 1]]
        values = few if len(few) > 1 else [value for value in ticks(10**low, 10**high) if value > 0]
        return [(math.log10(value), number(value)) for value in values]


def _legend(lines: list[Drawn], width: int) -> tuple[str, int]:
    """Name and last value of each line, or the mean of those of one name and how many; and where the plot may start."""
    out, x, y = "", 0.0, 13 + ROW
    names = {line.line.name: line for line in lines}
    few = len(names) <= len(COLOURS)
    for name, line in names.items():
        last = [one.y[-1] for one in lines if one.line.name == name]
        mean = f" (mean of {len(last)})" if len(last) > 1 and few else ""
        text = f"{name} {number(sum(last) / len(last))}{mean}"
        if x and x + 18 + LETTER * len(text) > width:
            x, y = 0.0, y + ROW
        out += f'<path d="M{x:.0f} {y - 4}h14" {_stroke(line)} stroke-width="2"/>'
        out += _text(x + 18, y, text, "start")
        x += 30 + LETTER * len(text)
    return out, y + 10


def _stroke(line: Drawn) -> str:
    return f'stroke="{line.colour}"' + (f' stroke-dasharray="{line.dash}"' if line.dash else "")


def _text(x: float, y: float, text: str, anchor: str = "middle", style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" {style}>{escape(text)}</text>'


def _span(values: Floats, low: float, high: float, margin: float) -> tuple[float, float]:
    """The range of the values and of `low` and `high`, never empty; a margin where neither of the two is an end."""
    known = [*values, *(end for end in (low, high) if math.isfinite(end))] or [0.0]
    first, last = float(min(known)), float(max(known))
    room = margin * (last - first) if last > first else abs(first) * 0.1 or 0.5
    return first - room * (first != low), last + room * (last != high)


def _path(xs: Floats, ys: Floats, stroke: str, top: float, dotted: bool) -> str:
    """A line with gaps and red crosses where it is not finite; few points get dots, so that a single one is seen."""
    line = dots = crosses = ""
    at = (math.nan, math.nan)  # the pen, in tenths of a pixel: steps from there are half as long to write
    for x, y in zip(np.rint(10 * xs), np.rint(10 * ys), strict=True):
        if math.isnan(y):
            crosses += f"M{x / 10 - 4:.1f} {top}l8 8m0 -8l-8 8"
        else:
            up = math.isnan(at[1])
            line += f"M{x / 10:g} {y / 10:g}" if up else f"l{(x - at[0]) / 10:g} {(y - at[1]) / 10:g}"
            dots += f"M{x / 10:g} {y / 10:g}h0" if dotted else ""
        at = (x, y)
    out = f'<path d="{line.replace(" -", "-")}" fill="none" {stroke} stroke-linejoin="round"/>'
    out += f'<path d="{dots}" {stroke} style="stroke-width:4.5" stroke-linecap="round"/>' if dots else ""
    return out + (f'<path d="{crosses}" stroke="{BAD}" stroke-width="2"/>' if crosses else "")
