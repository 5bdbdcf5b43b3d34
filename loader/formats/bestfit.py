"""Best-fit decreasing (Johnson: "Near-optimal bin packing algorithms", 1973): pieces from the longest to the shortest,
each into the fullest bin that still has room for it.

What it does depends on how many pieces there are of each length, so it works on a histogram of lengths and on groups of
bins that are filled alike: all pieces of one length go into all bins with one amount of room in a single step. A bin's
room more than halves in each step that leaves its group whole, so the work is O(d log length) for d different lengths,
whatever the number of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

_WORD = 10
"""Bits of a level that number it within its word: a set of levels is a set of words, each a Python integer."""


@dataclass(frozen=True, slots=True, eq=False)
class Patterns:
    """Bins by what they are filled with: ``counts[g]`` bins hold pieces of the sizes ``sizes[starts[g]:starts[g + 1]]``
    each, in this order. int64 arrays of shapes ``(groups,)``, ``(groups + 1,)`` and ``(starts[-1],)``."""

    counts: Int64s
    starts: Int64s
    sizes: Int64s

    @property
    def bins(self) -> int:
        return int(self.counts.sum())


def best_fit(histogram: Int64s, length: int) -> Patterns:
    """Best-fit decreasing of ``histogram[s]`` pieces of every size ``0 < s < length``; ``histogram`` has ``length``
    entries, of which the first does not count."""
    present = np.flatnonzero(histogram)
    return best_fit_of(present, histogram[present], length)


def best_fit_of(different: Int64s, numbers: Int64s, length: int) -> Patterns:
    """The same of ``numbers[k]`` pieces of each size ``different[k]``, which ascend."""
    room: dict[int, list[_Group]] = {}  # the bins by what is left of them
    levels = _Levels()
    for size, left in zip(different[::-1].tolist(), numbers[::-1].tolist(), strict=True):
        if size == 0:
            continue
        while left:
            level = levels.least(size)
            if level < 0:
                _open(room, levels, length, size, left)
                break
            groups = room.pop(level)
            levels.remove(level)
            left = _fill(room, levels, level, groups, size, left)
    groups = [group for level in sorted(room) for group in room[level]]
    contents = [group.sizes() for group in groups]
    return Patterns(
        np.array([group.count for group in groups], dtype=np.int64),
        np.cumsum([0, *map(len, contents)], dtype=np.int64),
        np.array([size for content in contents for size in content], dtype=np.int64),
    )


class _Group:
    """``count`` bins that are filled alike: what they held before, and ``each`` pieces of ``size`` more."""

    __slots__ = ("before", "count", "each", "size")

    def __init__(self, count: int, before: _Group | None, size: int, each: int) -> None:
        self.count = count
        self.before = before
        self.size = size
        self.each = each

    def sizes(self) -> list[int]:
        parts: list[_Group] = []
        group: _Group | None = self
        while group is not None:
            parts.append(group)
            group = group.before
        return [size for part in reversed(parts) for size in [part.size] * part.each]


def _open(room: dict[int, list[_Group]], levels: _Levels, length: int, size: int, left: int) -> None:
    """New bins for pieces that fit into none."""
    each = length // size
    whole, rest = divmod(left, each)
    if whole:
        _put(room, levels, length - each * size, _Group(whole, None, size, each))
    if rest:
        _put(room, levels, length - rest * size, _Group(1, None, size, rest))


def _fill(
    room: dict[int, list[_Group]], levels: _Levels, level: int, groups: list[_Group], size: int, left: int
) -> int:
    """Put pieces into the bins of one level, as many into each as fit; returns how many are left.

    The first piece put into a bin leaves it less room than the other bins that the piece fits have, so the next one
    goes into the same bin, until none fits there."""
    each = level // size
    for group in groups:
        whole = min(group.count, left // each)
        if whole:
            _put(room, levels, level - each * size, _Group(whole, group, size, each))
        left -= whole * each
        others = group.count - whole
        if others and left:  # fewer than fill one of these
            _put(room, levels, level - left * size, _Group(1, group, size, left))
            left, others = 0, others - 1
        if others:
            group.count = others
            _put(room, levels, level, group)
    return left


def _put(room: dict[int, list[_Group]], levels: _Levels, level: int, group: _Group) -> None:
    room.setdefault(level, []).append(group)
    levels.add(level)


class _Levels:
    """A set of whole numbers that finds the least one from some number on."""

    def __init__(self) -> None:
        self._words: dict[int, int] = {}
        self._used = 0

    def add(self, level: int) -> None:
        word = level >> _WORD
        self._words[word] = self._words.get(word, 0) | 1 << (level & (1 << _WORD) - 1)
        self._used |= 1 << word

    def remove(self, level: int) -> None:
        word = level >> _WORD
        self._words[word] &= ~(1 << (level & (1 << _WORD) - 1))
        if not self._words[word]:
            self._used &= ~(1 << word)

    def least(self, least: int) -> int:
        """The least member that is not below ``least``; -1 without one."""
        word = least >> _WORD
        within = self._words.get(word, 0) >> (least & (1 << _WORD) - 1)
        if within:
            return least + _lowest(within)
        above = self._used >> (word + 1)
        if not above:
            return -1
        word += 1 + _lowest(above)
        return (word << _WORD) + _lowest(self._words[word])


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
