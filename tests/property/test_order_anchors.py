"""Orders that lack counts, and orders that go on from a state without those of what is used up: the same sequence."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cachefs.errors import DataError, StateError
from loader.epochs import Orders
from loader.order import EpochOrder
from loader.permute import Int64s
from loader.state import LoaderState

COUNTS = st.lists(st.integers(0, 6) | st.integers(0, 40), min_size=1, max_size=30).filter(any)


@st.composite
def both(draw: st.DrawFn) -> tuple[Orders, Orders, Int64s, int]:
    """The same orders without any count and with all, the counts, and an epoch."""
    counts = np.array(draw(COUNTS), dtype=np.int64)
    sizes = counts * 10 + draw(st.integers(0, 5))
    none = Orders.begin(
        np.full(len(counts), -1, dtype=np.int64),
        sizes,
        batch=draw(st.integers(1, 30)),
        lanes=draw(st.none() | st.integers(1, 8)),
        seed=draw(st.integers(0, 2**64 - 1)),
        block_shards=draw(st.integers(1, 5)),
        shuffle=draw(st.booleans()),
        exchange=draw(st.booleans()),
        cut=False,
    )
    return none, Orders(counts, sizes, none.settings), counts, draw(st.integers(0, 2))


def located(order: EpochOrder, start: int, stop: int) -> list[tuple[int, int]]:
    shard, row = order.locate(np.arange(start, stop))
    return list(zip(shard.tolist(), row.tolist(), strict=True))


def grown(order: EpochOrder, counts: Int64s, wanted: Callable[[EpochOrder], Int64s]) -> list[EpochOrder]:
    """The order with more and more counts, those that it asks for, until it is complete."""
    known = np.where(order.plan.stop < 0, -1, 0)
    known[order.plan.shard] = order.plan.stop
    out = [order]
    while not out[-1].complete:
        asked = wanted(out[-1])
        assert asked.size
        assert (known[asked] < 0).all(), "asked for what is known"
        known[asked] = counts[asked]
        out.append(out[-1].with_counts(known))
    return out


@given(both())
def test_an_order_grows_by_what_blocks_it_and_never_changes(case: tuple[Orders, Orders, Int64s, int]) -> None:
    none, full, counts, epoch = case
    whole = full(epoch)
    wanted = located(whole, 0, whole.total)
    steps = grown(none(epoch), counts, EpochOrder.blocking)
    settled = [order.settled for order in steps]
    assert settled == sorted(settled)
    for order in steps:
        assert located(order, 0, order.settled) == wanted[: order.settled]
        assert set(order.blocking()) <= set(order.unsettled())
    assert steps[-1].total == whole.total


@given(both())
def test_what_is_counted_ahead_is_enough(case: tuple[Orders, Orders, Int64s, int]) -> None:
    none, full, counts, epoch = case
    steps = grown(none(epoch), counts, lambda order: order.to_count(order.settled, counts))
    assert steps[-1].total == full(epoch).total
    for order in steps[:-1]:
        assert set(order.blocking()) <= set(order.to_count(order.settled, counts))


def test_shards_are_counted_in_about_the_order_of_their_first_use() -> None:
    counts = np.random.default_rng(3).integers(20, 60, 400)
    none = Orders.begin(np.full(400, -1), counts * 10, batch=16, lanes=8, seed=1, shuffle=True, cut=False)
    full = Orders(counts, counts * 10, none.settings)(0)
    first = dict(full.shards_from(0))
    guessed = none(0).to_count(0, counts * 10)
    uses = [first[shard] for shard in guessed.tolist()]
    assert len(guessed) == 3 * none.settings.lanes  # blocks of one shard and of two
    assert set(guessed[: none.settings.lanes]) == set(none(0).unsettled())
    assert max(uses) < full.total // 4
    half = none(0).with_counts(np.where(np.isin(np.arange(400), guessed), counts, -1))
    more = half.to_count(half.settled // 2, counts * 10)
    assert [first[shard] for shard in more[:8].tolist()] < [first[shard] for shard in more[-8:].tolist()]


@given(both(), st.data())
def test_an_order_goes_on_from_a_state_without_the_counts_of_what_is_used_up(
    case: tuple[Orders, Orders, Int64s, int], data: st.DataObject
) -> None:
    none, full, counts, epoch = case
    whole = full(epoch)
    position = data.draw(st.integers(0, whole.total - 1))
    anchor = whole.anchor_at(position)
    order = none.anchored(epoch, anchor)
    left = {shard for shard, _ in located(whole, position, whole.total)}
    empty = set(np.flatnonzero(counts == 0).tolist())
    asked: set[int] = set()

    def wanted(now: EpochOrder) -> Int64s:
        out = now.to_count(max(position, now.settled), counts)
        asked.update(out.tolist())
        return out

    steps = grown(order, counts, wanted)
    assert asked <= left | empty, "a shard of which nothing is left was counted"
    for now in steps:
        assert located(now, position, now.settled) == located(whole, position, now.settled)
        for at in {position, (position + now.settled) // 2, now.settled - 1} & set(range(position, now.settled)):
            assert now.anchor_at(at) == whole.anchor_at(at)
            assert str(now.cursors(at)) == str(whole.cursors(at))
        if position:
            with pytest.raises(DataError):
                now.locate(np.array([position - 1]))
    last = steps[-1]
    assert last.total == whole.total
    uses = last.uses_from(position)
    assert uses.shard.tolist() == whole.uses_from(position).shard.tolist()
    assert uses.first.tolist() == whole.uses_from(position).first.tolist()
    again = pickle.loads(pickle.dumps(order))
    assert (again.settled, again.floor) == (order.settled, order.floor)
    told = {shard: count for shard, count in last.told().items() if counts[shard] != count}
    assert told == {}


@given(both(), st.data())
def test_shards_of_the_blocks_being_read_that_are_used_up(
    case: tuple[Orders, Orders, Int64s, int], data: st.DataObject
) -> None:
    _, full, _, epoch = case
    whole = full(epoch)
    position = data.draw(st.integers(0, whole.total))
    left = {shard for shard, _ in located(whole, position, whole.total)}
    asked_for = set(whole.uses_from(position).shard.tolist())
    assert left <= asked_for
    assert asked_for - set(whole.used_up(position).tolist()) == left
    assert whole.used_up(position, most=-1).size == 0, "so much is not looked at"


@given(both(), st.data())
def test_states_tell_what_they_need_and_false_ones_are_refused(
    case: tuple[Orders, Orders, Int64s, int], data: st.DataObject
) -> None:
    none, full, _, epoch = case
    whole = full(epoch)
    position = data.draw(st.integers(0, whole.total - 1))
    state = LoaderState("d", none.settings, 0, 0, 0, (), progressive=True).at(full, epoch, position)
    raw = json.loads(json.dumps(state.to_dict()))
    assert LoaderState.from_dict(raw, data="d") == state
    assert state.anchor == whole.anchor_at(position)
    state.check_anchor(none.anchored(epoch, whole.anchor_at(position)))

    def damage(value: Any) -> Any:
        if isinstance(value, list) and value:
            at = data.draw(st.integers(0, len(value) - 1))
            kind = data.draw(st.sampled_from(["in", "in", "in", "drop", "double"]))
            if kind == "in":
                return [*value[:at], damage(value[at]), *value[at + 1 :]]
            return value[:at] + value[at + 1 :] if kind == "drop" else [*value[: at + 1], *value[at:]]
        return data.draw(st.integers(-1, 60) | st.sampled_from([2**48, 2**63, None, "1"]))

    name = data.draw(st.sampled_from(["known", "cursors", "position", "known"]))
    changed = {**raw, name: damage(raw[name])}
    assume(changed != raw)
    try:
        other = LoaderState.from_dict(changed, data="d")
        anchor = other.anchor
        assert anchor is not None
        order = none.anchored(epoch, anchor)
        other.check_anchor(order)
    except StateError:
        return
    # what is left could be true of other data: then the order works, and shards' real counts decide
    for now in (order, full.anchored(epoch, anchor) if _fits(full, epoch, anchor) else order):
        now.locate(np.arange(now.floor, min(now.settled, now.floor + 10_000)))


def _fits(full: Orders, epoch: int, anchor: Any) -> bool:
    try:
        full.anchored(epoch, anchor)
    except StateError:
        return False
    return True
