"""Entries of one plan, in the order in which they should go: what is needed last first, and large ones before small.

To keep an entry until its next use takes ``size`` bytes for ``distance`` positions and saves one fetch. Among entries
of one size the one needed last goes first, which is optimal (Belady 1966). Among several sizes it is the one with the
largest distance times size squared: of the exponents 1, 1.5, 2 and 3 this one came closest to the flow bound over
shuffled epochs without costing more bytes. Sizes count in classes of 10 %, so that within a class the order is that of
the next use, which does not change while the reader moves on.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

_STEP = math.log(1.1)
_MOST = 512
"""Entries of a block."""

Block = list[tuple[int, str, int]]
"""Next use, name and size of entries, in this order."""


def size_class(size: int) -> int:
    return round(math.log(max(size, 1)) / _STEP)


def weight(kind: int) -> float:
    """The part of the size in a value."""
    return math.exp(2 * kind * _STEP)


@dataclass(frozen=True, slots=True)
class Ranked:
    """An entry and when it is needed, in seconds from now as the plan's pace is; ``value`` as above."""

    name: str
    size: int
    distance: float
    value: float


class Ranks:
    """The entries that one plan needs the soonest, by size class and next use.

    A class is a list of blocks: to add or to remove one costs the copy of a block, not that of all behind it. Blocks
    are replaced, never changed, so that whoever looks at them goes on with what was there when he began.
    """

    def __init__(self) -> None:
        self._classes: dict[int, list[Block]] = {}
        self.bytes = 0

    def add(self, name: str, size: int, first: int) -> None:
        entry = first, name, size
        self.bytes += size
        kind = size_class(size)
        if kind not in self._classes:
            self._classes[kind] = [[entry]]
            return
        blocks = self._classes[kind]
        at = min(bisect_left(blocks, entry, key=_greatest), len(blocks) - 1)
        block = blocks[at].copy()
        insort(block, entry)
        half = len(block) // 2
        blocks[at : at + 1] = [block] if len(block) <= _MOST else [block[:half], block[half:]]

    def remove(self, name: str, size: int, first: int) -> None:
        entry, kind = (first, name, size), size_class(size)
        blocks = self._classes[kind]
        at = bisect_left(blocks, entry, key=_greatest)
        block = blocks[at].copy()
        del block[bisect_left(block, entry)]
        blocks[at : at + 1] = [block] if block else []
        if not blocks:
            del self._classes[kind]
        self.bytes -= size

    def names(self) -> list[str]:
        """All, those needed last first as far as their sizes are alike."""
        return [name for blocks in self._classes.values() for _, name, _ in _backwards(blocks)]

    def streams(self, position: int, pace: float) -> list[Iterator[Ranked]]:
        """For each size class its entries as of now, worth least first."""
        return [_ranked(blocks.copy(), weight(kind), position, pace) for kind, blocks in self._classes.items()]


def _greatest(block: Block) -> tuple[int, str, int]:
    return block[-1]


def _backwards(blocks: list[Block]) -> Iterator[tuple[int, str, int]]:
    for block in reversed(blocks):
        yield from reversed(block)


def _ranked(blocks: list[Block], weight: float, position: int, pace: float) -> Iterator[Ranked]:
    for first, name, size in _backwards(blocks):
        distance = max(0, first - position) * pace
        yield Ranked(name, size, distance, distance * weight)
