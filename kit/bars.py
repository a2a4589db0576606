"""Horizontal stacked bars as plain SVG, for memory by phase, time by part and counts by size."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from kit.chart import COLOURS, GRID, INK, LIMIT, fluid, frame, number, ticks

LABEL, RIGHT, HEAD, BAR, GAP, FOOT, LETTER = 150, 24, 24, 18, 8, 38, 6.2  # pixels
DASHES = f'stroke="{LIMIT}" stroke-dasharray="5 3" stroke-width="1.5"'


@dataclass(frozen=True)
class Bars:
    """One bar a row, made of named parts; `limit` (its name and value) is a dashed line such as a GPU's capacity."""

    title: str
    x_title: str
    rows: Mapping[str, Mapping[str, float]]
    limit: tuple[str, float] | None = None

    def svg(self, width: int = 720) -> str:
        """The drawing; a part keeps its colour over all rows, and each row ends with its sum."""
        parts = list(dict.fromkeys(name for row in self.rows.values() for name, value in row.items() if value))
        longest = max([sum(row.values()) for row in self.rows.values()] + ([self.limit[1]] if self.limit else []))
        scale = (width - LABEL - RIGHT - 40) / (longest or 1)
        legend, top = self._legend(parts, width)
        bottom = top + len(self.rows) * (BAR + GAP)
        body = _text(0, 14, self.title, f'font-weight="600" fill="{INK}"') + legend
        for value in ticks(0, longest or 1):
            x = LABEL + value * scale
            body += f'<path d="M{x:.1f} {top - 4}V{bottom}" stroke="{GRID}"/>'
            body += _text(x, bottom + 14, number(value), 'text-anchor="middle"')
        for i, (label, row) in enumerate(self.rows.items()):
            body += self._bar(label, row, parts, top + i * (BAR + GAP), scale)
        if self.limit:
            x = LABEL + self.limit[1] * scale
            body += (
                f'<path d="M{x:.1f} {top - 4}V{bottom}" stroke="{LIMIT}" stroke-dasharray="5 3" stroke-width="1.5"/>'
            )
        body += _text((LABEL + width - RIGHT) / 2, bottom + 32, self.x_title, 'text-anchor="middle"')
        height = bottom + FOOT
        return frame(self.title, width, height, body)

    def _bar(self, label: str, row: Mapping[str, float], parts: list[str], y: float, scale: float) -> str:
        out, x = _text(LABEL - 8, y + 13, label, f'text-anchor="end" fill="{INK}"'), float(LABEL)
        for name in (n for n in parts if row.get(n)):
            wide = row[name] * scale
            tip = f"<title>{escape(name)}: {number(row[name])}</title>"
            place = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}"'
            out += f"<rect {place} {_paint(parts.index(name))}>{tip}</rect>"
            x += wide
        return out + _text(x + 5, y + 13, number(sum(row.values())), f'fill="{INK}"')

    def _legend(self, parts: list[str], width: int) -> tuple[str, int]:
        out, x, y = "", 0.0, HEAD + 10
        named = [p for p in parts if len(parts) > 1] + (
            [f"{self.limit[0]} {number(self.limit[1])}"] if self.limit else []
        )
        for i, name in enumerate(named):
            if x and x + 26 + LETTER * len(name) > width:
                x, y = 0.0, y + 16
            if self.limit and i == len(named) - 1:
                out += f'<path d="M{x:.0f} {y - 4}h12" {DASHES}/>'
            else:
                out += f'<rect x="{x:.0f}" y="{y - 9}" width="10" height="10" {_paint(i)}/>'
            out += _text(x + 15, y, name)
            x += 28 + LETTER * len(name)
        return out, (y + 14) if named else HEAD + 4

    def _repr_svg_(self) -> str:
        return fluid(self.svg())


def _paint(part: int) -> str:
    """The six colours, then the same ones pale."""
    return f'fill="{COLOURS[part % len(COLOURS)]}" opacity="{0.45 if part >= len(COLOURS) else 1}"'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {style}>{escape(text)}</text>'
