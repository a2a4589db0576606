"""Points of curves: the few that a picture can show, and their moving average."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHOWN_NOT_FINITE = 20  # at least so many of the values that are not finite survive thinning


def thin(x: Sequence[float] | Floats, y: Sequence[float] | Floats, points: int) -> tuple[Floats, Floats]:
    """x and y of about `points` points: the extremes of equal parts, the ends, and some that are not finite."""
    x, y = np.array(x, float), np.array(y, float)
    if len(x) <= points:
        return x, y
    size = math.ceil(2 * len(y) / points)  # values in a part, of which the lowest and the highest stay
    finite = np.isfinite(y)
    starts = np.arange(0, len(y), size)
    padded = np.full((2, len(starts) * size), np.inf)
    padded[:, : len(y)] = np.where(finite, y, np.inf), np.where(finite, -y, np.inf)
    extremes = padded.reshape(2, -1, size).argmin(axis=2) + starts
    others = np.flatnonzero(~finite)
    some = others[:: len(others) // SHOWN_NOT_FINITE + 1]
    keep = np.unique(np.concatenate([extremes.ravel(), some, [0, len(y) - 1]]))
    return x[keep], y[keep]


def smoothed(y: Floats, weight: float) -> Floats:
    """The exponential moving average, corrected for the bias of its start; what is not finite stays as it is."""
    out, mean, sum_of_weights = y.copy(), 0.0, 0.0
    for index in np.flatnonzero(np.isfinite(y)):
        mean = weight * mean + (1 - weight) * y[index]
        sum_of_weights = weight * sum_of_weights + 1 - weight
        out[index] = mean / sum_of_weights
    return out
