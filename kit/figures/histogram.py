"""Histograms of counts in bins whose edges are known."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from typing_extensions import override

from kit.figures.base import Figure, base_layout
from kit.figures.palette import colour_of
from kit.figures.svg import GRID, WIDTH, Axis, Canvas, ticks
from kit.show import format_cell

TEXT_ROWS = 8  # lines of the text, each with the bins of an equal part of the axis


@dataclass(frozen=True)
class Histogram(Figure):
    """Bars as wide as their bins: bin i ends at edges[i] and begins where the one before ends, the first at 0."""

    title: str
    x_label: str
    y_label: str
    edges: list[float]
    counts: list[float]

    @override
    def plotly_dict(self) -> dict[str, Any]:
        bins = list(pairwise([0.0, *self.edges]))
        share = sum(self.counts) or 1
        hover = [
            f"over {format_cell(int(low))} to {format_cell(int(high))} {self.x_label}: {format_cell(int(number))} "
            f"{self.y_label if number != 1 else self.y_label.removesuffix('s')} ({number / share:.1%})"
            for (low, high), number in zip(bins, self.counts, strict=True)
        ]
        trace = {
            "type": "bar", "x": [(low + high) / 2 for low, high in bins], "width": [high - low for low, high in bins],
            "y": self.counts, "marker": {"color": colour_of(self.y_label, 0)}, "hovertext": hover, "hoverinfo": "text",
        }  # fmt: skip
        layout = base_layout(self.title, self.x_label, self.y_label) | {"showlegend": False, "height": 300}
        return {"data": [trace], "layout": layout}

    @override
    def svg(self) -> str:
        canvas = Canvas(self.title, 260)
        x_axis = Axis(0.0, max(self.edges, default=1.0), 70, WIDTH - 20)
        y_axis = Axis(0.0, max(self.counts, default=0.0) or 1.0, 220, 44)
        for value in ticks(0, y_axis.high):
            canvas.line(x_axis.start, y_axis.at(value), x_axis.stop, y_axis.at(value), GRID)
            canvas.text(x_axis.start - 6, y_axis.at(value) + 4, f"{value:,.10g}", "end")
        for (low, high), count in zip(pairwise([0.0, *self.edges]), self.counts, strict=True):
            width = max(1.0, x_axis.at(high) - x_axis.at(low) - 0.5)
            canvas.rectangle(
                x_axis.at(low), y_axis.at(count), width, 220 - y_axis.at(count), colour_of(self.y_label, 0)
            )
        for value in ticks(0, x_axis.high):
            canvas.text(x_axis.at(value), 236, f"{value:,.10g}", "middle")
        canvas.text((x_axis.start + x_axis.stop) / 2, 254, self.x_label, "middle")
        canvas.text(0, 34, self.y_label)
        return canvas.document()

    def __str__(self) -> str:
        size = max(1, len(self.edges) // TEXT_ROWS)
        share = sum(self.counts) or 1
        starts = range(0, len(self.edges), size)
        rows = [(self.edges[start : start + size][-1], sum(self.counts[start : start + size])) for start in starts]
        lines = (f"  up to {format_cell(int(edge))}: {format_cell(int(n))} ({n / share:.1%})" for edge, n in rows)
        return "\n".join([f"{self.title} ({self.y_label} by {self.x_label})", *lines])
