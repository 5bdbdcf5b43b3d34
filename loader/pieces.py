"""An epoch's pieces (whole shards, or runs of one) in the order in which the lanes come to them, grouped into blocks.

Pure: numpy and arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .lanes import LanePlan
from .permute import Int64s, derive_array


@dataclass(frozen=True, eq=False)
class Pieces:
    """An epoch's pieces, lane after lane and in the order in which they come; ``opening``: those that open a block.

    ``block`` numbers the blocks of all lanes together, ``number`` those of each lane from 0; ``drawn``: a piece's place
    in the plan.
    """

    shard: Int64s
    start: Int64s
    stop: Int64s
    lane: Int64s
    block: Int64s
    number: Int64s
    opening: Int64s
    drawn: Int64s


def arrange(plan: LanePlan, key: int, limit: int, *, shuffle: bool) -> Pieces:
    """Each lane's pieces in an order drawn from the key, grouped 1, 2, 4, ... up to ``limit``, then ``limit`` each."""
    lane = np.repeat(np.arange(plan.lanes, dtype=np.int64), np.diff(plan.bounds))
    shard, start, stop = plan.shard, plan.start, plan.stop
    drawn = np.arange(len(shard), dtype=np.int64)
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
    return Pieces(shard, start, stop, lane, np.cumsum(opens) - 1, number, np.flatnonzero(opens), drawn)


def known_lengths(pieces: Pieces, lanes: int) -> tuple[Int64s, Int64s]:
    """Lengths with each lane cut off before its first block that lacks a count, and the pieces those blocks lack."""
    unknown = pieces.stop < 0
    first = np.full(lanes, len(pieces.shard), dtype=np.int64)
    np.minimum.at(first, pieces.lane[unknown], pieces.block[unknown])
    first = first[pieces.lane]
    lengths = np.where(pieces.block < first, pieces.stop - pieces.start, 0)
    return lengths, np.flatnonzero(unknown & (pieces.block == first))


@dataclass(frozen=True, eq=False)
class Uses:
    """When shards are needed: parallel arrays sorted by ``first``, one entry per shard.

    No sample of ``shard[i]`` lies before position ``first[i]`` (of those still to come) or after ``last[i]``. Both are
    tight to a block, not to a sample.
    """

    shard: Int64s
    first: Int64s
    last: Int64s


def merged_uses(shard: Int64s, first: Int64s, last: Int64s) -> Uses:
    """One entry per shard, for shards that are cut into several lanes' pieces."""
    order = np.lexsort((first, shard))
    shard, first, last = shard[order], first[order], last[order]
    heads = np.flatnonzero(np.diff(shard, prepend=-1))
    if heads.size < shard.size:
        last = np.maximum.reduceat(last, heads)
        shard, first = shard[heads], first[heads]
    order = np.lexsort((shard, first))
    return Uses(shard[order], first[order], last[order])
