"""Global batches and who gets what of them, as pure functions.

The one sequence of an epoch (``loader.order``) is cut into global batches of B positions, and each batch into one run
per rank. No number of ranks, workers or nodes changes the sequence of global batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cachefs.errors import ConfigError, DataError, EmptyDataset

from .permute import Int64s


class Positions(Protocol):
    """The sequence of one epoch: :class:`loader.order.EpochOrder`, or that of a mixture."""

    @property
    def epoch(self) -> int: ...

    @property
    def settled(self) -> int:
        """How many positions are known."""

    @property
    def total(self) -> int:
        """How many there are. Raises CountsUnknown while that is not known."""

    def lane_of(self, positions: Int64s) -> Int64s:
        """The lane that each is taken from."""


@dataclass(frozen=True)
class Steps:
    """The global batches of an epoch (or of the rest of one): every rank takes all ``batches`` steps.

    ``last`` is the size of the last batch with its repeats, ``repeats`` how many of that are repeats (``pad=True``),
    ``dropped`` how many samples at the epoch's end are in no batch (``drop_last=True``).
    """

    batches: int
    global_batch: int
    world: int
    last: int
    repeats: int
    dropped: int

    def samples(self, rank: int) -> int:
        """How many samples, repeats included, this rank yields: what ``len()`` of a data set of samples says."""
        if self.batches == 0:
            return 0
        return (self.batches - 1) * _run_length(self.global_batch, rank, self.world) + _run_length(
            self.last, rank, self.world
        )


def _run_length(size: int, rank: int, world: int) -> int:
    return (rank + 1) * size // world - rank * size // world


def steps(total: int, global_batch: int, *, world: int, drop_last: bool, pad: bool, start: int = 0) -> Steps:
    """How the positions ``start`` to ``total`` become batches of ``global_batch``.

    ``pad=True`` fills the last batch with repeats from the epoch's beginning (``drop_last`` then has nothing to drop);
    else ``drop_last=True`` leaves an incomplete batch out; else the last batch is short.

    Raises EmptyDataset if a whole epoch has no batch; ConfigError if some rank would go without samples in a step.
    """
    if global_batch < 1 or world < 1:
        raise ConfigError(f"a global batch of {global_batch} for {world} ranks cannot be")
    if global_batch < world:
        raise ConfigError(
            f"the global batch of {global_batch} is smaller than the {world} ranks",
            hint="use at least one sample a rank",
        )
    if total < 1:
        raise EmptyDataset("the data set has no sample")
    out = about_steps(total, global_batch, world=world, drop_last=drop_last, pad=pad, start=start)
    if out.batches == 0 and start == 0:
        raise EmptyDataset(
            f"{total} samples are not enough for one global batch of {global_batch}",
            hint="use a smaller batch size, pad=True or drop_last=False",
        )
    if out.last < world:
        raise ConfigError(
            f"the last batch of {out.last} samples would leave some of the {world} ranks without any",
            hint="use drop_last=True or pad=True",
        )
    return out


def about_steps(total: int, global_batch: int, *, world: int, drop_last: bool, pad: bool, start: int = 0) -> Steps:
    """As :func:`steps`, for a ``total`` that is a guess: refuses none, for the true one may be another."""
    full, rest = divmod(total - start, global_batch)
    if pad:
        repeats = global_batch - rest if rest else 0
        return Steps(full + (rest > 0), global_batch, world, global_batch, repeats, 0)
    if drop_last or rest == 0:
        return Steps(full, global_batch, world, global_batch, 0, rest)
    return Steps(full + 1, global_batch, world, rest, 0, 0)


def rank_positions(
    order: Positions,
    batch_index: int,
    *,
    global_batch: int,
    rank: int,
    world: int,
    runs: int = 1,
    node_of_lane: Int64s | None = None,
    start: int = 0,
    pad: bool = False,
) -> Int64s:
    """The global positions of one rank's part of a batch, int64, in the order in which the rank yields them.

    Batch t is the positions ``start + t * global_batch`` and following (``start``: where a resumed epoch begins). They
    are ordered by the node their lane lives on (``node_of_lane``, shape ``(lanes,)``; None: one node) and cut into
    ``world`` runs, of which the rank gets the ``rank``-th (``runs``: and those behind it, so many in all). With
    ``pad=True`` the last batch is filled up by positions from ``order.total`` on: such a position p is a repeat of the
    sample at ``p % order.total``.

    Raises DataError for a batch that is not in the epoch, CountsUnknown for one that missing counts leave open.
    """
    if not 0 <= rank < world:
        raise ConfigError(f"rank {rank} is not one of {world} ranks")
    first = start + batch_index * global_batch
    size = global_batch
    if first + size > order.settled:
        left = order.total - first
        if left <= 0:
            raise DataError(f"batch {batch_index} is not in epoch {order.epoch}, which has {order.total} samples")
        size = size if pad else min(size, left)
    low, high = rank * size // world, (rank + runs) * size // world
    if node_of_lane is None:
        return np.arange(first + low, first + high, dtype=np.int64)
    positions = np.arange(first, first + size, dtype=np.int64)
    wrapped = positions % order.settled if first + size > order.settled else positions
    # 16-bit keys make numpy's stable sort a radix sort
    node = node_of_lane.astype(np.int16 if len(node_of_lane) < 2**15 else np.int64)[order.lane_of(wrapped)]
    out: Int64s = positions[np.argsort(node, kind="stable")[low:high]]
    return out
