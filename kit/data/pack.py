"""Packing: documents into rows of a fixed length, best fit over the complete dataset, the same on any machine."""

import bisect
from typing import Any

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def pack(lengths: Any, size: int, seed: int) -> tuple[Integers, Integers]:
    """(documents, starts): row i holds documents[starts[i]:starts[i + 1]], together at most `size` tokens.

    Best-fit decreasing: each document, longest first, goes to the fullest row that has room for it. Documents of one
    length are placed together: the fullest row takes as many as fit, since it stays the fullest. Rows, and the
    documents in a row, are in seeded order. Raises ValueError for a document longer than a row.
    """
    lengths = np.asarray(lengths, np.int64)
    if too_long := int((lengths > size).sum()):
        raise ValueError(f"{too_long} documents are longer than {size}; cut or drop them first")
    row_of, rooms, row_count = np.empty(len(lengths), np.int64), _Rooms(), 0
    longest_first = np.argsort(-lengths, kind="stable")
    bounds = np.flatnonzero(np.diff(lengths[longest_first], prepend=-1, append=-1))
    for documents in np.split(longest_first, bounds[1:-1]):  # of one length
        length = int(lengths[documents[0]]) if len(documents) else size
        while len(documents):
            room, rows = rooms.take_fullest(length)
            if not len(rows):
                per_row = size // length
                room, rows = size, np.arange(row_count, row_count - (-len(documents) // per_row))
                row_count = int(rows[-1]) + 1
            per_row = room // length
            placed = np.repeat(rows, per_row)[: len(documents)]
            row_of[documents[: len(placed)]] = placed
            documents = documents[len(placed) :]
            filled, rest = divmod(len(placed), per_row)  # rows that took per_row documents; documents in the next one
            used = -(-len(placed) // per_row)
            rooms.put(room - per_row * length, rows[:filled])
            rooms.put(room - rest * length, rows[filled:used])
            rooms.put(room, rows[used:])
    return _shuffled(row_of, row_count, seed)


class _Rooms:
    """Rows by the room that is left in them, in tokens."""

    def __init__(self) -> None:
        self.rows: dict[int, Integers] = {}
        self.sorted_rooms: list[int] = []  # the keys of `rows`

    def take_fullest(self, length: int) -> tuple[int, Integers]:
        """Remove and return the rows with the least room that is at least `length`; no rows if there are none."""
        index = bisect.bisect_left(self.sorted_rooms, length)
        if index == len(self.sorted_rooms):
            return 0, np.empty(0, np.int64)
        room = self.sorted_rooms.pop(index)
        return room, self.rows.pop(room)

    def put(self, room: int, rows: Integers) -> None:
        """Add rows with this room left; full rows are not kept."""
        if not room or not len(rows):
            return
        if room not in self.rows:
            bisect.insort(self.sorted_rooms, room)
        self.rows[room] = np.concatenate([self.rows.get(room, rows[:0]), rows])


def _shuffled(row_of: Integers, row_count: int, seed: int) -> tuple[Integers, Integers]:
    """Rows in seeded order, and documents in seeded order in each row; RandomState's stream never changes (NEP 19)."""
    random = np.random.RandomState(seed)
    place = random.permutation(row_count)[row_of]
    documents = np.lexsort((random.permutation(len(row_of)), place))
    return documents, np.r_[0, np.bincount(place, minlength=row_count).cumsum()]


def lower_bound(lengths: Any, size: int) -> int:
    """The least possible number of rows: the bound L2 of Martello and Toth (1990), over all thresholds k.

    Documents longer than size - k share a row with none of at least k. Those above half a row have one row each, and
    the room that is left in these takes part of the rest.
    """
    count = np.bincount(np.asarray(lengths, np.int64), minlength=size + 1)
    tokens = (count * np.arange(size + 1)).cumsum()
    number, half = count.cumsum(), size // 2
    k = np.arange(half + 1)
    above_half = number[size] - number[half]
    room = (number[size - k] - number[half]) * size - (tokens[size - k] - tokens[half])
    small = tokens[half] - tokens[np.maximum(k - 1, 0)]
    return int((above_half + np.maximum(0, -(-(small - room) // size))).max())
