"""The storage under a path: the mount that holds it, and how fast plain reads of its files are."""

import mmap
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kit.checkpoints import pagecache

_BLOCK = 4 << 20  # bytes of one read
_MOST_BLOCKS = 256  # 1 GiB
_DEPTHS = (1, 4, 16, 32)  # reads in flight


def mount(path: Path) -> str:
    """The mount that holds the path, as "source on folder (type)"; an NFS source names the server's address."""
    mounts = [m for m in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(m.mountpoint)]
    deepest: Any = max(mounts, key=lambda m: len(m.mountpoint))
    return f"{deepest.device} on {deepest.mountpoint} ({deepest.fstype})"


@dataclass
class PlainReads:
    """Rates of plain reads of some files, in GB/s, at several queue depths: what a load can be compared with.

    One depth alone would make a parallel loader look faster than the storage.
    """

    files: Sequence[Path]
    cold: bool
    rates: dict[int, list[float]] = field(default_factory=lambda: {depth: [] for depth in _DEPTHS})

    def measure(self) -> None:
        """Add one sample at every depth."""
        for depth, taken in self.rates.items():
            taken.append(_read_rate(self.files, self.cold, depth))

    @property
    def best_depth(self) -> int:
        """The queue depth with the highest median."""
        return max(self.rates, key=lambda depth: statistics.median(self.rates[depth]))

    @property
    def best_rates(self) -> list[float]:
        """The samples at the best depth, in GB/s."""
        return self.rates[self.best_depth]

    @property
    def description(self) -> str:
        """How the files were read, such as "O_DIRECT, 16 deep"."""
        return f"{'O_DIRECT' if self.cold else 'pread'}, {self.best_depth} deep"


def _read_rate(files: Sequence[Path], cold: bool, depth: int) -> float:
    """GB/s of the first GiB of the files: from the device past the page cache if cold, else from memory."""
    blocks = [(path, start) for path in files for start in range(0, path.stat().st_size, _BLOCK)][:_MOST_BLOCKS]
    (pagecache.evict if cold else pagecache.warm)(files)
    begun = time.perf_counter()
    with ThreadPoolExecutor(depth) as pool:
        done = sum(pool.map(_read_blocks, [blocks[n::depth] for n in range(depth)], [cold] * depth))
    return done / 1e9 / (time.perf_counter() - begun)


def _read_blocks(blocks: Sequence[tuple[Path, int]], direct: bool) -> int:
    """Bytes read from (file, position) blocks."""
    buffer, done = mmap.mmap(-1, _BLOCK), 0  # page-aligned, as O_DIRECT asks
    for path, start in blocks:
        try:
            descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        except OSError:  # this file system has no O_DIRECT
            descriptor = os.open(path, os.O_RDONLY)
        done += os.preadv(descriptor, [buffer], start)
        os.close(descriptor)
    return done
