"""Heat maps as plain SVG: one number a cell, coloured by how much of a limit it takes, with the edge drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from kit.chart import COLOURS, INK, LIMIT, fluid, frame, number

LEFT, TOP, WIDE, HIGH, FOOT = 70, 42, 78, 30, 40  # pixels


@dataclass(frozen=True)
class Heat:
    """values[i][j] belongs to ys[i] and xs[j]. Cells over the limit are red; the dashed line runs along the edge."""

    title: str
    x_title: str
    y_title: str
    xs: Sequence[float]
    ys: Sequence[float]
    values: Sequence[Sequence[float]]
    limit: float

    def svg(self) -> str:
        """The drawing; the lowest y is at the bottom."""
        width, bottom = LEFT + WIDE * len(self.xs) + 20, TOP + HIGH * len(self.ys)
        body = f'<text x="0" y="14" font-weight="600" fill="{INK}">{escape(self.title)}</text>'
        body += f'<text x="{LEFT - 60}" y="{TOP - 10}">{escape(self.y_title)}</text>'
        body += (
            f'<text x="{(LEFT + width) / 2:.0f}" y="{bottom + 34}" text-anchor="middle">{escape(self.x_title)}</text>'
        )
        for j, x in enumerate(self.xs):
            place = f'x="{LEFT + WIDE * (j + 0.5):.0f}" y="{bottom + 16}"'
            body += f'<text {place} text-anchor="middle">{x:,}</text>'
        for i, y in enumerate(self.ys):
            body += f'<text x="{LEFT - 8}" y="{self._top(i) + 19}" text-anchor="end">{y:,}</text>'
            body += "".join(self._cell(i, j) for j in range(len(self.xs)))
        body += f'<path d="{self._edge()}" fill="none" stroke="{LIMIT}" stroke-width="2" stroke-dasharray="5 3"/>'
        return frame(self.title, width, bottom + FOOT, body)

    def _top(self, i: int) -> int:
        return TOP + HIGH * (len(self.ys) - 1 - i)

    def _cell(self, i: int, j: int) -> str:
        value, x, y = self.values[i][j], LEFT + WIDE * j, self._top(i)
        over = value > self.limit
        shade = 0.18 if over else 0.08 + 0.42 * value / self.limit
        paint = f'fill="{COLOURS[over]}" opacity="{shade:.2f}"'
        box = f'<rect x="{x}" y="{y}" width="{WIDE - 2}" height="{HIGH - 2}" {paint}/>'
        place = f'x="{x + WIDE / 2 - 1:.0f}" y="{y + 19}" text-anchor="middle" fill="{INK}"'
        return box + f"<text {place}>{number(float(f'{value:.3g}'))}</text>"

    def _edge(self) -> str:
        """Between every two neighbours of which one fits and the other does not."""
        fits = [[v <= self.limit for v in row] for row in self.values]
        path = ""
        for i, row in enumerate(fits):
            for j, fit in enumerate(row):
                x, y = LEFT + WIDE * j - 1, self._top(i) - 1
                if j + 1 < len(row) and row[j + 1] != fit:
                    path += f"M{x + WIDE} {y}v{HIGH}"
                if i + 1 < len(fits) and fits[i + 1][j] != fit:
                    path += f"M{x} {y}h{WIDE}"
        return path

    def _repr_svg_(self) -> str:
        return fluid(self.svg())
