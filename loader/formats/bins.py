"""Putting documents into bins of one length: which tokens of which document lie where. Pure functions of lengths.

*Best fit* is best-fit decreasing (Johnson: "Near-optimal bin packing algorithms", 1973): pieces from the longest to the
shortest, each into the fullest bin that still has room for it. What it does depends on how many pieces there are of
each length, so it works on a histogram of lengths and on groups of bins that are filled alike: all pieces of one length
go into all bins with one amount of room in a single step. A bin's room more than halves in each step that leaves its
group whole, so the work is O(d log length) for d different lengths, whatever the number of documents. The result says
which *lengths* are in a bin; which document of a length goes where is free, and is drawn anew in each epoch.

*Sequential* lays documents end to end and cuts at every multiple of the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..permute import derive_array

Int64s: TypeAlias = npt.NDArray[np.int64]
Method: TypeAlias = Literal["best_fit", "sequential"]

_AT_ONCE = 1 << 18
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


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Bin ``b`` holds the pieces ``starts[b] .. starts[b + 1]``: piece ``p`` is the ``sizes[p]`` tokens of document
    ``docs[p]`` from its token ``firsts[p]`` on."""

    starts: Int64s
    docs: npt.NDArray[Any]
    firsts: npt.NDArray[Any]
    sizes: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        return self.starts.nbytes + self.docs.nbytes + self.firsts.nbytes + self.sizes.nbytes


