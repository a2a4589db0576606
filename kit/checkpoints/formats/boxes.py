"""Whether the parts that a checkpoint stores of a tensor are the complete tensor."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its offset in each dimension, and its size in each."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def end(self, dimension: int) -> int:
        """The index behind its last one."""
        return self.offsets[dimension] + self.sizes[dimension]


def covers(boxes: Sequence[Box], shape: tuple[int, ...]) -> bool:
    """True if every value of a tensor is in exactly one of the boxes, none of which is empty.

    Boxes inside of the tensor that hold as many values as it has, and do not overlap, cover it.
    """
    if any(not _is_inside(box, shape) for box in boxes):
        return False
    return sum(math.prod(box.sizes) for box in boxes) == math.prod(shape) and not _overlapping(boxes, len(shape))


def boxes_of_range(start: int, end: int, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes that hold the values start to end - 1 of a flattened tensor, in their order; one that is not empty.

    Those are the complete rows, and before and after them the parts of a row, which are ranges of the other dimensions.
    """
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # the complete rows
    if first > last:
        yield from _in_row(last, boxes_of_range(start - last * row, end - last * row, shape[1:]))
        return
    if start < first * row:
        yield from _in_row(first - 1, boxes_of_range(start - (first - 1) * row, row, shape[1:]))
    if first < last:
        yield Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < end:
        yield from _in_row(last, boxes_of_range(0, end - last * row, shape[1:]))


def _in_row(row: int, boxes: Iterator[Box]) -> Iterator[Box]:
    return (Box((row, *box.offsets), (1, *box.sizes)) for box in boxes)


def _is_inside(box: Box, shape: tuple[int, ...]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    return all(box.offsets[axis] >= 0 and box.end(axis) <= size for axis, size in enumerate(shape))


def _overlapping(boxes: Sequence[Box], dimensions: int) -> bool:
    """True if two boxes share a value.

    Boxes are compared with those alone that begin before and end behind their first index of one dimension, that with
    the most beginnings: of 1,000 ranks that each hold some rows or some columns, one with none instead of all pairs.
    """
    if not dimensions:
        return len(boxes) > 1
    axis = max(range(dimensions), key=lambda dimension: len({box.offsets[dimension] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        open_boxes = [other for other in open_boxes if other.end(axis) > box.offsets[axis]]
        if any(_share_a_value(box, other, dimensions) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def _share_a_value(box: Box, other: Box, dimensions: int) -> bool:
    return all(
        box.offsets[axis] < other.end(axis) and other.offsets[axis] < box.end(axis) for axis in range(dimensions)
    )
