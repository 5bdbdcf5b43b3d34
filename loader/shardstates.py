"""States of a data set of shards: from where a run goes on to what ``state_dict`` gives, and back. No reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cachefs.errors import StateError

from .anchors import Anchor
from .epochcell import Base
from .growing import GrowingOrders
from .order import EpochOrder
from .state import LoaderState, OrderOf
from .statefields import MOST, STOP

if TYPE_CHECKING:
    from .definition import Definition


def _orders(definition: Definition, base: Base, upto: int) -> OrderOf:
    """The order of the base's epoch from its position to before ``upto``, and of any other its beginning."""

    def order_of(epoch: int) -> EpochOrder:
        if epoch != base.epoch:
            return definition.order(base.settings, epoch, upto=1)
        return definition.order(base.settings, epoch, first=base.position, upto=upto)

    return order_of


def state_of(definition: Definition, base: Base) -> dict[str, Any]:
    """The state of a run that goes on at ``base``."""
    listing, settings = definition.listing, definition.settings(base.settings)
    table = definition.nodes.table(definition.place, settings)
    state = LoaderState(listing.digest, settings, 0, 0, 0, (), table, progressive=listing.progressive)
    orders = _orders(definition, base, base.position + 1)
    out = state.at(orders, base.epoch, base.position, base.stop).to_dict()
    if base.stop is not None:
        out[STOP] = base.stop
    return out


def base_of(definition: Definition, raw: Mapping[str, Any]) -> Base:
    """The base that a state names, checked against the data. Raises ``StateError``."""
    state = LoaderState.from_dict(raw, data=definition.listing.digest)
    state = replace(state, settings=replace(state.settings, table=definition.nodes.remember(state.table)))
    stop = raw.get(STOP)
    if state.progressive != definition.listing.progressive:
        raise StateError("the loader state does not say what states of this data set do", hint="the state is damaged")
    if state.anchor is not None:
        order = _anchored(definition, state, state.anchor, stop)
    else:
        order = definition.order(state.settings, state.epoch)
        state.check(
            lambda epoch: definition.order(state.settings, epoch), _checked_stop(definition, order, state, stop)
        )
    if definition.place.world > 1:  # many ranks end where batches do
        if stop is not None and order.complete and state.position >= order.total:
            return Base(state.epoch + 1, 0, state.settings)  # what is left are repeats, too few for many ranks
        stop = None
    return Base(state.epoch, state.position, state.settings, stop)


def _checked_stop(definition: Definition, order: EpochOrder, state: LoaderState, stop: Any) -> int | None:
    if stop is None:
        return None
    most = MOST
    if order.complete:
        # padding adds less than one batch, by a batch size that may have been another than this
        most = order.total + max(order.total, definition.global_batch)
    if isinstance(stop, bool) or not isinstance(stop, int) or not state.position < stop <= most:
        raise StateError("the loader state's field 'stop' is not where a pass from its position can end")
    return stop


def _anchored(definition: Definition, state: LoaderState, anchor: Anchor, stop: Any) -> EpochOrder:
    """Check a state that tells sample counts: against those that are known here if they suffice, else go on from its
    own. Waits for nothing."""
    orders = definition.orders(state.settings)
    assert isinstance(orders, GrowingOrders)  # of a progressive data set
    order = orders.known(state.epoch)
    if order.complete or order.settled > state.position:
        state.check(lambda epoch: order, _checked_stop(definition, order, state, stop))
        if state.at(lambda epoch: order, state.epoch, state.position, stop).known != state.known:
            raise StateError("the loader state's sample counts are not those of the data", hint="the state is damaged")
        return order
    _checked_stop(definition, order, state, stop)
    # of lanes that are not those of the plan, or of other counts than are known, making the order raises
    order = orders.trying(state.epoch, anchor)
    state.check_anchor(order)
    definition.go_on_from(state.settings, state.epoch, anchor)
    return order