@dataclass(frozen=True, eq=False)
class Bins:
    """The bins that documents of ``lengths`` tokens make.

    ``lengths`` has any integer dtype and shape ``(documents,)``; -1 is a document that could not be read, which has a
    bin to itself behind all others, without tokens. Documents of no tokens are in no bin.
    """

    lengths: npt.NDArray[Any]
    length: int
    method: Method

    @property
    def _whole(self) -> Int64s:
        """How many pieces of the full length each document has: bins of their own with best fit."""
        whole: Int64s = self._readable()
        whole //= self.length
        return whole

    @property
    def _rest(self) -> Int64s:
        rest: Int64s = self._readable()
        rest %= self.length
        return rest

    def _readable(self) -> npt.NDArray[Any]:
        """The lengths of those that could be read, of the others 0: a new array."""
        wide = np.dtype(np.int32 if np.can_cast(self.lengths.dtype, np.int32) else np.int64)
        lengths = self.lengths.astype(wide)
        return np.maximum(lengths, 0, out=lengths)

    @cached_property
    def _patterns(self) -> Patterns:
        rest = self._rest
        if len(rest) < self.length // 16:  # a histogram would have more entries than there are documents
            return best_fit_of(*np.unique(rest, return_counts=True), self.length)
        return best_fit(np.bincount(rest, minlength=self.length), self.length)

    @cached_property
    def pieces(self) -> int:
        """How many pieces all bins have; with the sequential method no more than that."""
        if self.method == "best_fit":
            cut = int(self._whole.sum(dtype=np.int64)) + np.count_nonzero(self._rest)
        else:
            cut = np.count_nonzero(self.lengths > 0) + -(-self.tokens // self.length)
        return int(cut) + len(self.unreadable)

    @property
    def layout_bytes(self) -> int:
        """The memory of a :meth:`layout`; while it is made it takes some 45 bytes for each document."""
        longest = int(self.lengths.max(initial=0))
        piece = sum(least_dtype(most).itemsize for most in (len(self.lengths), longest, self.length))
        return (self.count + 1) * 8 + self.pieces * piece

    @cached_property
    def tokens(self) -> int:
        """All tokens of all documents."""
        return int(np.maximum(self.lengths, 0).sum(dtype=np.int64))

    @cached_property
    def unreadable(self) -> Int64s:
        """The documents that could not be read."""
        return np.flatnonzero(self.lengths < 0)

    @cached_property
    def count(self) -> int:
        """The number of bins, those of unreadable documents included."""
        if self.method == "sequential":
            return -(-self.tokens // self.length) + len(self.unreadable)
        return int(self._whole.sum()) + self._patterns.bins + len(self.unreadable)

    @property
    def padding(self) -> int:
        """Tokens of padding in all bins with documents."""
        return (self.count - len(self.unreadable)) * self.length - self.tokens

    def layout(self, key: int | None = None) -> Layout:
        """Where every token lies. ``key``: another 64-bit key gives another layout with as many bins; ``None``: the
        documents in their own order, of one length the earlier ones first."""
        cut = self._sequential(key) if self.method == "sequential" else self._best_fit(key)
        bad = self.unreadable
        if not len(bad):
            return cut
        return Layout(
            np.concatenate([cut.starts, cut.starts[-1] + 1 + np.arange(len(bad))]),
            np.concatenate([cut.docs, bad.astype(cut.docs.dtype)]),
            np.concatenate([cut.firsts, np.zeros(len(bad), cut.firsts.dtype)]),
            np.concatenate([cut.sizes, np.zeros(len(bad), cut.sizes.dtype)]),
        )

    def _best_fit(self, key: int | None) -> Layout:
        whole, remains, patterns = self._whole, self._rest, self._patterns
        number, place = least_dtype(len(self.lengths)), _signed(self.pieces)
        rest = np.flatnonzero(remains).astype(number)
        rest = rest if key is None else rest[_shuffled(key, len(rest))]
        rest = rest[_by_size(remains[rest], self.length)]
        del remains
        group = np.repeat(np.arange(len(patterns.counts), dtype=place), patterns.counts)
        pieces = np.diff(patterns.starts).astype(place)[group]
        at = np.repeat(patterns.starts.astype(place)[group], pieces)
        at += within(pieces, place)
        sizes = patterns.sizes.astype(least_dtype(self.length))[at]
        del at, group
        takes = np.empty_like(rest)
        takes[_by_size(sizes, self.length)] = rest
        del rest
        long = np.flatnonzero(whole)
        docs = np.repeat(long.astype(number), whole[long])
        longest = int(self.lengths.max(initial=0))
        firsts = within(whole[long], _signed(max(self.pieces, longest)))
        firsts *= self.length
        starts = np.empty(len(docs) + len(pieces) + 1, np.int64)
        starts[: len(docs) + 1] = np.arange(len(docs) + 1)
        np.cumsum(pieces, out=starts[len(docs) + 1 :])
        starts[len(docs) + 1 :] += len(docs)
        del pieces
        after = whole[takes]
        after *= self.length
        return Layout(
            starts,
            np.concatenate([docs, takes]),
            np.concatenate([firsts, after], dtype=least_dtype(longest), casting="unsafe"),
            np.concatenate([np.full(len(docs), self.length, sizes.dtype), sizes]),
        )

    def _sequential(self, key: int | None) -> Layout:
        docs = np.flatnonzero(self.lengths > 0).astype(least_dtype(len(self.lengths)))
        docs = docs if key is None else docs[_shuffled(key, len(docs))]
        place = _signed(self.tokens)
        ends = np.cumsum(self.lengths[docs], dtype=place)
        begins = ends - self.lengths[docs]
        del ends
        cuts = np.arange(0, self.tokens, self.length, dtype=place)
        edges = np.concatenate([begins, cuts])
        edges.sort(kind="stable")
        edges = edges[np.diff(edges, prepend=place.type(-1)) > 0]
        starts = np.append(np.searchsorted(edges, cuts), len(edges))
        # each document begins at an edge, so it goes on until the next one that begins
        begun = np.searchsorted(edges, begins)
        spans = np.diff(begun, append=len(edges)).astype(place)
        del begun, cuts
        firsts = (edges - np.repeat(begins, spans)).astype(least_dtype(int(self.lengths.max(initial=0))))
        sizes = np.diff(edges, append=place.type(self.tokens)).astype(least_dtype(self.length))
        return Layout(starts, np.repeat(docs, spans), firsts, sizes)


def least_dtype(most: int) -> np.dtype[Any]:
    """The dtype for whole numbers up to ``most``."""
    return np.dtype(np.uint16 if most < 1 << 16 else np.uint32 if most < 1 << 32 else np.int64)


def _signed(most: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if most < 1 << 31 else np.int64)


def within(counts: Int64s, dtype: npt.DTypeLike = np.int64) -> Int64s:
    """0, 1, 2 ... for each of ``counts``, one after the other."""
    ends = np.cumsum(counts, dtype=dtype)
    numbers: Int64s = np.arange(int(ends[-1]) if len(ends) else 0, dtype=dtype)
    ends -= counts
    numbers -= np.repeat(ends, counts)
    return numbers


def _by_size(sizes: Int64s, length: int) -> Int64s:
    """The order of ascending sizes below ``length``, equal ones as they stand."""
    narrow = sizes.astype(np.uint16) if length <= 1 << 16 else sizes  # which numpy sorts by radix
    return np.argsort(narrow, kind="stable")


def _shuffled(key: int, n: int) -> Int64s:
    """A permutation of ``range(n)`` that follows from the key alone, on every machine."""
    keys = np.empty(n, np.uint64)
    for at in range(0, n, _AT_ONCE):  # deriving them takes some times their memory
        part = keys[at : at + _AT_ONCE]
        part[:] = derive_array(key, np.arange(at, at + len(part)))
    return np.argsort(keys, kind="stable")
