"""How an order goes on from a state without the sample counts of what is used up before it.

Where a lane stands in its sequence follows from the lengths of its blocks up to there. All that an order must know of a
lane to go on is how many samples its finished blocks had together, and how long the shards of the block are that it
is in: an :class:`Anchor`, O(lanes x shards of a block), whatever the size of the data set.

Pure: numpy and arithmetic only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cachefs.errors import StateError

from .pieces import Pieces


@dataclass(frozen=True)
class Anchor:
    """What the order before ``position`` comes to, one entry per lane.

    ``blocks``: the block that the lane's last sample came from; ``before``: the samples of the blocks before it;
    ``counts``: those of its shards, in the order in which they come (empty where the lane has not begun).
    """

    position: int
    blocks: tuple[int, ...]
    before: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]


def anchored(pieces: Pieces, anchor: Anchor) -> Pieces:
    """The pieces with the counts that the anchor tells: those of finished blocks lie in each lane's first piece.

    Raises StateError if the anchor is of other lanes or blocks, or a count that is known differs from its own.
    """
    stop = pieces.stop.copy()
    for lane, (block, before, counts) in enumerate(zip(anchor.blocks, anchor.before, anchor.counts, strict=True)):
        if not counts:
            continue
        first, last = np.searchsorted(pieces.lane, (lane, lane + 1)).tolist()
        number = pieces.number[first:last]
        current = slice(first + int(np.searchsorted(number, block)), first + int(np.searchsorted(number, block + 1)))
        known, told = stop[current], np.array(counts, dtype=np.int64)
        if len(known) != len(told) or (block == 0 and before) or (pieces.start[first:last] != 0).any():
            raise StateError(f"the loader state's blocks are not those of lane {lane}", hint="the state is damaged")
        if ((known >= 0) & (known != told)).any():
            raise StateError(
                "the loader state was saved with other sample counts than the shards have now",
                hint="load it with the data it was saved with, or start anew without a state",
            )
        stop[first : current.start] = 0
        if block:
            stop[first] = before
        stop[current] = told
    return replace(pieces, stop=stop)
