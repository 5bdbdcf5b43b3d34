"""Which source each position of a mixture is taken from, as a pure function with random access.

The sequence is cut into blocks of ``L`` positions. How many positions of the first b blocks are each source's follows
from the shares alone: a binary tree over the sources (Huffman's, so that large shares are few splits deep) halves the
``b * L`` positions again and again, each time by rounding to the nearest whole number. A part so split never shrinks
when the whole grows, so every block has a whole, non-negative number of positions of each source, the sum is exact, and
after any number of blocks no source is two positions or more away from its exact share. Within a block a keyed
permutation mixes them. The k-th position of a source is the k-th of it in the sequence.

Pure: numpy and arithmetic only. All numbers are below 2**48, and shares sum up to at most 2**30, so that products stay
within 64 bits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Final, TypeAlias

import numpy as np

from cachefs.errors import ConfigError

from .permute import Int64s, Permutations, derive, derive_array, seed_key

MIXING_VERSION: Final = 1
"""Of the way positions are given to sources, recorded in states."""
BLOCK: Final = 256
"""L where the user asks for no other: small enough that any position costs little, and that shares hold soon."""
MOST_SHARES: Final = 2**30
MOST: Final = 2**48
_AT_ONCE: Final = 1 << 18  # positions that are mixed in one call: the arrays worked with stay small
_MIX: Final = 0x6D6978


Weight: TypeAlias = float | Fraction


def as_written(number: Weight) -> Fraction:
    """The number that a decimal fraction was written as: 0.7 is 7/10."""
    return Fraction(repr(float(number))) if isinstance(number, float) else Fraction(number)


def exact_shares(weights: Sequence[Weight]) -> tuple[int, ...]:
    """Whole numbers in the proportion of ``weights``, which need not sum up to anything.

    A decimal fraction means what is written: 0.7 and 0.3 are 7 and 3. Proportions that would take numbers beyond
    :data:`MOST_SHARES` are rounded to that sum, but no weight that is not zero to zero. Raises ``ConfigError`` unless
    each is finite and not negative and one is positive.
    """
    for weight in weights:
        real = isinstance(weight, int | float | Fraction) and not isinstance(weight, bool)
        if not real or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"weight {weight!r} is not a number from 0 on")
    exact = [as_written(weight) for weight in weights]
    total = sum(exact, Fraction(0))
    if total <= 0:
        raise ConfigError("no source has a weight above 0")
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    shared = math.gcd(*whole)
    whole = [weight // shared for weight in whole]
    return tuple(whole) if sum(whole) <= MOST_SHARES else _rounded([weight / total for weight in exact])


def _rounded(parts: list[Fraction]) -> tuple[int, ...]:
    """Parts of one as whole numbers that sum up to ``MOST_SHARES``, by largest remainders."""
    wanted = [part * MOST_SHARES for part in parts]
    out = [max(int(want), 1) if want else 0 for want in wanted]
    left = MOST_SHARES - sum(out)
    for at in sorted(range(len(parts)), key=lambda i: (int(wanted[i]) - wanted[i], i))[: max(left, 0)]:
        out[at] += 1
    if left < 0:  # what the smallest were raised by, the largest gives
        out[max(range(len(out)), key=lambda i: (out[i], -i))] += left
    return tuple(out)


def tempered(weights: Sequence[float], temperature: float) -> tuple[float, ...]:
    """Weights to the power 1/T: 1 leaves them as they are, a large T makes them alike; one that is 0 stays 0.

    To nine digits of the largest, which every machine's mathematics agree on.
    """
    valid = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not valid or not temperature > 0:
        raise ConfigError(f"temperature={temperature!r} is not a number above 0")
    most = max(weights, default=0)
    if most <= 0:
        raise ConfigError("no source has a weight above 0")
    if temperature == 1:
        return tuple(weights)
    return tuple(float(f"{(weight / most) ** (1 / temperature):.9g}") if weight else 0.0 for weight in weights)


@dataclass(frozen=True)
class Mixing:
    """The sequence of a mixture: a source for each position from 0 on. Immutable; O(sources) memory.

    ``shares``: whole numbers, their sum at most ``MOST_SHARES``; a source with 0 has no position. ``block``: L.
    """

    shares: tuple[int, ...]
    block: int
    seed: int

    def __post_init__(self) -> None:
        if not 0 < sum(self.shares) <= MOST_SHARES or min(self.shares) < 0:
            raise ConfigError("a mixture's shares are not whole numbers that can be worked with")
        if self.block < 1:
            raise ConfigError(f"blocks of {self.block} positions cannot be")

    @cached_property
    def _key(self) -> int:
        return derive(seed_key(self.seed), _MIX)

    @cached_property
    def _tree(self) -> tuple[int, list[tuple[Int64s, Int64s, Int64s, Int64s, Int64s]]]:
        """How many nodes there are, the sources first, and level by level from the root: the nodes that are split, into
        which two, the share of the first of these and of both."""
        sources = len(self.shares)
        heap = [(share, at) for at, share in enumerate(self.shares) if share]
        heapq.heapify(heap)
        parts: dict[int, tuple[int, int, int, int]] = {}
        while len(heap) > 1:
            (small, one), (large, other) = heapq.heappop(heap), heapq.heappop(heap)
            node = sources + len(parts)
            parts[node] = (one, other, small, small + large)
            heapq.heappush(heap, (small + large, node))
        levels = []
        level = [heap[0][1]]
        self.__dict__["_root"] = level[0]
        while level := [node for node in level if node in parts]:
            split = [(node, *parts[node]) for node in level]
            columns = [np.array(column, dtype=np.int64)[:, None] for column in zip(*split, strict=True)]
            levels.append((columns[0], columns[1], columns[2], columns[3], columns[4]))
            level = [child for node in level for child in parts[node][:2]]
        return sources + len(parts), levels

    def totals(self, blocks: Int64s) -> Int64s:
        """How many positions of the first ``blocks`` blocks are each source's: shape ``(len(blocks), sources)``."""
        nodes, levels = self._tree
        counts = np.zeros((nodes, len(blocks)), dtype=np.int64)
        counts[self.__dict__["_root"]] = blocks * self.block
        for node, one, other, share, both in levels:
            whole = counts[node[:, 0]]
            rounds, rest = np.divmod(whole, both)
            part = rounds * share + (2 * rest * share + both) // (2 * both)
            counts[one[:, 0]] = part
            counts[other[:, 0]] = whole - part
        return counts[: len(self.shares)].T

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Of which source each position is, and the how-manieth of that source, from 0: each int64.

        Costs O(L) for a block in which there is a position, vectorised.
        """
        source, number = np.empty_like(positions), np.empty_like(positions)
        block, place = np.divmod(positions, self.block)
        wanted, of = np.unique(block, return_inverse=True)
        step = max(1, _AT_ONCE // self.block)
        for first in range(0, len(wanted), step):
            sources, numbers = self._mixed(wanted[first : first + step])
            here = slice(None) if len(wanted) <= step else np.flatnonzero((of >= first) & (of < first + step))
            source[here] = sources[of[here] - first, place[here]]
            number[here] = numbers[of[here] - first, place[here]]
        return source, number

    def _mixed(self, blocks: Int64s) -> tuple[Int64s, Int64s]:
        """Source and number of all positions of some blocks: each of shape ``(blocks, L)``."""
        size, sources, count = self.block, len(self.shares), len(blocks)
        before = self.totals(blocks)
        here = self.totals(blocks + 1) - before
        kinds = np.arange(sources, dtype=np.int16 if sources < 2**15 else np.int64)
        sorted_sources = np.repeat(np.tile(kinds, count), here.ravel()).reshape(count, size)
        mixers = Permutations(np.full(count, size, dtype=np.int64), derive_array(self._key, blocks))
        which, place = np.repeat(np.arange(count), size), np.tile(np.arange(size, dtype=np.int64), count)
        source = np.take_along_axis(sorted_sources, mixers.apply(which, place).reshape(count, size), axis=1)
        # sorted by source, and of one source in the order of the sequence: what a stable sort gives
        order = np.argsort(source, axis=1, kind="stable")
        first = before - (
            np.cumsum(here, axis=1) - here
        )  # number of a source's first position, less its place when sorted
        numbers = np.empty((count, size), dtype=np.int64)
        ranked = np.arange(size) + np.take_along_axis(first, sorted_sources.astype(np.int64), axis=1)
        np.put_along_axis(numbers, order, ranked, axis=1)
        return source.astype(np.int64), numbers

    def taken(self, position: int) -> Int64s:
        """How many of the first ``position`` positions are each source's: shape ``(sources,)``."""
        block, rest = divmod(position, self.block)
        whole = np.array([block], dtype=np.int64)
        out: Int64s = self.totals(whole)[0]
        if rest:
            out = out + np.bincount(self._mixed(whole)[0][0, :rest], minlength=len(self.shares))
        return out

    def reached(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """After how many positions each source has had so many of them; 0 for none.

        Raises ``ConfigError`` where that is never, or beyond 2**48.
        """
        out = [0] * len(wanted)
        of = [at for at, number in enumerate(wanted) if number]
        if not of:
            return tuple(out)
        total = sum(self.shares)
        for at in of:
            if not self.shares[at] or (wanted[at] + 4) * total // self.shares[at] > MOST - 4 * self.block:
                raise ConfigError(
                    f"so small a weight that its source would not be read once in 2**48 samples: source {at}"
                )
        need = np.array([wanted[at] for at in of], dtype=np.int64)
        # no source is two positions from its share after a whole number of blocks
        low = [max(0, (wanted[at] - 2) * total // self.shares[at] // self.block - 1) for at in of]
        high = [(wanted[at] + 2) * total // self.shares[at] // self.block + 1 for at in of]
        least, most = np.array(low, dtype=np.int64), np.array(high, dtype=np.int64)
        while (most - least > 1).any():
            middle = (least + most) // 2
            enough = self.totals(middle)[np.arange(len(of)), of] >= need
            most, least = np.where(enough, middle, most), np.where(enough, least, middle)
        # the last of those wanted lies in the block behind the last count that is too low
        before = self.totals(least)[np.arange(len(of)), of]
        for at, block, rest in zip(of, least.tolist(), (need - before).tolist(), strict=True):
            source = self._mixed(np.array([block], dtype=np.int64))[0][0]
            out[at] = block * self.block + int(np.flatnonzero(source == at)[rest - 1]) + 1
        return tuple(out)
