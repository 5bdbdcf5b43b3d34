"""The orders of all epochs of one run: the data set's counts and sizes under settings that are fixed for the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .anchors import Anchor
from .lanes import Balance, LanePlan, plan_lanes
from .order import DEFAULT_BLOCK_SHARDS, EpochOrder
from .permute import Int64s


@dataclass(frozen=True)
class OrderSettings:
    """What fixes the order of a data set, recorded in every state.

    ``lanes`` (C), ``block_shards`` (K); ``cut``: lanes are cut by samples; ``exchange``: other lanes in each epoch.
    ``table`` changes nothing of the order: it stands for the table of lanes and nodes that a state brought, which
    is to be repaired (:meth:`loader.nodetables.NodeTables.remember`); 0: none.
    """

    seed: int
    lanes: int
    block_shards: int
    shuffle: bool
    exchange: bool
    balance: Balance
    cut: bool
    table: int = 0


class Orders:
    """``orders(epoch)`` is that epoch's :class:`EpochOrder`. Immutable but for a memory of the last answer; picklable.

    ``counts`` and ``sizes`` are as in :func:`plan_lanes`. Raises what that raises.
    """

    def __init__(self, counts: Int64s, sizes: Int64s, settings: OrderSettings) -> None:
        self.settings = settings
        self._counts = counts
        self._sizes = sizes
        self._plan = None if settings.exchange else self._planned(None)
        self._last: EpochOrder | None = None

    @classmethod
    def begin(
        cls,
        counts: Int64s,
        sizes: Int64s,
        *,
        batch: int,
        nodes: int = 1,
        lanes: int | None = None,
        seed: int,
        block_shards: int | None = None,
        shuffle: bool,
        exchange: bool = False,
        balance: Balance = "bytes",
        cut: bool | None = None,
    ) -> Orders:
        """The orders of a run that has no state yet: lanes as :func:`plan_lanes` decides for this batch and nodes."""
        plan = plan_lanes(
            counts, sizes, batch=batch, nodes=nodes, lanes=lanes, seed=seed, shuffle=shuffle, balance=balance, cut=cut
        )
        blocks = DEFAULT_BLOCK_SHARDS if block_shards is None else block_shards
        return cls(
            counts,
            sizes,
            OrderSettings(
                seed=seed,
                lanes=plan.lanes,
                block_shards=blocks,
                shuffle=shuffle,
                exchange=exchange and shuffle,
                balance=balance,
                cut=plan.cut,
            ),
        )

    def __call__(self, epoch: int) -> EpochOrder:
        last = self._last
        if last is None or last.epoch != epoch:
            last = self._last = self.anchored(epoch, None)
        return last

    def whole(self, epoch: int) -> EpochOrder:
        """As a call, but not remembered."""
        return self.anchored(epoch, None)

    def anchored(self, epoch: int, anchor: Anchor | None) -> EpochOrder:
        """The epoch's order from where a state left off (``loader.anchors``)."""
        plan = self._plan if self._plan is not None else self._planned(epoch)
        settings = self.settings
        return EpochOrder(
            plan,
            seed=settings.seed,
            epoch=epoch,
            block_shards=settings.block_shards,
            shuffle=settings.shuffle,
            anchor=anchor,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return Orders, (self._counts, self._sizes, self.settings)

    @property
    def total(self) -> int:
        """Samples in an epoch, the same in each. Raises CountsUnknown while counts are missing."""
        return self(0 if self._last is None else self._last.epoch).total

    def with_counts(self, counts: Int64s) -> Orders:
        """The same orders with more counts known."""
        return Orders(np.asarray(counts, dtype=np.int64), self._sizes, self.settings)

    def _planned(self, epoch: int | None) -> LanePlan:
        settings = self.settings
        return plan_lanes(
            self._counts,
            self._sizes,
            batch=settings.lanes,
            lanes=settings.lanes,
            seed=settings.seed,
            shuffle=settings.shuffle,
            balance=settings.balance,
            cut=settings.cut,
            epoch=epoch,
        )
