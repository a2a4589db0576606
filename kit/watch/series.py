"""One metric's points, which only grow, and the few of them that a picture can show."""

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kit.chart import Floats, thin

BLOCK = 128  # points; of each whole block the lowest and the highest are kept at hand


class Series(NamedTuple):
    """One metric. Steps of a logged one are optimizer steps, those of a node's are unix times in seconds.

    It may be drawn in one thread while another one extends it.
    """

    steps: "array[float]"
    values: "array[float]"
    extremes: "array[float]"  # step, value of two points a block
    odd: "array[float]"  # steps of the values that are not finite

    @classmethod
    def empty(cls) -> "Series":
        """Without points."""
        return cls(array("d"), array("d"), array("d"), array("d"))

    def extend(self, steps: Iterable[float], values: "array[float]") -> None:
        """Add points; every step is at or behind the last one."""
        start = len(self.values)
        self.steps.extend(steps)
        self.values.extend(values)
        if not math.isfinite(sum(values)):
            self.odd.extend(step for step, v in zip(self.steps[start:], values, strict=True) if not math.isfinite(v))
        self._index()

    def _index(self) -> None:
        done, whole = len(self.extremes) // 4, len(self.values) // BLOCK
        if done < whole:
            part = slice(done * BLOCK, whole * BLOCK)
            x, y = (np.array(one[part]).reshape(-1, BLOCK) for one in (self.steps, self.values))
            ends = np.argmin(np.where(np.isfinite(y), y, np.inf), 1), np.argmax(np.where(np.isfinite(y), y, -np.inf), 1)
            order, rows = np.sort(np.stack(ends, 1), 1), np.arange(len(y))[:, None]
            self.extremes.frombytes(np.stack([x[rows, order], y[rows, order]], 2).tobytes())

    def cut(self, step: float) -> None:
        """Drop the points from that step on: a run that resumes does them again."""
        keep = bisect_left(self.steps, step)
        del self.steps[keep:], self.values[keep:]
        del self.extremes[keep // BLOCK * 4 :]
        del self.odd[bisect_left(self.odd, step) :]

    def thin(self, points: int) -> tuple[Floats, Floats]:
        """About `points` of the points: every extreme that so many can show, and some of those that are not finite."""
        size = min(len(self.steps), len(self.values))
        if size < points * BLOCK // 2:
            return thin(self.steps[:size], self.values[:size], points)
        rough = np.array(self.extremes).reshape(-1, 2)
        rest = slice(len(rough) // 2 * BLOCK, size)
        odd = np.array(self.odd[:: len(self.odd) // 20 + 1])
        x = np.concatenate([self.steps[:1], rough[:, 0], self.steps[rest], odd])
        y = np.concatenate([self.values[:1], rough[:, 1], self.values[rest], np.full(len(odd), np.nan)])
        order = np.argsort(x, kind="stable")
        return thin(x[order], y[order], points)
