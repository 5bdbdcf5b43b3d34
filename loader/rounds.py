"""How the lanes are read in turn: positions of the one sequence <-> (lane, offset in the lane), without walking it.

An epoch is read in rounds: round r takes sample r of every lane that has more than r samples, in the order of the
lanes' numbers. Between two neighbouring lane lengths the set of lanes left is constant, so the sequence falls into at
most as many *stretches* as there are different lengths, and inside one a position is a division away from its round.

The k-th lane still left, where lanes have dropped out, is a "k-th smallest in a prefix" query over the lanes sorted by
length. A wavelet matrix (Claude, Navarro, Ordóñez: "The wavelet matrix", 2015) answers it in O(log lanes) and in
O(lanes log lanes) memory, for whole arrays of queries.
"""

from __future__ import annotations

import numpy as np

from .permute import Bools, Int64s


class Rounds:
    """The sequence over lanes of the given lengths. Immutable. ``total`` is the number of positions."""

    def __init__(self, lengths: Int64s) -> None:
        lanes = len(lengths)
        longest = int(lengths.max(initial=0))
        floors = np.unique(np.concatenate((np.zeros(1, dtype=np.int64), lengths)))
        floors = floors[floors < longest]
        left = lanes - np.searchsorted(np.sort(lengths), floors, side="right").astype(np.int64)
        starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(left * np.diff(floors, append=longest))))
        self.lengths = lengths
        self.total = int(starts[-1])
        self._floors = floors  # first round of each stretch
        self._left = left  # lanes left in each stretch
        self._starts = starts[:-1]  # first position of each stretch
        self._survivors = _WaveletMatrix(np.argsort(-lengths, kind="stable").astype(np.int64))

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Lane and offset in the lane of each position; positions must lie in ``range(total)``."""
        stretch = np.searchsorted(self._starts, positions, side="right") - 1
        left = self._left[stretch]
        rounds, nth = np.divmod(positions - self._starts[stretch], left)
        rounds += self._floors[stretch]
        gone = np.flatnonzero(left < len(self.lengths))
        if gone.size:
            nth[gone] = self._survivors.kth(left[gone], nth[gone])
        return nth, rounds

    def position(self, lanes: Int64s, offsets: Int64s) -> Int64s:
        """The position of each (lane, offset), the inverse of :meth:`locate`; offsets must lie inside their lanes."""
        stretch = np.searchsorted(self._floors, offsets, side="right") - 1
        left = self._left[stretch]
        before = self._survivors.rank(left, lanes)
        out: Int64s = self._starts[stretch] + left * (offsets - self._floors[stretch]) + before
        return out

    def turns(self, position: int) -> tuple[int, int]:
        """``(end, lanes)``: from ``position`` to before ``end`` so many lanes take turns, always the same ones."""
        stretch = int(np.searchsorted(self._starts, position, side="right")) - 1
        end = int(self._starts[stretch + 1]) if stretch + 1 < len(self._starts) else self.total
        return end, int(self._left[stretch])

    def taken(self, position: int) -> Int64s:
        """How many samples of each lane lie before ``position`` (0 <= position <= total), shape ``(lanes,)``."""
        if position >= self.total:
            return self.lengths.copy()
        lane, offset = self.locate(np.array([position], dtype=np.int64))
        rounds = np.full(len(self.lengths), offset[0], dtype=np.int64)
        rounds[: lane[0]] += 1
        return np.minimum(self.lengths, rounds)


class _WaveletMatrix:
    """k-th smallest, and rank, among the first n entries of a permutation of ``range(m)``."""

    def __init__(self, values: Int64s) -> None:
        self._levels: list[tuple[int, Int64s]] = []  # (bit, zeros before each place) from the highest bit down
        for bit in reversed(range(max(len(values) - 1, 0).bit_length())):
            ones = (values >> bit) & 1
            zeros = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(1 - ones)))
            self._levels.append((bit, zeros))
            values = np.concatenate((values[ones == 0], values[ones == 1]))

    def kth(self, n: Int64s, k: Int64s) -> Int64s:
        """The k-th smallest (from 0) of the first n entries, for arrays of n and k < n."""
        low, high, k = np.zeros_like(n), n, k.copy()
        out = np.zeros_like(n)
        for bit, zeros in self._levels:
            below = zeros[high] - zeros[low]
            one = k >= below
            k -= np.where(one, below, 0)
            out |= one.astype(np.int64) << bit
            low, high = self._down(zeros, low, high, one)
        return out

    def rank(self, n: Int64s, value: Int64s) -> Int64s:
        """How many of the first n entries are smaller than value, for arrays of n and value."""
        low, high = np.zeros_like(n), n
        out = np.zeros_like(n)
        for bit, zeros in self._levels:
            one = (value >> bit) & 1 == 1
            out += np.where(one, zeros[high] - zeros[low], 0)
            low, high = self._down(zeros, low, high, one)
        return out

    @staticmethod
    def _down(zeros: Int64s, low: Int64s, high: Int64s, one: Bools) -> tuple[Int64s, Int64s]:
        """The range's image in the next level: entries with a zero bit come first there, then those with a one."""
        all_zeros = zeros[-1]
        return (
            np.where(one, all_zeros + low - zeros[low], zeros[low]),
            np.where(one, all_zeros + high - zeros[high], zeros[high]),
        )
