"""The order of one epoch as a function: which sample is at which position of the one global sequence.

In each epoch a lane's pieces are permuted and grouped into blocks of 1, 2, 4, ... up to K pieces and then K each; a
block's samples are permuted by a keyed bijection; the lanes are read in turn (``loader.rounds``). Nothing is walked and
nothing but the lanes is stored, so any position of any epoch costs the same. ``loader.batches`` cuts the sequence.

Pure: numpy and arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from cachefs.errors import ConfigError, CountsUnknown, DataError

from .lanes import LanePlan
from .permute import Int64s, Permutations, derive, derive_array, seed_key
from .rounds import Rounds

DEFAULT_BLOCK_SHARDS: Final = 8
"""K where the user names none: shards of a lane that are shuffled together, hence that are open at once."""

_PIECES: Final = 3
_SAMPLES: Final = 4


@dataclass(frozen=True, eq=False)
class Uses:
    """When shards are needed: parallel arrays sorted by ``first``, one entry per shard.

    No sample of ``shard[i]`` lies before position ``first[i]`` (of those still to come) or after ``last[i]``. Both are
    tight to a block, not to a sample.
    """

    shard: Int64s
    first: Int64s
    last: Int64s


class EpochOrder:
    """The order of one epoch: ``total`` positions, each one sample. Immutable; picklable; O(shards + lanes) memory.

    Where a plan lacks counts (``plan.complete`` is false) only the first ``settled`` positions are known, and they are
    the same as with all counts; ``total`` then raises CountsUnknown and :meth:`unsettled` names the shards to count
    next.
    """

    def __init__(self, plan: LanePlan, *, seed: int, epoch: int, block_shards: int, shuffle: bool) -> None:
        if plan.shuffle != shuffle:
            raise ConfigError(f"the lanes were planned for shuffle={plan.shuffle}, not for shuffle={shuffle}")
        if block_shards < 1:
            raise ConfigError(f"block_shards={block_shards} must be at least 1")
        if epoch < 0:
            raise ConfigError(f"epoch {epoch} is negative")
        self.plan = plan
        self.seed = seed
        self.epoch = epoch
        self.block_shards = block_shards
        self.shuffle = shuffle
        key = derive(seed_key(seed), epoch)
        # in the data set's own order shards follow one another: a block each
        pieces = _arrange(plan, derive(key, _PIECES), block_shards if shuffle else 1, shuffle=shuffle)
        lengths, self._missing = pieces.stop - pieces.start, np.zeros(0, dtype=np.int64)
        if not plan.complete:
            lengths, self._missing = _known(pieces)
        # "places" number all samples lane after lane, in the order in which a lane's pieces come
        ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        self._piece_shard = pieces.shard
        self._piece_first = pieces.start
        self._piece_start = ends[:-1]
        self._block_lane = pieces.lane[pieces.opening]
        self._block_start = ends[pieces.opening]
        self._block_pieces = np.append(pieces.opening, len(pieces.shard))
        self._lane_start = ends[plan.bounds]
        self._lane_block = np.searchsorted(self._block_lane, np.arange(plan.lanes + 1)).astype(np.int64)
        self._rounds = Rounds(np.diff(self._lane_start))
        self._mixers = Permutations(
            np.diff(self._block_start, append=ends[-1]),
            derive_array(derive(key, _SAMPLES), self._block_lane, pieces.number[pieces.opening]),
        )
        self.settled = self._rounds.total
        if self._missing.size:
            lanes_open = np.unique(pieces.lane[self._missing])
            sure = int(self._rounds.lengths[lanes_open].min())
            self.settled = int(np.minimum(self._rounds.lengths, sure).sum())

    def __reduce__(self) -> tuple[object, ...]:
        return _epoch_order, (self.plan, self.seed, self.epoch, self.block_shards, self.shuffle)

    @property
    def complete(self) -> bool:
        """Whether all positions of the epoch are settled."""
        return not self._missing.size

    @property
    def total(self) -> int:
        """Samples in the epoch. Raises CountsUnknown unless :attr:`complete`."""
        if not self.complete:
            unknown = int((self.plan.stop < 0).sum())
            raise CountsUnknown(
                f"{unknown} of {len(self.plan.stop)} shards are not counted yet, so there is no length",
                hint="index the data set",
            )
        return self.settled

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The samples at global positions, any of them in any order: (shard, index in the shard), each int64.

        Costs O(log) each, vectorised: many positions in one call (several batches) cost little more than one. Raises
        DataError for a position that is not in the epoch or, with counts missing, not settled.
        """
        positions = self._checked(positions)
        lane, offset = self._rounds.locate(positions)
        place = self._lane_start[lane] + offset
        if self.shuffle:
            block = np.searchsorted(self._block_start, place, side="right") - 1
            start = self._block_start[block]
            place = start + self._mixers.apply(block, place - start)
        piece = np.searchsorted(self._piece_start, place, side="right") - 1
        index = self._piece_first[piece] + (place - self._piece_start[piece])
        return self._piece_shard[piece], index

    def lane_of(self, positions: Int64s) -> Int64s:
        """The lane that each global position is taken from."""
        return self._rounds.locate(self._checked(positions))[0]

    def cursors(self, position: int) -> tuple[int, Int64s, Int64s]:
        """Where each lane stands when ``position`` samples have been taken: (next lane, block, offset in the block).

        The block is the one that the lane's last sample came from and the offset counts the samples taken of it, so
        cursors never depend on what lies ahead; a lane not begun stands at (0, 0). The next lane at the epoch's end is
        0. Raises DataError for a position beyond the epoch, or one at which missing counts leave the next lane open.
        """
        if not 0 <= position <= self.settled or (position == self.settled and not self.complete):
            raise DataError(f"position {position} is not among the {self.settled} known ones of epoch {self.epoch}")
        taken = self._rounds.taken(position)
        place = self._lane_start[:-1] + taken
        block = np.searchsorted(self._block_start, place - 1, side="right") - 1
        begun = taken > 0
        next_lane = 0
        if position < self.settled:
            next_lane = int(self._rounds.locate(np.array([position], dtype=np.int64))[0][0])
        return (
            next_lane,
            np.where(begun, block - self._lane_block[:-1], 0),
            np.where(begun, place - self._block_start[block], 0),
        )

    def uses_from(self, position: int, lanes: Int64s | None = None) -> Uses:
        """Which shards are needed from ``position`` on, and when; ``lanes`` limits it to those lanes (a node's own).

        With counts missing, places beyond ``settled`` are lower bounds, and shards of blocks that lack a count are left
        out (see :meth:`unsettled`).
        """
        lane = self._block_lane
        begin = self._block_start - self._lane_start[lane]
        end = np.append(self._block_start[1:], self._lane_start[-1]) - self._lane_start[lane]
        begin = np.maximum(begin, self._rounds.taken(position)[lane])
        wanted = begin < end
        if lanes is not None:
            wanted &= np.isin(lane, lanes)
        block = np.flatnonzero(wanted)
        lane, begin, end = lane[block], begin[block], end[block]
        first, last = self._rounds.position(lane, begin), self._rounds.position(lane, end - 1)
        spread = np.diff(self._block_pieces)[block]
        piece = np.repeat(self._block_pieces[block] - np.cumsum(spread) + spread, spread) + np.arange(spread.sum())
        sizes = np.diff(self._piece_start, append=self._lane_start[-1])[piece]
        full = sizes > 0
        return _merged(self._piece_shard[piece][full], np.repeat(first, spread)[full], np.repeat(last, spread)[full])

    def shards_from(self, position: int, lanes: Int64s | None = None) -> Iterator[tuple[int, int]]:
        """(shard, first position) in the order of first use from ``position`` on: what to prefetch next."""
        uses = self.uses_from(position, lanes)
        return zip(uses.shard.tolist(), uses.first.tolist(), strict=True)

    def unsettled(self) -> Int64s:
        """Shards, sorted, whose counts would settle more positions; empty when all are settled."""
        return np.unique(self._piece_shard[self._missing])

    def _checked(self, positions: Int64s) -> Int64s:
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not (positions.min() >= 0 and positions.max() < self.settled):
            worst = positions.max() if positions.max() >= self.settled else positions.min()
            raise DataError(f"position {worst} is not among the {self.settled} known ones of epoch {self.epoch}")
        return positions


