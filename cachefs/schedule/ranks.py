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
    """The entries that one plan needs the soonest, by size class and next use."""

    def __init__(self) -> None:
        self._classes: dict[int, list[tuple[int, str, int]]] = {}
        self.bytes = 0

    def add(self, name: str, size: int, first: int) -> None:
        insort(self._classes.setdefault(size_class(size), []), (first, name, size))
        self.bytes += size

    def remove(self, name: str, size: int, first: int) -> None:
        kind = size_class(size)
        entries = self._classes[kind]
        del entries[bisect_left(entries, (first, name, size))]
        if not entries:
            del self._classes[kind]
        self.bytes -= size

    def names(self) -> list[str]:
        """All, those needed last first as far as their sizes are alike."""
        return [name for entries in self._classes.values() for _, name, _ in reversed(entries)]

    def streams(self, position: int, pace: float) -> list[Iterator[Ranked]]:
        """For each size class its entries as of now, worth least first."""
        return [_ranked(entries.copy(), weight(kind), position, pace) for kind, entries in self._classes.items()]


def _ranked(entries: list[tuple[int, str, int]], weight: float, position: int, pace: float) -> Iterator[Ranked]:
    for first, name, size in reversed(entries):
        distance = max(0, first - position) * pace
        yield Ranked(name, size, distance, distance * weight)
