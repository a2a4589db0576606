"""Packing: documents into rows of a fixed length, best fit over the whole data set, the same on any machine."""

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def pack(lengths: Any, size: int, seed: int) -> tuple[Ints, Ints]:
    """(documents, starts): row i holds documents[starts[i]:starts[i + 1]], of at most `size` tokens together.

    Best-fit decreasing: each document, longest first, goes to the fullest row that still takes it. Documents of one
    length go together: the fullest row takes as many as it can, since it stays the fullest. Rows and the documents in
    them are in seeded order. Raises ValueError for a document longer than a row.
    """
    lengths = np.asarray(lengths, np.int64)
    if too_long := int((lengths > size).sum()):
        raise ValueError(f"{too_long} documents are longer than {size}; cut or drop them first")
    row_of, rows = np.empty(len(lengths), np.int64), 0
    longest_first = np.argsort(-lengths, kind="stable")
    with_room: dict[int, Ints] = {}  # room left, in tokens: its rows
    rooms: list[int] = []  # the keys, sorted
    bounds = np.flatnonzero(np.diff(lengths[longest_first], prepend=-1, append=-1))
    for documents in np.split(longest_first, bounds[1:-1]):
        length = int(lengths[documents[0]]) if len(documents) else size
        while len(documents):
            at = bisect.bisect_left(rooms, length)
            room = rooms.pop(at) if at < len(rooms) else size
            each = room // length
            if room in with_room:
                takers = with_room.pop(room)
            else:
                takers = np.arange(rows, rows - (-len(documents) // each))
                rows = int(takers[-1]) + 1
            placed = np.repeat(takers, each)[: len(documents)]
            row_of[documents[: len(placed)]] = placed
            documents, used = documents[len(placed) :], -(-len(placed) // each)
            full, rest = len(placed) // each, len(placed) % each
            for left, group in (
                (room - each * length, takers[:full]),
                (room - rest * length, takers[full:used]),
                (room, takers[used:]),
            ):
                _give_back(with_room, rooms, left, group)
    return _shuffled(row_of, rows, seed)


def _give_back(with_room: dict[int, Ints], rooms: list[int], left: int, group: Ints) -> None:
    if left and len(group):
        if left not in with_room:
            bisect.insort(rooms, left)
        with_room[left] = np.concatenate([with_room.get(left, group[:0]), group])


def _shuffled(row_of: Ints, rows: int, seed: int) -> tuple[Ints, Ints]:
    """Documents in seeded order of rows, in seeded order inside each; RandomState's stream never changes (NEP 19)."""
    rng = np.random.RandomState(seed)
    place = rng.permutation(rows)[row_of]
    documents = np.lexsort((rng.permutation(len(row_of)), place))
    return documents, np.r_[0, np.bincount(place, minlength=rows).cumsum()]


def lower_bound(lengths: Any, size: int) -> int:
    """Rows that no packing can do without: the bound L2 of Martello and Toth (1990), over all thresholds k.

    Documents longer than size - k stand without any of at least k; those above half a row each have their own, and
    what they leave free takes the rest.
    """
    count = np.bincount(np.asarray(lengths, np.int64), minlength=size + 1)
    tokens = (count * np.arange(size + 1)).cumsum()
    number, half = count.cumsum(), size // 2
    k = np.arange(half + 1)
    alone = number[size] - number[half]
    free = (number[size - k] - number[half]) * size - (tokens[size - k] - tokens[half])
    small = tokens[half] - tokens[np.maximum(k - 1, 0)]
    return int((alone + np.maximum(0, -(-(small - free) // size))).max())
