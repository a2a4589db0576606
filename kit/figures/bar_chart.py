"""Horizontal bars: stacked parts, and medians with their range."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from typing_extensions import override

from kit.figures.base import Figure, Limit, base_layout, limit_text, with_limit
from kit.figures.palette import COLOURS, colour_of
from kit.figures.svg import BAR, INK, LETTER, LIMIT, ROW, Axis, Canvas
from kit.show import format_cell

Range = tuple[float, float, float]  # lowest, median, highest


@dataclass(frozen=True)
class Bars(Figure):
    """Stacked bars: one row a label, one part a colour."""

    title: str
    unit: str
    rows: Mapping[str, Mapping[str, float]]
    limit: Limit | None

    @override
    def plotly_dict(self) -> dict[str, Any]:
        labels = list(self.rows)
        data = [
            {"type": "bar", "orientation": "h", "name": part, "y": labels, "marker": {"color": colour},
             "x": [row.get(part, 0.0) for row in self.rows.values()],
             "hovertemplate": f"%{{y}}: {escape(part)} %{{x:.4~g}} {escape(self.unit)}<extra></extra>"}
            for part, colour in self._colours().items()
        ]  # fmt: skip
        layout = base_layout(self.title, self.unit, "") | {"barmode": "stack", "height": 130 + 30 * len(labels)}
        layout["yaxis"] |= {"autorange": "reversed", "type": "category", "automargin": True}
        return {"data": data, "layout": with_limit(layout, self.limit)}

    @override
    def svg(self) -> str:
        canvas = Canvas(self.title, 0)
        top = canvas.legend(self._colours() if len(self._colours()) > 1 else {}, limit_text(self.limit))
        sums = [sum(row.values()) for row in self.rows.values()]
        axis = canvas.rows(list(self.rows), max([*sums, self.limit[1] if self.limit else 0.0]), top, self.unit)
        for index, (row, total) in enumerate(zip(self.rows.values(), sums, strict=True)):
            done = 0.0
            for part, colour in self._colours().items():
                value = row.get(part, 0.0)
                canvas.rectangle(axis.at(done), top + ROW * index, axis.at(done + value) - axis.at(done), BAR, colour)
                done += value
            _draw_value(canvas, axis, total, total, top + ROW * index + 13, self.limit)
        _draw_limit(canvas, axis, top, self.limit)
        return canvas.document()

    def __str__(self) -> str:
        rows = (
            f"  {label}: {format_cell(float(sum(row.values())))} ("
            + ", ".join(f"{part} {format_cell(float(value))}" for part, value in row.items() if value) + ")"
            for label, row in self.rows.items()
        )  # fmt: skip
        limit = [f"  {self.limit[0]}: {format_cell(self.limit[1])}"] if self.limit else []
        return "\n".join([f"{self.title} ({self.unit})", *rows, *limit])

    def _colours(self) -> dict[str, str]:
        parts = dict.fromkeys(part for row in self.rows.values() for part, value in row.items() if value)
        return {part: colour_of(part, index) for index, part in enumerate(parts)}


@dataclass(frozen=True)
class Ranges(Figure):
    """One bar a label: the median, with a line from the lowest to the highest."""

    title: str
    unit: str
    rows: Mapping[str, Range]
    limit: Limit | None

    @override
    def plotly_dict(self) -> dict[str, Any]:
        boxes = list(self.rows.values())
        error = {"type": "data", "symmetric": False, "array": [high - middle for _, middle, high in boxes],
                 "arrayminus": [middle - low for low, middle, _ in boxes], "color": INK}  # fmt: skip
        data = [{"type": "bar", "orientation": "h", "y": list(self.rows), "x": [middle for _, middle, _ in boxes],
                 "error_x": error, "marker": {"color": COLOURS[0]}}]  # fmt: skip
        layout = base_layout(self.title, self.unit, "") | {"height": 130 + 30 * len(boxes), "showlegend": False}
        layout["yaxis"] |= {"autorange": "reversed", "type": "category", "automargin": True}
        return {"data": data, "layout": with_limit(layout, self.limit)}

    @override
    def svg(self) -> str:
        canvas = Canvas(self.title, 0)
        top = canvas.legend({}, limit_text(self.limit))
        highest = max([high for _, _, high in self.rows.values()] + [self.limit[1] if self.limit else 0.0])
        axis = canvas.rows(list(self.rows), highest, top, self.unit)
        for index, (low, middle, high) in enumerate(self.rows.values()):
            y = top + ROW * index
            canvas.rectangle(axis.at(0), y, axis.at(middle) - axis.at(0), BAR, COLOURS[0])
            canvas.line(axis.at(low), y + 9, axis.at(high), y + 9, INK)
            _draw_value(canvas, axis, middle, high, y + 13, self.limit)
        _draw_limit(canvas, axis, top, self.limit)
        return canvas.document()

    def __str__(self) -> str:
        rows = (
            f"  {label}: {format_cell(float(middle))} ({format_cell(float(low))} to {format_cell(float(high))})"
            for label, (low, middle, high) in self.rows.items()
        )
        limit = [f"  {self.limit[0]}: {format_cell(self.limit[1])}"] if self.limit else []
        return "\n".join([f"{self.title} ({self.unit}; median and range)", *rows, *limit])


def _draw_value(canvas: Canvas, axis: Axis, value: float, end: float, y: float, limit: Limit | None) -> None:
    """The number of a bar right of its end, or right of the limit's line where that would cross it."""
    text, x = format_cell(float(value)), axis.at(end) + 5
    if limit and x - 3 < axis.at(limit[1]) < x + 3 + LETTER * len(text):
        x = axis.at(limit[1]) + 5
    canvas.text(x, y, text)


def _draw_limit(canvas: Canvas, axis: Axis, top: float, limit: Limit | None) -> None:
    if limit:
        x = axis.at(limit[1])
        canvas.line(x, top - 4, x, canvas.height - 36, LIMIT, dashed=True)