def _epoch_order(plan: LanePlan, seed: int, epoch: int, block_shards: int, shuffle: bool) -> EpochOrder:
    return EpochOrder(plan, seed=seed, epoch=epoch, block_shards=block_shards, shuffle=shuffle)


@dataclass(frozen=True, eq=False)
class _Pieces:
    """An epoch's pieces, lane after lane and in the order in which they come; ``opening``: those that open a block.

    ``block`` numbers the blocks of all lanes together, ``number`` those of each lane from 0.
    """

    shard: Int64s
    start: Int64s
    stop: Int64s
    lane: Int64s
    block: Int64s
    number: Int64s
    opening: Int64s


def _arrange(plan: LanePlan, key: int, limit: int, *, shuffle: bool) -> _Pieces:
    """Each lane's pieces in an order drawn from the key, grouped 1, 2, 4, ... up to ``limit``, then ``limit`` each."""
    lane = np.repeat(np.arange(plan.lanes, dtype=np.int64), np.diff(plan.bounds))
    shard, start, stop = plan.shard, plan.start, plan.stop
    if shuffle:
        drawn = np.lexsort((derive_array(key, shard, start), lane))
        shard, start, stop = shard[drawn], start[drawn], stop[drawn]
    nth = np.arange(len(shard), dtype=np.int64) - plan.bounds[lane]
    edges, size, last = [0], 1, int(nth.max())
    while edges[-1] <= last:
        edges.append(edges[-1] + min(size, limit))
        size = min(2 * size, limit)
    bounds = np.array(edges, dtype=np.int64)
    number = np.searchsorted(bounds, nth, side="right").astype(np.int64) - 1
    opens = nth == bounds[number]
    return _Pieces(shard, start, stop, lane, np.cumsum(opens) - 1, number, np.flatnonzero(opens))


def _known(pieces: _Pieces) -> tuple[Int64s, Int64s]:
    """Lengths with each lane cut off before its first block that lacks a count, and the pieces those blocks lack."""
    unknown = pieces.stop < 0
    first = np.full(int(pieces.lane[-1]) + 1, len(pieces.shard), dtype=np.int64)
    np.minimum.at(first, pieces.lane[unknown], pieces.block[unknown])
    first = first[pieces.lane]
    lengths = np.where(pieces.block < first, pieces.stop - pieces.start, 0)
    return lengths, np.flatnonzero(unknown & (pieces.block == first))


def _merged(shard: Int64s, first: Int64s, last: Int64s) -> Uses:
    """One entry per shard, for shards that are cut into several lanes' pieces."""
    order = np.lexsort((first, shard))
    shard, first, last = shard[order], first[order], last[order]
    heads = np.flatnonzero(np.diff(shard, prepend=-1))
    if heads.size < shard.size:
        last = np.maximum.reduceat(last, heads)
        shard, first = shard[heads], first[heads]
    order = np.lexsort((shard, first))
    return Uses(shard[order], first[order], last[order])
