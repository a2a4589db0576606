"""Heat maps of the devices: the mean of each reading of every GPU over columns of time.

A map has at most COLUMNS columns, however long the run is: a column is one second wide at first, and twice as wide
whenever the columns do not suffice. So the memory of a map depends only on the number of devices, and new samples only
change the columns that they belong to.
"""

import math
import threading
from array import array
from bisect import bisect_left
from copy import copy
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kit.figures.points import Floats
from kit.watch.metrics import Key, Store
from kit.watch.samples import CPU, Reading
from kit.watch.series import Series

COLUMNS = 320  # a map of 64 GPUs has 20 kB then, and one of five minutes a column for each second
READINGS = ("util", "mem_gib", "power_w", "temp_c")
LATELY = 120.0  # seconds over which devices are compared: an evaluation or a save takes seconds
_LOCK = threading.RLock()  # one thread adds samples while another one draws
Device = tuple[str, int | str]  # host, and GPU index, UUID of a MIG instance or CPU


class HeatMap:
    """One reading of all devices. A row is a device, a column a part of time; columns begin at multiples of `width`."""

    def __init__(self) -> None:
        self.width = 1.0  # seconds
        self.devices: dict[Device, int] = {}  # device: its row
        self._first, self._last = math.inf, -math.inf  # unix times of samples
        self._sums, self._counts = np.zeros((0, COLUMNS)), np.zeros((0, COLUMNS))

    @property
    def start(self) -> float:
        """Unix time at which the first column begins."""
        return self._first // self.width * self.width

    @property
    def shown(self) -> int:
        """How many columns have begun."""
        return int((self._last - self.start) // self.width) + 1 if self.devices else 0

    def copy(self) -> "HeatMap":
        """A map with the same samples, to which others can be added."""
        same = copy(self)
        same.devices, same._sums, same._counts = dict(self.devices), self._sums.copy(), self._counts.copy()
        return same

    def add(self, device: Device, times: Floats, values: Floats) -> None:
        """Add samples of a device: unix times in seconds and finite values."""
        if not len(times):
            return
        with _LOCK:
            self._add(device, times, values)

    def _add(self, device: Device, times: Floats, values: Floats) -> None:
        self._cover(float(times.min()), float(times.max()))
        if device not in self.devices:
            row = np.zeros((1, COLUMNS))
            self._sums, self._counts = np.vstack([self._sums, row]), np.vstack([self._counts, row])
            self.devices[device] = len(self.devices)
        columns = ((times - self.start) // self.width).astype(int)
        row_index = self.devices[device]
        self._sums[row_index] += np.bincount(columns, values, COLUMNS)
        self._counts[row_index] += np.bincount(columns, minlength=COLUMNS)

    def _cover(self, first: float, last: float) -> None:
        """Make room for samples between these times, by wider columns if need be."""
        old_start, old_width = self.start if self.devices else first, self.width
        self._first, self._last = min(self._first, first), max(self._last, last)
        while (self._last - self.start) // self.width >= COLUMNS:
            self.width *= 2
        if (self.start, self.width) == (old_start, old_width) or not self.devices:
            return
        moved = ((old_start + old_width * np.arange(COLUMNS) - self.start) // self.width).astype(int)
        rows = COLUMNS * np.arange(len(self.devices))[:, None]
        cells = (rows + np.minimum(moved, COLUMNS - 1)).ravel()  # the columns that are cut off have no samples
        self._sums, self._counts = (_moved(part, cells) for part in (self._sums, self._counts))

    def means(self, columns: int = COLUMNS) -> tuple[Floats, Floats]:
        """Middles of at most about `columns` columns as unix times, and means (devices, columns); NaN without samples.

        Where fewer columns are asked for than there are, neighbours are joined.
        """
        if not self.devices:
            return np.zeros(0), np.zeros((0, 0))
        with _LOCK:
            join = math.ceil(self.shown / columns)
            edges = np.arange(0, self.shown, join)
            middles = self.start + self.width * (edges + join / 2)
            sums, counts = (np.add.reduceat(part[:, : self.shown], edges, 1) for part in (self._sums, self._counts))
        return np.asarray(middles, float), np.asarray(sums / np.where(counts > 0, counts, np.nan))

    def lately(self) -> Floats:
        """The mean of each device over about the newest LATELY seconds; NaN without samples."""
        with _LOCK:
            part = slice(max(0, self.shown - math.ceil(LATELY / self.width)), self.shown)
            sums, counts = self._sums[:, part].sum(1), self._counts[:, part].sum(1)
        return np.asarray(sums / np.where(counts > 0, counts, np.nan))


def _moved(part: Floats, cells: NDArray[np.int_]) -> Floats:
    """An array of the same shape, in which each value is added to the cell of that index."""
    return np.asarray(np.bincount(cells, part.ravel(), part.size), float).reshape(part.shape)


@dataclass
class Maps:
    """The heat maps of a run by reading, over all of its time or between two unix times. They grow with its store."""

    low: float = -math.inf
    high: float = math.inf
    maps: dict[str, HeatMap] = field(default_factory=lambda: {name: HeatMap() for name in READINGS})
    _seen: dict[Key, tuple["array[float]", int]] = field(default_factory=dict)  # steps, and how many are in the map

    def update(self, store: Store) -> None:
        """Add the samples that are new in the store."""
        with _LOCK:
            self._update(store)

    def _update(self, store: Store) -> None:
        if any(store.series.get(key, Series.empty()).steps is not steps for key, (steps, _) in self._seen.items()):
            self._seen = {}  # wandb's own samples were dropped for those of the nodes
            self.maps = {name: HeatMap() for name in READINGS}
        for key, series in list(store.series.items()):
            if not isinstance(key, Reading) or key.name not in self.maps:
                continue
            done = self._seen[key][1] if key in self._seen else 0
            size = min(len(series.steps), len(series.values))
            if math.isfinite(self.low):
                done = max(done, bisect_left(series.steps, self.low, 0, size))
                size = bisect_left(series.steps, self.high, 0, size)
            if size > done:
                times, values = np.array(series.steps[done:size]), np.array(series.values[done:size])
                known = np.isfinite(values)
                self.maps[key.name].add((key.host, key.device), times[known], values[known])
                self._seen[key] = (series.steps, size)

    def joined(self, end: Store) -> "Maps":
        """A copy with the samples of another store: while a long file is read from its beginning, those of its end."""
        with _LOCK:
            joined = Maps(self.low, self.high, {name: heat_map.copy() for name, heat_map in self.maps.items()})
        joined.update(end)
        return joined


def deviations(maps: Maps) -> dict[Device, float]:
    """How far each GPU was lately from the median of all, as a share of it: the larger one of utilisation and power.

    Ranks wait for the slowest, so with equal work all GPUs look alike; the one that does not is slower, or waits.
    """
    found: dict[Device, float] = {}
    for name in ("util", "power_w"):
        heat_map = maps.maps[name]
        if heat_map.devices and not all(device == CPU for _, device in heat_map.devices):
            levels = heat_map.lately()
            known = [levels[row] for (_, device), row in heat_map.devices.items() if device != CPU]
            median = float(np.nanmedian(known)) if np.isfinite(known).any() else 0.0
            for device, row in heat_map.devices.items():
                share = abs(levels[row] - median) / median if median > 0 else 0.0
                found[device] = max(found.get(device, 0.0), 0.0 if math.isnan(share) else float(share))
    return found
