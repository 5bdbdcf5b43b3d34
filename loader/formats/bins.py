"""Putting documents into bins of one length: which tokens of which document lie where. Pure functions of lengths.

*Best fit* (:mod:`.bestfit`) says which *lengths* are in a bin. Which document of a length goes where is free, and is
drawn anew in each epoch.

*Sequential* lays documents end to end and cuts at every multiple of the length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ..permute import derive_array
from .bestfit import Int64s, Patterns, best_fit, best_fit_of

Method: TypeAlias = Literal["best_fit", "sequential"]

_AT_ONCE = 1 << 18
"""Documents whose keys are derived at a time."""


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
