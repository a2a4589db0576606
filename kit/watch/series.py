"""Series: the points of one metric, which only grow, and the few of them that a picture can show."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kit.figures.points import SHOWN_NOT_FINITE, Floats, thin

BLOCK = 128  # points; the lowest and the highest of each complete block are kept at hand


class Series(NamedTuple):
    """One metric. Steps of a logged metric are optimizer steps, those of a node's reading are unix times in seconds.

    One thread may extend it while others read it.
    """

    steps: "array[float]"
    values: "array[float]"
    extremes: "array[float]"  # step and value of the lowest and the highest point of each block, in order of steps
    not_finite: "array[float]"  # steps of the values that are NaN or infinite

    @classmethod
    def empty(cls) -> "Series":
        """A series without points."""
        return cls(array("d"), array("d"), array("d"), array("d"))

    def extend(self, steps: Iterable[float], values: "array[float]") -> None:
        """Add points, whose steps must not go back."""
        start = len(self.values)
        self.steps.extend(steps)
        self.values.extend(values)
        if not math.isfinite(sum(values)):
            added = zip(self.steps[start:], values, strict=True)
            self.not_finite.extend(step for step, value in added if not math.isfinite(value))
        self._index_blocks()

    def _index_blocks(self) -> None:
        indexed, complete = len(self.extremes) // 4, len(self.values) // BLOCK
        if indexed == complete:
            return
        added = slice(indexed * BLOCK, complete * BLOCK)
        steps, values = (np.array(column[added]).reshape(-1, BLOCK) for column in (self.steps, self.values))
        finite = np.isfinite(values)
        lowest = np.argmin(np.where(finite, values, np.inf), axis=1)
        highest = np.argmax(np.where(finite, values, -np.inf), axis=1)
        columns, rows = np.sort(np.stack([lowest, highest], 1), 1), np.arange(len(values))[:, None]
        self.extremes.frombytes(np.stack([steps[rows, columns], values[rows, columns]], 2).tobytes())

    def cut(self, step: float) -> None:
        """Drop the points from that step on: a run that resumes repeats them."""
        keep = bisect_left(self.steps, step)
        del self.steps[keep:], self.values[keep:]
        del self.extremes[keep // BLOCK * 4 :]
        del self.not_finite[bisect_left(self.not_finite, step) :]

    def arrays(self) -> tuple[Floats, Floats]:
        """Steps and values as they are now."""
        size = min(len(self.steps), len(self.values))
        return np.array(self.steps[:size]), np.array(self.values[:size])

    def part(self, low: float, high: float) -> "Series":
        """The series from about one step to another, in complete blocks."""
        first, last = bisect_left(self.steps, low) // BLOCK, bisect_left(self.steps, high) // BLOCK + 1
        points = slice(first * BLOCK, last * BLOCK)
        not_finite = slice(bisect_left(self.not_finite, low), bisect_left(self.not_finite, high))
        return Series(
            self.steps[points], self.values[points], self.extremes[4 * first : 4 * last], self.not_finite[not_finite]
        )

    def thin(self, points: int) -> tuple[Floats, Floats]:
        """Steps and values of about `points` points: every extreme that so many can show, and some that are NaN."""
        size = min(len(self.steps), len(self.values))
        if size < points * BLOCK // 2:
            return thin(self.steps[:size], self.values[:size], points)
        extremes = np.array(self.extremes).reshape(-1, 2)
        rest = slice(len(extremes) // 2 * BLOCK, size)
        not_finite = np.array(self.not_finite[:: len(self.not_finite) // SHOWN_NOT_FINITE + 1])
        x = np.concatenate([self.steps[:1], extremes[:, 0], self.steps[rest], not_finite])
        y = np.concatenate([self.values[:1], extremes[:, 1], self.values[rest], np.full(len(not_finite), np.nan)])
        order = np.argsort(x, kind="stable")
        return thin(x[order], y[order], points)
