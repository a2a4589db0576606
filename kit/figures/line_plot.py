"""Line plots."""

import math
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from kit.figures.base import Figure, base_layout
from kit.figures.palette import colour_of
from kit.figures.svg import GRID, WIDTH, Axis, Canvas, ticks
from kit.show import format_cell

POINTS = 600  # of all lines of a figure together, which is about 8 kB of JSON


@dataclass(frozen=True)
class Lines(Figure):
    """Curves of y over x."""

    title: str
    x_label: str
    y_label: str
    curves: dict[str, tuple[list[float], list[float]]]
    colours: dict[str, str]

    @override
    def plotly_dict(self) -> dict[str, Any]:
        data = [
            {"type": "scatter", "mode": "lines" if len(x) > 1 else "markers", "name": name, "x": x,
             "y": [value if math.isfinite(value) else None for value in y], "line": {"color": self._colour(name)}}
            for name, (x, y) in self.curves.items()
        ]  # fmt: skip
        return {"data": data, "layout": base_layout(self.title, self.x_label, self.y_label)}

    @override
    def svg(self) -> str:
        canvas = Canvas(self.title, 300)
        points = [(x, y) for xs, ys in self.curves.values() for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
        if not points:
            canvas.text(WIDTH / 2, 150, "no values", "middle")
            return canvas.document()
        top = canvas.legend({name: self._colour(name) for name in self.curves})
        x_axis = Axis.around([x for x, _ in points], 70, WIDTH - 20)
        y_axis = Axis.around([y for _, y in points], 260, top + 14)
        for value in ticks(y_axis.low, y_axis.high):
            canvas.line(x_axis.start, y_axis.at(value), x_axis.stop, y_axis.at(value), GRID)
            canvas.text(x_axis.start - 6, y_axis.at(value) + 4, format_cell(value), "end")
        for value in ticks(x_axis.low, x_axis.high):
            canvas.text(x_axis.at(value), 276, format_cell(value), "middle")
        canvas.text((x_axis.start + x_axis.stop) / 2, 294, self.x_label, "middle")
        canvas.text(0, top, self.y_label)
        for name, (xs, ys) in self.curves.items():
            canvas.polyline([(x_axis.at(x), y_axis.at(y)) for x, y in zip(xs, ys, strict=True)], self._colour(name))
        return canvas.document()

    def __str__(self) -> str:
        last = (
            f"  {name}: {format_cell(ys[-1])} at {format_cell(xs[-1])}" for name, (xs, ys) in self.curves.items() if xs
        )
        return "\n".join([f"{self.title} ({self.y_label}; last value, {self.x_label})", *last])

    def _colour(self, name: str) -> str:
        return self.colours.get(name) or colour_of(name, list(self.curves).index(name))


def thin(x: Any, y: Any, points: int) -> tuple[list[float], list[float]]:
    """About `points` of the points: of each bucket the lowest and the highest stay, so that no extreme is lost."""
    xs, ys = [float(value) for value in x], [float(value) for value in y]
    if len(xs) <= points:
        return xs, ys
    size = math.ceil(2 * len(xs) / points)
    keep = {0, len(xs) - 1}
    for start in range(0, len(xs), size):
        bucket = range(start, min(start + size, len(xs)))
        finite = [i for i in bucket if math.isfinite(ys[i])]
        if len(finite) < len(bucket):
            keep.add(next(i for i in bucket if not math.isfinite(ys[i])))
        if finite:
            keep |= {min(finite, key=ys.__getitem__), max(finite, key=ys.__getitem__)}
    return [xs[i] for i in sorted(keep)], [ys[i] for i in sorted(keep)]
