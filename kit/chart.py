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
POINTS = 1200  # of all lines of a chart together: two a pixel, about 15 kB
LEFT, RIGHT, BOTTOM, ROW, LETTER = 56, 22, 38, 15, 6.2  # pixels; LETTER is a mean width at 11 px
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """Points of one line. Lines of one name share a colour and an entry in the legend; a limit is grey and dashed."""

    name: str
    x: Sequence[float] | Floats
    y: Sequence[float] | Floats
    limit: bool = False


class Drawn(NamedTuple):
    """A line as it is drawn: the points that are left, its colour, and its stroke in SVG's words."""

    line: Line
    x: Floats
    y: Floats
    colour: str
    stroke: str


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
    """A line chart; `low` and `high` are values that the y axis must include."""

    title: str
    x_title: str
    y_title: str
    lines: list[Line] = field(default_factory=list)
    low: float = math.inf
    high: float = -math.inf

    def svg(self, width: int = 470, height: int = 230) -> str:
        """The drawing, text in the reader's sans-serif. Values that are not finite are red crosses, and counted."""
        lines = self.drawn()
        legend, top = _legend(lines, width)
        body = _text(0, 13, self.title, "start", f'font-weight="600" fill="{INK}"') + legend
        body += self._plot(lines, width, height, top) if lines else _text(width / 2, height / 2, "nothing logged yet")
        if bad := sum(int(np.sum(~np.isfinite(np.array(line.y, float)))) for line in self.lines):
            body += _text(width - RIGHT, 13, f"NaN or infinite: {bad}", "end", f'font-weight="600" fill="{BAD}"')
        return frame(self.title, width, height, body)

    def _repr_svg_(self) -> str:
        return fluid(self.svg(640, 280))

    def drawn(self) -> list[Drawn]:
        """Each line that has points, thinned so that the whole chart keeps about POINTS, with its colour."""
        budget = max(12, POINTS // max(1, len(self.lines)))
        names = list(dict.fromkeys(line.name for line in self.lines if not line.limit))
        out = []
        for line in (line for line in self.lines if len(line.x)):
            colour = LIMIT if line.limit else COLOURS[names.index(line.name) % len(COLOURS)]
            stroke = f'stroke="{colour}"' + (' stroke-dasharray="4 3"' if line.limit else "")
            out.append(Drawn(line, *thin(line.x, line.y, budget), colour, stroke))
        return out

    def _plot(self, lines: list[Drawn], width: int, height: int, top: int) -> str:
        x0, x1 = _span(np.concatenate([line.x for line in lines]), math.inf, -math.inf, 0)
        y0, y1 = _span(np.concatenate([line.y[np.isfinite(line.y)] for line in lines]), self.low, self.high, 0.05)
        right, bottom = width - RIGHT, height - BOTTOM
        out = _text((LEFT + right) / 2, height - 6, self.x_title)
        out += _text(0, 0, self.y_title, "middle", f'transform="translate(10 {(top + bottom) / 2}) rotate(-90)"')
        for value in ticks(y0, y1):
            y = float(np.interp(value, [y0, y1], [bottom, top]))
            out += f'<path d="M{LEFT} {y:.1f}H{right}" stroke="{GRID}"/>' + _text(LEFT - 6, y + 4, number(value), "end")
        for value in ticks(x0, x1):
            x = float(np.interp(value, [x0, x1], [LEFT, right]))
            out += f'<path d="M{x:.1f} {bottom}v4" stroke="{MUTED}"/>' + _text(x, bottom + 16, number(value))
        out += f'<path d="M{LEFT} {bottom}H{right}" stroke="{MUTED}"/>'
        pen = 'stroke-width="1.5"' if len(lines) <= len(COLOURS) else 'stroke-width="1" stroke-opacity="0.5"'
        for line in lines:
            dots = len(line.x) <= 30 and not line.line.limit
            ys = np.where(np.isfinite(line.y), np.interp(line.y, [y0, y1], [bottom, top]), np.nan)
            out += _path(np.interp(line.x, [x0, x1], [LEFT, right]), ys, f"{line.stroke} {pen}", top, dots)
        return out


def _legend(lines: list[Drawn], width: int) -> tuple[str, int]:
    """Name and last value of each line, or the mean of those of one name and how many; and where the plot may start."""
    out, x, y = "", 0.0, 13 + ROW
    for name, line in {line.line.name: line for line in lines}.items():
        last = [one.y[-1] for one in lines if one.line.name == name]
        text = f"{name} {number(sum(last) / len(last))}" + (f" (mean of {len(last)})" if len(last) > 1 else "")
        if x and x + 18 + LETTER * len(text) > width:
            x, y = 0.0, y + ROW
        out += f'<path d="M{x:.0f} {y - 4}h14" {line.stroke} stroke-width="2"/>'
        out += _text(x + 18, y, text, "start")
        x += 30 + LETTER * len(text)
    return out, y + 10


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
    for x, y, before in zip(xs, ys, [math.nan, *ys[:-1]], strict=True):
        if math.isnan(y):
            crosses += f"M{x - 4:.1f} {top}l8 8m0 -8l-8 8"
            continue
        line += f"{'M' if math.isnan(before) else 'L'}{x:.1f} {y:.1f}"
        dots += f"M{x:.1f} {y:.1f}h0" if dotted else ""
    out = f'<path d="{line}" fill="none" {stroke} stroke-linejoin="round"/>'
    out += f'<path d="{dots}" {stroke} style="stroke-width:4.5" stroke-linecap="round"/>' if dots else ""
    return out + (f'<path d="{crosses}" stroke="{BAD}" stroke-width="2"/>' if crosses else "")
