"""Packing: documents into rows of a fixed length, best fit over the whole data set, the same on any machine."""

import bisect
import random
from collections.abc import Sequence


def pack(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Rows of document indices whose lengths sum to at most `size`; rows and their documents in seeded order.

    Best-fit decreasing: each document, longest first, goes to the fullest row that still takes it.
    """
    if too_long := [n for n in lengths if n > size]:
        raise ValueError(f"{len(too_long)} documents are longer than {size}; cut or drop them first")
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(room, (lengths[index], -1))
        left, row = room.pop(at) if at < len(room) else (size, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        bisect.insort(room, (left - lengths[index], row))
    rng = random.Random(seed)
    for documents in rows:
        rng.shuffle(documents)
    rng.shuffle(rows)
    return rows
