"""Boxes: axis-aligned regions of a tensor. Pure arithmetic; shapes and offsets are tuples of elements.

A 0-dimensional tensor is the box of empty tuples and holds one element; a box with a 0 in its shape holds none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Elements ``[offsets, offsets + shape)`` of a tensor."""

    offsets: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def within(self, shape: Sequence[int]) -> bool:
        """Whether it lies in a tensor of this shape."""
        return len(shape) == len(self.shape) == len(self.offsets) and all(
            o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(self.offsets, self.shape, shape, strict=True)
        )

    def relative_to(self, other: Box) -> Box:
        """The same elements counted from ``other``'s first one."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """What indexes it in an array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The common elements, or ``None`` where there are none."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = tuple(min(ao + an, bo + bn) for ao, an, bo, bn in zip(a.offsets, a.shape, b.offsets, b.shape, strict=True))
    shape = tuple(e - o for o, e in zip(offsets, ends, strict=True))
    return Box(offsets, shape) if all(n > 0 for n in shape) else None


def byte_range(inner: Box, outer: Box, itemsize: int) -> tuple[int, int] | None:
    """Where ``inner`` lies in ``outer``'s bytes (C order), as ``(start, end)``; ``None`` if not in one piece."""
    local = inner.relative_to(outer)
    start, stride, free = 0, itemsize, True
    # From the last axis outwards: once an axis is taken in part, all axes outside it must be of length 1.
    for offset, length, whole in zip(
        reversed(local.offsets), reversed(local.shape), reversed(outer.shape), strict=True
    ):
        if not free and length != 1:
            return None
        if length != whole:
            free = False
        start += offset * stride
        stride *= whole
    return start, start + inner.volume * itemsize


def split(box: Box, itemsize: int, limit: int) -> list[Box]:
    """Cut a box into boxes of at most ``limit`` bytes (one element at least), each one run of its C-order bytes.

    In the order of those bytes, so their sizes add up to offsets. A box without elements gives none. The cut depends
    on nothing but the arguments: ranks with the same box cut it alike.
    """
    if box.volume == 0:
        return []
    axis, inner = 0, box.volume * itemsize
    while axis < len(box.shape) and inner > limit:
        inner //= box.shape[axis]
        axis += 1
    if axis == 0:
        return [box]
    axis -= 1  # the axis that is cut: all inside it is whole, all outside it is taken one by one
    rows = max(1, limit // inner)
    result = []
    for lead in product(*(range(n) for n in box.shape[:axis])):
        for row in range(0, box.shape[axis], rows):
            offsets = (*(o + i for o, i in zip(box.offsets, lead, strict=False)), box.offsets[axis] + row)
            shape = ((1,) * axis) + (min(rows, box.shape[axis] - row),)
            result.append(Box(offsets + box.offsets[axis + 1 :], shape + box.shape[axis + 1 :]))
    return result


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """What is wrong if distinct ``boxes`` do not cover a tensor exactly once; ``None`` if they do.

    Boxes without elements are ignored. Boxes that form a grid (every usual sharding) take O(n log n); others are
    compared pair by pair along the first axis.
    """
    solid = [b for b in boxes if b.volume]
    for box in solid:
        if not box.within(shape):
            return f"elements {span(box)} lie outside the shape {tuple(shape)}"
    if math.prod(shape) == 0:
        return None
    if not solid:
        return "no rank holds any of it"
    if not _is_grid(solid):
        overlap = _overlap(solid)
        if overlap:
            return f"elements {span(overlap[0])} and {span(overlap[1])} overlap in part"
    missing = math.prod(shape) - sum(b.volume for b in solid)
    return f"{missing} of its {math.prod(shape)} elements are on no rank" if missing else None


def span(box: Box) -> str:
    """``[0:2,4:8]``."""
    return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(box.offsets, box.shape, strict=True)) + "]"


def _is_grid(boxes: Sequence[Box]) -> bool:
    """Whether they are a full product of disjoint intervals per axis, each once: then none overlap."""
    cells = 1
    for d in range(len(boxes[0].shape)):
        intervals = sorted({(b.offsets[d], b.shape[d]) for b in boxes})
        if any(o + n > after for (o, n), (after, _) in pairwise(intervals)):
            return False
        cells *= len(intervals)
    return cells == len(boxes) == len(set(boxes))


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    active: list[Box] = []
    for box in sorted(boxes):
        if not box.shape:
            return (boxes[0], boxes[1]) if len(boxes) > 1 else None
        active = [a for a in active if a.offsets[0] + a.shape[0] > box.offsets[0]]
        for other in active:
            if intersect(other, box):
                return other, box
        active.append(box)
    return None


class Placement(NamedTuple):
    """How one axis of a device mesh lays out a tensor: ``axis`` is sharded, or ``None``: replicated.

    ``split_factor > 1``: the tensor's axis is (or will be) cut by an inner mesh axis into that many pieces first, and
    this one takes its share of each (torch's ``_StridedShard``).
    """

    axis: int | None
    split_factor: int = 1


def shard(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> Box | None:
    """The part of a tensor that a DTensor keeps at one place of a mesh; ``None`` if it is not one box.

    Mesh axes cut from left to right as ``torch.chunk`` does: pieces of ``ceil(n / k)`` rows, the last ones shorter or
    empty. That is DTensor's rule (https://docs.pytorch.org/docs/stable/distributed.tensor.html).
    """
    held: list[Sequence[int]] = [range(n) for n in shape]
    for size, place, placement in zip(mesh, coordinate, placements, strict=True):
        if placement.axis is not None:
            held[placement.axis] = _share(held[placement.axis], size, place, placement.split_factor)
    if any(len(rows) and rows[-1] - rows[0] + 1 != len(rows) for rows in held):
        return None
    offsets = tuple(rows[0] if len(rows) else whole for rows, whole in zip(held, shape, strict=True))
    return Box(offsets, tuple(map(len, held)))


def _share(rows: Sequence[int], pieces: int, index: int, split_factor: int) -> Sequence[int]:
    """The ``index``-th of ``pieces`` shares of some rows; of each of ``split_factor`` blocks of them, joined."""
    if split_factor == 1:
        return _chunk(rows, pieces, index)
    blocks = (_chunk(rows, split_factor, i) for i in range(split_factor))
    return [row for block in blocks for row in _chunk(block, pieces, index)]


def _chunk(rows: Sequence[int], pieces: int, index: int) -> Sequence[int]:
    size = -(-len(rows) // pieces)
    return rows[index * size : (index + 1) * size]
