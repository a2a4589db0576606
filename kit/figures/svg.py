"""SVG drawing primitives for still figures: a canvas with text, lines, rectangles and axes. Units are pixels."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

INK, GRID, LIMIT = "#7b838d", "#7b838d40", "#7b838d"  # middle greys, readable on white and on black
WIDTH = 720
LETTER = 6.4  # mean width of a letter at 12 px
ROW, BAR, LABELS = 26, 18, 190  # height of a row of bars, of a bar, and the width of the labels left of it


@dataclass(frozen=True)
class Axis:
    """A linear axis: values from `low` to `high` on pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from low to high, both included where they are round."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


class Canvas:
    """An SVG document that is drawn from top to bottom, with the title in its first line."""

    def __init__(self, title: str, height: float = 0.0) -> None:
        self.title, self.height = title, height
        self._body: list[str] = []
        self.text(0, 14, title, bold=True)

    def document(self) -> str:
        """The SVG; it shrinks with a narrow page."""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" width="{WIDTH}" '
            f'height="{self.height:.0f}" style="max-width:100%;height:auto" role="img" '
            f'aria-label="{escape(self.title)}" font-family="sans-serif" font-size="12" fill="{INK}">'
            + "".join(self._body)
            + "</svg>"
        )

    def text(self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> None:
        """Text at a baseline; `anchor` is start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self._body.append(f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def line(self, x0: float, y0: float, x1: float, y1: float, colour: str, dashed: bool = False) -> None:
        """A straight line."""
        dash = ' stroke-dasharray="5 3" stroke-width="1.5"' if dashed else ""
        self._body.append(f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}" stroke="{colour}"{dash}/>')

    def rectangle(self, x: float, y: float, width: float, height: float, colour: str, opacity: float = 1.0) -> None:
        """A filled rectangle; nothing where it has no width."""
        if width > 0:
            size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
            self._body.append(f'<rect {size} fill="{colour}" fill-opacity="{opacity:.2f}"/>')

    def frame(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        """The outline of a rectangle."""
        size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
        self._body.append(f'<rect {size} fill="none" stroke="{colour}" stroke-width="3"/>')

    def band(self, x0: float, top0: float, x1: float, top1: float, height: float, colour: str) -> None:
        """A curved band of constant height, as between two nodes of a Sankey diagram."""
        middle = (x0 + x1) / 2
        upper = f"M{x0:.1f} {top0:.1f}C{middle:.1f} {top0:.1f} {middle:.1f} {top1:.1f} {x1:.1f} {top1:.1f}"
        low0, low1 = top0 + height, top1 + height
        back = f"v{height:.1f}C{middle:.1f} {low1:.1f} {middle:.1f} {low0:.1f} {x0:.1f} {low0:.1f}z"
        self._body.append(f'<path d="{upper}{back}" fill="{colour}" fill-opacity="0.2"/>')

    def legend(self, colours: Mapping[str, str], limit: str = "") -> float:
        """Coloured names below the title, and a dashed sign for the limit; returns where the plot may begin."""
        x, y = 0.0, 34.0
        for name, colour in [*colours.items(), *([(limit, "")] if limit else [])]:
            if x and x + 26 + LETTER * len(name) > WIDTH:
                x, y = 0.0, y + 16
            if colour:
                self.rectangle(x, y - 9, 10, 10, colour)
            else:
                self.line(x, y - 4, x + 12, y - 4, LIMIT, dashed=True)
            self.text(x + 16, y, name)
            x += 32 + LETTER * len(name)
        return y + 18 if colours or limit else 30

    def rows(self, labels: Sequence[str], highest: float, top: float, unit: str) -> Axis:
        """The labels and the axis of horizontal bars from zero to `highest`; sets the height of the canvas."""
        bottom = top + ROW * len(labels)
        axis = Axis(0.0, highest or 1.0, LABELS, WIDTH - 70)
        for value in ticks(0, axis.high):
            self.line(axis.at(value), top - 4, axis.at(value), bottom, GRID)
            self.text(axis.at(value), bottom + 14, f"{value:,.10g}", "middle")
        for index, label in enumerate(labels):
            shown = label if LETTER * len(label) < LABELS - 8 else label[: int((LABELS - 14) / LETTER)] + "…"
            self.text(LABELS - 8, top + ROW * index + 13, shown, "end")
        self.text((axis.start + axis.stop) / 2, bottom + 32, unit, "middle")
        self.height = bottom + 38
        return axis
