"""The orders of a data set that is counted while it is read: an order grows with what is known, and never changes."""

from __future__ import annotations

from typing import NamedTuple

from .anchors import Anchor
from .epochs import Orders, OrderSettings
from .order import EpochOrder
from .permute import Int64s
from .tally import Tally


class _Grown(NamedTuple):
    epoch: int
    anchor: Anchor | None
    known: int
    order: EpochOrder


class GrowingOrders:
    """Orders under settings that are fixed for the run, over the counts of a tally.

    ``orders``: the same with no count known. ``anchor``: where a state left off, and in which epoch; from there on the
    counts of what is used up are not needed. For any number of threads.
    """

    def __init__(self, orders: Orders, tally: Tally, sizes: Int64s, anchor: tuple[int, Anchor] | None) -> None:
        self._orders = orders
        self._tally = tally
        self._sizes = sizes
        self._anchor = anchor
        self._last: _Grown | None = None

    @property
    def settings(self) -> OrderSettings:
        return self._orders.settings

    def known(self, epoch: int, first: int = 0) -> EpochOrder:
        """The epoch's order from position ``first`` on, as far as it is known. Does not wait."""
        anchor = None
        if self._anchor is not None and self._anchor[0] == epoch and self._anchor[1].position <= first:
            anchor = self._anchor[1]
        last, known = self._last, self._tally.known
        if last is None or (last.epoch, last.anchor) != (epoch, anchor):
            order = self._orders.anchored(epoch, anchor).with_counts(self._tally.counts())
        elif last.known == known:
            return last.order
        else:
            order = last.order.with_counts(self._tally.counts())
        self._last = _Grown(epoch, anchor, known, order)
        return order

    def whole(self, epoch: int) -> EpochOrder:
        """As :meth:`known`, from the epoch's beginning on."""
        return self.known(epoch)

    def trying(self, epoch: int, anchor: Anchor) -> EpochOrder:
        """The order from another anchor on. Raises StateError for one that does not fit the lanes or the counts."""
        return self._orders.anchored(epoch, anchor).with_counts(self._tally.counts())

    def reaching(self, epoch: int, *, first: int, upto: int) -> EpochOrder:
        """The epoch's order from ``first`` to before ``upto``, or complete. Waits for the counts that takes.

        Raises what is wrong with a shard without which nothing more can be said: the same one for all who ask.
        """
        order = self.known(epoch, first)
        try:
            while not order.complete and order.settled < upto:
                self._tally.want(self, order.to_count(order.settled, self._sizes))
                self._tally.need(order.blocking())
                order = self.known(epoch, first)
        finally:
            self._tally.forget(self)
        return order
