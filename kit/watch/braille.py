"""Line charts of text for terminals: Braille characters hold two by four dots each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kit.figures.charts import DrawnLine, number
from kit.figures.points import Floats
from kit.figures.svg import ticks

# Bits of the dots of a cell, from U+2800 on: rows from top to bottom, left column and right column.
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
AXIS = 9  # characters for the numbers of the y axis
Range = tuple[float, float]


@dataclass
class Canvas:
    """Rows and columns of characters, and for each the index of the line that drew it last; -1 for none."""

    rows: int
    columns: int
    dots: NDArray[np.int_] = field(init=False)
    line: NDArray[np.int_] = field(init=False)

    def __post_init__(self) -> None:
        self.dots = np.zeros((self.rows, self.columns), int)
        self.line = np.full((self.rows, self.columns), -1)

    def draw(self, index: int, x: Floats, y: Floats, x_ends: Range, y_ends: Range) -> None:
        """A line through the points; a value that is not finite is a gap."""
        across = (x - x_ends[0]) / (x_ends[1] - x_ends[0]) * (2 * self.columns - 1)
        down = (y_ends[1] - y) / (y_ends[1] - y_ends[0]) * (4 * self.rows - 1)
        points = np.stack([across, down], 1)
        for start, end in zip(np.concatenate([points[:1], points[:-1]]), points, strict=True):
            if np.isfinite([start, end]).all():
                steps = np.linspace(start, end, int(np.abs(end - start).max()) + 2)
                columns, rows = np.rint(steps).astype(int).T
                np.bitwise_or.at(self.dots, (rows // 4, columns // 2), DOTS[rows % 4, columns % 2])
                self.line[rows // 4, columns // 2] = index


@dataclass(frozen=True)
class TextChart:
    """A chart of text: for each row the label of its y axis and its canvas, and the numbers of the x axis."""

    labels: list[str]
    canvas: Canvas
    x_numbers: str


def text_chart(lines: Sequence[DrawnLine], width: int, height: int) -> TextChart | None:
    """The lines as a chart of so many characters; None where no value is finite."""
    canvas = Canvas(max(2, height - 2), max(8, width - AXIS))
    known = [(line.x, line.y, np.isfinite(line.y)) for line in lines]
    xs = np.concatenate([np.zeros(0), *(x[finite] for x, _, finite in known)])
    ys = np.concatenate([np.zeros(0), *(y[finite] for _, y, finite in known)])
    if not len(xs):
        return None
    x_ends, y_ends = _ends(xs), _ends(ys)
    for index, (x, y, _) in enumerate(known):
        canvas.draw(index, x, y, x_ends, y_ends)
    labels = [""] * canvas.rows
    for value in ticks(*y_ends, max(1, canvas.rows // 2)):
        labels[round((canvas.rows - 1) * (y_ends[1] - value) / (y_ends[1] - y_ends[0]))] = number(value)
    return TextChart(labels, canvas, _x_numbers(x_ends, canvas.columns))


def _ends(values: Floats) -> Range:
    low, high = float(values.min()), float(values.max())
    room = 0.0 if high > low else abs(low) * 0.1 or 0.5
    return low - room, high + room


def _x_numbers(ends: Range, columns: int) -> str:
    """The numbers of the x axis, each centred below its place; those without room are left out."""
    text = " " * columns
    for value in ticks(*ends, max(1, columns // 10)):
        label = number(value)
        place = round((columns - 1) * (value - ends[0]) / (ends[1] - ends[0])) - len(label) // 2
        place = min(max(0, place), columns - len(label))
        if not text[max(0, place - 1) : place + len(label) + 1].strip():
            text = text[:place] + label + text[place + len(label) :]
    return text
