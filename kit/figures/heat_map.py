"""Heat maps with the edge of a limit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from kit.figures.base import Figure, base_layout
from kit.figures.palette import BAD, BLUE, ORANGE
from kit.figures.svg import INK, WIDTH, Canvas
from kit.show import format_cell

FITS, EXCEEDS, HERE = BLUE, BAD, ORANGE


@dataclass(frozen=True)
class Heat(Figure):
    """One number a cell; cells above the limit are red."""

    title: str
    x_label: str
    y_label: str
    xs: list[Any]
    ys: list[Any]
    values: Sequence[Sequence[float]]
    limit: float
    here: tuple[Any, Any] | None

    @override
    def plotly_dict(self) -> dict[str, Any]:
        xs, ys = [f"{x:,}" for x in self.xs], [f"{y:,}" for y in self.ys]
        scale = [[0, f"{FITS}14"], [0.5, f"{FITS}66"], [0.5001, f"{EXCEEDS}55"], [1, f"{EXCEEDS}55"]]  # with opacity
        data = [
            {
                "type": "heatmap",
                "x": xs,
                "y": ys,
                "z": [list(row) for row in self.values],
                "zmin": 0,
                "zmax": 2 * self.limit or 1,
                "colorscale": scale,
                "showscale": False,
                "xgap": 2,
                "ygap": 2,
                "text": [[format_cell(float(value)) for value in row] for row in self.values],
                "texttemplate": "%{text}",
                "textfont": {"color": INK},  # plotly would choose black, which vanishes in a dark theme
            }
        ]
        layout = base_layout(self.title, self.x_label, self.y_label) | {"height": 150 + 34 * len(ys)}
        layout["xaxis"] |= {"type": "category"}
        layout["yaxis"] |= {"type": "category"}
        layout["shapes"] = [
            {"type": "line", "x0": x0, "y0": y0, "x1": x1, "y1": y1, "line": {"color": INK, "width": 2, "dash": "dash"}}
            for x0, y0, x1, y1 in self._edges()
        ]
        if self.here:
            column, row = self._here()
            layout["shapes"].append({"type": "rect", "x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5,
                                     "y1": row + 0.5, "line": {"color": HERE, "width": 3}})  # fmt: skip
        return {"data": data, "layout": layout}

    @override
    def svg(self) -> str:
        wide, high, left, top = min(90.0, (WIDTH - 100) / len(self.xs)), 30, 76, 44
        canvas = Canvas(self.title, top + high * len(self.ys) + 42)
        bottom = top + high * len(self.ys)
        canvas.text(0, top - 10, self.y_label)
        canvas.text(left + wide * len(self.xs) / 2, bottom + 34, self.x_label, "middle")
        for column, x in enumerate(self.xs):
            canvas.text(left + wide * (column + 0.5), bottom + 16, format_cell(x), "middle")
        for row, (y, values) in enumerate(zip(self.ys, self.values, strict=True)):
            cell_top = bottom - high * (row + 1)
            canvas.text(left - 8, cell_top + 19, format_cell(y), "end")
            for column, value in enumerate(values):
                exceeds = value > self.limit
                opacity = 0.25 if exceeds else 0.06 + 0.26 * value / self.limit
                colour = EXCEEDS if exceeds else FITS
                canvas.rectangle(left + wide * column, cell_top, wide - 2, high - 2, colour, opacity)
                canvas.text(left + wide * (column + 0.5) - 1, cell_top + 19, format_cell(float(value)), "middle")
        for x0, y0, x1, y1 in self._edges():
            canvas.line(left + wide * (x0 + 0.5) - 1, bottom - high * (y0 + 0.5) - 1,
                        left + wide * (x1 + 0.5) - 1, bottom - high * (y1 + 0.5) - 1, INK, dashed=True)  # fmt: skip
        if self.here:
            column, row = self._here()
            canvas.frame(left + wide * column, bottom - high * (row + 1), wide - 2, high - 2, HERE)
        return canvas.document()

    def __str__(self) -> str:
        head = f"{self.title} ({self.y_label} by {self.x_label}; limit {format_cell(float(self.limit))})"
        rows = [["", *map(format_cell, self.xs)]]
        rows += [
            [format_cell(y), *(format_cell(float(v)) for v in row)] for y, row in zip(self.ys, self.values, strict=True)
        ]
        return "\n".join([head, *("  " + "".join(text.rjust(9) for text in row) for row in rows)])

    def _here(self) -> tuple[int, int]:
        assert self.here is not None
        return self.xs.index(self.here[0]), self.ys.index(self.here[1])

    def _edges(self) -> list[tuple[float, float, float, float]]:
        """The borders between a cell within the limit and one above it; cell (i, j) is centred at x = j, y = i."""
        fits = [[value <= self.limit for value in row] for row in self.values]
        edges = []
        for i, row in enumerate(fits):
            for j, fit in enumerate(row):
                if j + 1 < len(row) and row[j + 1] != fit:
                    edges.append((j + 0.5, i - 0.5, j + 0.5, i + 0.5))
                if i + 1 < len(fits) and fits[i + 1][j] != fit:
                    edges.append((j - 0.5, i + 0.5, j + 0.5, i + 0.5))
        return edges
