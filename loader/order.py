"""The order of one epoch as a function: which sample is at which position of the one global sequence.

In each epoch a lane's pieces are permuted and grouped into blocks of 1, 2, 4, ... up to K pieces and then K each; a
block's samples are permuted by a keyed bijection; the lanes are read in turn (``loader.rounds``). Nothing is walked and
nothing but the lanes is stored, so any position of any epoch costs the same. ``loader.batches`` cuts the sequence.

Pure: numpy and arithmetic only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from cachefs.errors import ConfigError, CountsUnknown, DataError

from .anchors import Anchor, anchored
from .lanes import LanePlan
from .permute import Int64s, Permutations, derive, derive_array, seed_key
from .pieces import Pieces, Uses, arrange, known_lengths, merged_uses
from .rounds import Rounds

DEFAULT_BLOCK_SHARDS: Final = 8
"""K where the user names none: shards of a lane that are shuffled together, hence that are open at once."""

_LEAST_COUNTED: Final = 16
"""Shards that are counted ahead at least, over all lanes."""
_PIECES: Final = 3
_SAMPLES: Final = 4


class EpochOrder:
    """The order of one epoch: ``total`` positions, each one sample. Immutable; picklable; O(shards + lanes) memory.

    Where a plan lacks counts (``plan.complete`` is false) only the first ``settled`` positions are known, and they are
    the same as with all counts; ``total`` then raises CountsUnknown and :meth:`unsettled` names the shards to count
    next. With an ``anchor`` (where a state left off) the counts of what is used up are not needed, and positions before
    ``floor`` cannot be asked for.
    """

    def __init__(
        self,
        plan: LanePlan,
        *,
        seed: int,
        epoch: int,
        block_shards: int,
        shuffle: bool,
        anchor: Anchor | None = None,
        like: EpochOrder | None = None,
    ) -> None:
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
        self.anchor = anchor
        self.floor = 0 if anchor is None else anchor.position
        key = derive(seed_key(seed), epoch)
        if like is None:
            # in the data set's own order shards follow one another: a block each
            pieces = arrange(plan, derive(key, _PIECES), block_shards if shuffle else 1, shuffle=shuffle)
        else:
            pieces = replace(like._drawn, stop=plan.stop[like._drawn.drawn])
        self._drawn: Pieces = pieces
        if anchor is not None:
            pieces = anchored(pieces, anchor)
        self._unknown = pieces.stop < 0
        lengths, self._missing = pieces.stop - pieces.start, np.zeros(0, dtype=np.int64)
        if self._unknown.any():
            lengths, self._missing = known_lengths(pieces, plan.lanes)
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
            known = self._rounds.lengths[pieces.lane[self._missing]]
            self._blocking = self._missing[known == known.min()]
            self.settled = int(np.minimum(self._rounds.lengths, known.min()).sum())

    def __reduce__(self) -> tuple[object, ...]:
        return _epoch_order, (self.plan, self.seed, self.epoch, self.block_shards, self.shuffle, self.anchor)

    def with_counts(self, counts: Int64s) -> EpochOrder:
        """The same order with more counts known: cheaper than a new one."""
        plan, blocks = self.plan.with_counts(counts), self.block_shards
        return EpochOrder(
            plan,
            seed=self.seed,
            epoch=self.epoch,
            block_shards=blocks,
            shuffle=self.shuffle,
            anchor=self.anchor,
            like=self,
        )

    @property
    def complete(self) -> bool:
        """Whether all positions of the epoch are settled."""
        return not self._missing.size

    @property
    def total(self) -> int:
        """Samples in the epoch. Raises CountsUnknown unless :attr:`complete`."""
        if not self.complete:
            unknown = int(self._unknown.sum())
            raise CountsUnknown(
                f"{unknown} of {len(self.plan.stop)} shards are not counted yet, so there is no length",
                hint="index the data set: count()",
            )
        return self.settled

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The samples at global positions, any of them in any order: (shard, index in the shard), each int64.

        Costs O(log) each, vectorised: many positions in one call (several batches) cost little more than one. Raises
        DataError for a position that is not in the epoch or, with counts missing, not settled.
        """
        positions = self._checked(positions)
        place = positions
        if len(self._rounds.lengths) > 1:
            lane, offset = self._rounds.locate(positions)
            place = self._lane_start[lane] + offset
        if self.shuffle:
            place = self._mixed(place, np.searchsorted(self._block_start, place, side="right") - 1)
        if place.size:
            first, last = (np.searchsorted(self._piece_start, (place.min(), place.max()), side="right") - 1).tolist()
            if first == last:  # as is usual for neighbours that are not shuffled
                index = place + (self._piece_first[first] - self._piece_start[first])
                return np.full_like(place, self._piece_shard[first]), index
        piece = np.searchsorted(self._piece_start, place, side="right") - 1
        index = self._piece_first[piece] + (place - self._piece_start[piece])
        return self._piece_shard[piece], index

    def neighbours(self, position: int, count: int) -> tuple[int, int] | None:
        """Shard and index of the sample at ``position``, where those at so many positions from there on follow it in
        the same shard, and that is plain to see; else ``None``."""
        if self.shuffle or self.plan.lanes > 1 or not self.floor <= position <= self.settled - count:
            return None
        piece = int(np.searchsorted(self._piece_start, position, side="right")) - 1
        within = position - int(self._piece_start[piece])
        if piece + 1 < len(self._piece_start) and position + count > int(self._piece_start[piece + 1]):
            return None
        return int(self._piece_shard[piece]), int(self._piece_first[piece]) + within

    def _mixed(self, place: Int64s, block: Int64s) -> Int64s:
        """Places, each in its block, as the block's permutation moves them."""
        start = self._block_start[block]
        out: Int64s = start + self._mixers.apply(block, place - start)
        return out

    def lane_of(self, positions: Int64s) -> Int64s:
        """The lane that each global position is taken from."""
        return self._rounds.locate(self._checked(positions))[0]

    def turns(self, position: int) -> tuple[int, int]:
        """``(end, lanes)``: from ``position`` to before ``end`` so many lanes take turns, always the same ones."""
        self._checked(np.array([position], dtype=np.int64))
        return self._rounds.turns(position)

    def cursors(self, position: int) -> tuple[int, Int64s, Int64s]:
        """Where each lane stands when ``position`` samples have been taken: (next lane, block, offset in the block).

        The block is the one that the lane's last sample came from and the offset counts the samples taken of it, so
        cursors never depend on what lies ahead; a lane not begun stands at (0, 0). The next lane at the epoch's end is
        0. Raises DataError for a position beyond the epoch, or one at which missing counts leave the next lane open.
        """
        if not self.floor <= position <= self.settled or (position == self.settled and not self.complete):
            raise DataError(f"position {position} is not among the {self.settled} known ones of epoch {self.epoch}")
        taken, block = self.stand(position)
        place = self._lane_start[:-1] + taken
        begun = taken > 0
        next_lane = 0
        if position < self.settled:
            next_lane = int(self._rounds.locate(np.array([position], dtype=np.int64))[0][0])
        return (
            next_lane,
            np.where(begun, block - self._lane_block[:-1], 0),
            np.where(begun, place - self._block_start[block], 0),
        )

    def stand(self, position: int) -> tuple[Int64s, Int64s]:
        """Samples taken of each lane, and the block (numbered over all lanes) of its last one; of the lane before it
        where there is none."""
        taken = self._rounds.taken(position)
        return taken, np.searchsorted(self._block_start, self._lane_start[:-1] + taken - 1, side="right") - 1

    def anchor_at(self, position: int) -> Anchor:
        """What a state has to say of the counts up to ``position``, so that it can go on from there without them.

        Raises what :meth:`cursors` raises.
        """
        _, blocks, offsets = self.cursors(position)
        _, block = self.stand(position)
        lengths = np.diff(self._piece_start, append=self._lane_start[-1])
        before, counts = [], []
        for lane, of in enumerate(block.tolist()):
            begun = offsets[lane] > 0
            own = slice(int(self._block_pieces[of]), int(self._block_pieces[of + 1])) if begun else slice(0)
            counts.append(tuple(lengths[own].tolist()))
            before.append(int(self._block_start[of] - self._lane_start[lane]) if begun else 0)
        return Anchor(position, tuple(blocks.tolist()), tuple(before), tuple(counts))

    def told(self) -> dict[int, int]:
        """The counts of shards that the anchor tells."""
        out: dict[int, int] = {}
        if self.anchor is not None:
            for lane, (block, counts) in enumerate(zip(self.anchor.blocks, self.anchor.counts, strict=True)):
                first = int(self._block_pieces[self._lane_block[lane] + block]) if counts else 0
                out |= zip(self._piece_shard[first : first + len(counts)].tolist(), counts, strict=True)
        return out

    def used_up(self, position: int, most: int = 1 << 22) -> Int64s:
        """Shards, sorted, of the blocks being read at ``position`` that have no sample left in them.

        None where the blocks have more than ``most`` samples, each of which is looked at.
        """
        taken, block = self.stand(position)
        block, begin = block[taken > 0], (self._lane_start[:-1] + taken)[taken > 0]
        end = np.append(self._block_start, self._lane_start[-1])[block + 1]
        if int((end - begin).sum()) > most:
            return np.zeros(0, dtype=np.int64)
        left = [np.arange(b, e, dtype=np.int64) for b, e in zip(begin.tolist(), end.tolist(), strict=True)]
        places = np.concatenate([*left, np.zeros(0, dtype=np.int64)])
        if self.shuffle:
            places = self._mixed(places, np.repeat(block, [len(part) for part in left]))
        piece = np.searchsorted(self._piece_start, places, side="right") - 1
        first, last = self._block_pieces[block].tolist(), self._block_pieces[block + 1].tolist()
        pieces = np.concatenate([np.zeros(0, np.int64), *(np.arange(a, b) for a, b in zip(first, last, strict=True))])
        return np.setdiff1d(self._piece_shard[pieces], self._piece_shard[piece])

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
        return merged_uses(
            self._piece_shard[piece][full], np.repeat(first, spread)[full], np.repeat(last, spread)[full]
        )

    def shards_from(self, position: int, lanes: Int64s | None = None) -> Iterator[tuple[int, int]]:
        """(shard, first position) in the order of first use from ``position`` on: what to prefetch next."""
        uses = self.uses_from(position, lanes)
        return zip(uses.shard.tolist(), uses.first.tolist(), strict=True)

    def unsettled(self) -> Int64s:
        """Shards, sorted, whose counts would settle more positions; empty when all are settled."""
        return np.unique(self._piece_shard[self._missing])

    def blocking(self) -> Int64s:
        """Those of :meth:`unsettled` without which nothing more can be settled, in order of their numbers."""
        return np.unique(self._piece_shard[self._blocking]) if self._missing.size else self._missing

    def to_count(self, position: int, sizes: Int64s) -> Int64s:
        """Shards without a count that will be needed soon after ``position``, in about the order of their first use.

        Those of the block that a lane is in and of the next one (and some more where these are few). How far a lane has
        come before a block is guessed from ``sizes``, the shards' bytes in listing order.
        """
        pieces = self._drawn
        taken, block = self.stand(min(position, self._rounds.total))
        block = np.where(taken > 0, block, self._lane_block[:-1])
        after = np.append(self._block_pieces, self._block_pieces[-1])
        reach = np.minimum(block + 2, np.maximum(self._lane_block[1:], self._lane_block[:-1]))
        until = np.maximum(after[reach], after[block] + -(-_LEAST_COUNTED // self.plan.lanes))
        number = np.arange(len(pieces.shard), dtype=np.int64)
        wanted = np.flatnonzero(self._unknown & (number < until[pieces.lane]))
        before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(sizes[pieces.shard])))
        opening = pieces.opening[pieces.block[wanted]]
        guess = before[opening] - before[self.plan.bounds[pieces.lane[wanted]]]
        return self._piece_shard[wanted[np.argsort(guess, kind="stable")]]

    def _checked(self, positions: Int64s) -> Int64s:
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and not (positions.min() >= self.floor and positions.max() < self.settled):
            worst = positions.max() if positions.max() >= self.settled else positions.min()
            raise DataError(f"position {worst} is not among the {self.settled} known ones of epoch {self.epoch}")
        return positions


def _epoch_order(
    plan: LanePlan, seed: int, epoch: int, block_shards: int, shuffle: bool, anchor: Anchor | None = None
) -> EpochOrder:
    return EpochOrder(plan, seed=seed, epoch=epoch, block_shards=block_shards, shuffle=shuffle, anchor=anchor)
