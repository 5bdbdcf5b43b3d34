"""The resumable state: what it says, what it refuses, and the situations in which other loaders lose their place."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cachefs.errors import CountsUnknown, DataError, StateError
from loader.batches import rank_positions, steps
from loader.epochs import Orders
from loader.nodes import assign_lanes
from loader.state import LoaderState, advance, begin_state


def orders_of(counts: list[int], *, batch: int = 4, **more: Any) -> Orders:
    made = np.array(counts, dtype=np.int64)
    return Orders.begin(made, np.abs(made) * 10, batch=batch, seed=5, shuffle=more.pop("shuffle", True), **more)


def fresh(orders: Orders, table: tuple[str, ...] = ()) -> LoaderState:
    return begin_state("data-1", orders.settings, orders, table)


def through_json(state: LoaderState) -> LoaderState:
    return LoaderState.from_dict(json.loads(json.dumps(state.to_dict())), data="data-1")


def read(
    orders: Orders, state: LoaderState, batches: int, *, batch: int
) -> tuple[list[tuple[int, int, int]], LoaderState]:
    """(epoch, shard, index) of the samples of the next batches, and the state behind them."""
    seen = []
    for _ in range(batches):
        order = orders(state.epoch)
        positions = rank_positions(order, 0, global_batch=batch, rank=0, world=1, start=state.position)
        shard, index = order.locate(positions)
        seen += [(state.epoch, *sample) for sample in zip(shard.tolist(), index.tolist(), strict=True)]
        state = advance(state, 1, orders, global_batch=batch)
    return seen, state


@pytest.mark.parametrize("counts", [[20], [5, 0, 7, 8], [1] * 20])
def test_an_epochs_end_is_the_next_epochs_start(counts: list[int]) -> None:
    orders = orders_of(counts)
    end = advance(fresh(orders), 5, orders, global_batch=4)
    assert (end.epoch, end.position) == (1, 0)
    after = through_json(end)
    assert after == end
    seen, _ = read(orders, after, 5, batch=4)
    shard, index = orders(1).locate(np.arange(20))
    assert seen == [(1, *sample) for sample in zip(shard.tolist(), index.tolist(), strict=True)]


def test_epochs_after_a_resume_in_the_middle_are_full() -> None:
    orders = orders_of([5, 0, 7, 8])
    state = through_json(advance(fresh(orders), 2, orders, global_batch=4))
    remaining = [steps(20, 4, world=1, drop_last=True, pad=False, start=state.position).batches]
    state = advance(state, remaining[0], orders, global_batch=4)
    for _ in range(2):
        state = through_json(state)
        remaining.append(steps(20, 4, world=1, drop_last=True, pad=False, start=state.position).batches)
        state = advance(state, remaining[-1], orders, global_batch=4)
    assert remaining == [3, 5, 5]
    assert (state.epoch, state.position) == (3, 0)


def test_a_second_and_third_resume_go_on_where_the_one_before_stopped() -> None:
    orders = orders_of([30], batch=1)
    whole, _ = read(orders, fresh(orders), 30, batch=1)
    pieces: list[tuple[int, int, int]] = []
    state = fresh(orders)
    for count in (7, 5, 5, 13):
        state = through_json(state)
        assert through_json(state) == state, "saved straight after loading"
        piece, state = read(orders, state, count, batch=1)
        pieces += piece
    assert pieces == whole
    assert (state.epoch, state.position) == (1, 0)


def test_another_batch_size_goes_on_at_the_same_sample() -> None:
    orders = orders_of([40] * 16, batch=16)
    first, state = read(orders, fresh(orders), 3, batch=16)
    second, state = read(orders, through_json(state), 5, batch=10)
    third, state = read(orders, through_json(state), 1, batch=7)
    whole, _ = read(orders, fresh(orders), 105, batch=1)
    assert first + second + third == whole
    assert state.position == 105


def test_a_remainder_without_a_batch_is_passed_over() -> None:
    orders = orders_of([20])
    state = advance(fresh(orders), 4, orders, global_batch=4)
    assert (state.epoch, state.position) == (0, 16)
    moved = advance(state, 0, orders, global_batch=8)
    assert (moved.epoch, moved.position) == (1, 0)
    assert advance(state, 0, orders, global_batch=4) == state
    assert advance(state, 0, orders, global_batch=8, drop_last=False) == state
    last = advance(state, 1, orders, global_batch=8, drop_last=False)
    assert (last.epoch, last.position) == (1, 0)
    padded = advance(state, 2, orders, global_batch=8, pad=True)
    assert (padded.epoch, padded.position) == (1, 8)


def test_a_state_can_be_asked_for_any_number_of_batches() -> None:
    orders = orders_of([9, 4, 10, 2])
    state = fresh(orders)
    for count in range(20):
        assert advance(fresh(orders), count, orders, global_batch=4) == state
        state = advance(state, 1, orders, global_batch=4)
    far = advance(fresh(orders), 6 * 10**6 + 2, orders, global_batch=4)
    assert (far.epoch, far.position) == (10**6, 8)


def test_cursors_say_where_each_lane_stands() -> None:
    orders = orders_of([3] * 16, block_shards=2, lanes=4)
    state = advance(fresh(orders), 5, orders, global_batch=4)  # five rounds: a block of one shard, then two of the next
    assert (state.next_lane, state.cursors) == (0, ((1, 2),) * 4)
    state = state.at(orders, 0, 22)
    assert (state.next_lane, state.cursors) == (2, ((1, 3), (1, 3), (1, 2), (1, 2)))
    state = state.at(orders, 0, 47)  # 12 samples a lane, in blocks of 1, 2 and 1 shards
    assert (state.next_lane, state.cursors) == (3, ((2, 3), (2, 3), (2, 3), (2, 2)))


def test_a_state_carries_the_table_of_nodes() -> None:
    orders = orders_of([10] * 32, batch=8, nodes=2)
    table = assign_lanes(orders.settings.lanes, {"n1": 1, "n0": 1})
    state = through_json(fresh(orders, table))
    assert state.table == table
    assert through_json(fresh(orders)).table == ()


def test_states_of_other_data_versions_and_things_are_refused() -> None:
    orders = orders_of([20])
    raw = fresh(orders).to_dict()
    with pytest.raises(StateError, match="data set data-1, but this is data set data-2"):
        LoaderState.from_dict(raw, data="data-2")
    with pytest.raises(StateError, match="state format 3, this version of nearflash knows state format 2"):
        LoaderState.from_dict({**raw, "format": 3})
    with pytest.raises(StateError, match="'known' is not a list"):
        LoaderState.from_dict({**raw, "format": 2})
    with pytest.raises(StateError, match="order version 7, this version of nearflash knows order version 1"):
        LoaderState.from_dict({**raw, "order": 7})
    for other in ({}, {"epoch": 1, "batch": 2}, [1, 2], "state", None):
        with pytest.raises(StateError, match="not a loader state"):
            LoaderState.from_dict(other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data", 3),
        ("seed", "0"),
        ("lanes", 0),
        ("lanes", True),
        ("lanes", 5),
        ("block_shards", 0),
        ("shuffle", 1),
        ("balance", "luck"),
        ("epoch", -1),
        ("position", 1.5),
        ("position", None),
        ("next_lane", 4),
        ("cursors", [[0, 0]]),
        ("cursors", [[0], [0], [0], [0]]),
        ("cursors", [[0, -1]] * 4),
        ("cursors", "0000"),
        ("nodes", [1]),
        ("node_of_lane", [0, 0, 0, 0]),
        ("node_of_lane", {}),
    ],
)
def test_damaged_states_are_refused(field: str, value: object) -> None:
    raw = {**fresh(orders_of([20])).to_dict(), field: value}
    with pytest.raises(StateError):
        LoaderState.from_dict(raw)


@pytest.mark.parametrize("field", ["data", "seed", "cut", "epoch", "position", "cursors", "nodes", "node_of_lane"])
def test_states_that_lack_a_field_are_refused(field: str) -> None:
    raw = fresh(orders_of([20])).to_dict()
    del raw[field]
    with pytest.raises(StateError, match=field):
        LoaderState.from_dict(raw)


def test_other_counts_under_the_same_digest_are_noticed() -> None:
    orders = orders_of([30] * 16, block_shards=1)
    state = advance(fresh(orders), 100, orders, global_batch=4)
    state.check(orders)
    changed = Orders(np.array([30] * 8 + [10] * 8), np.array([300] * 16), orders.settings)
    with pytest.raises(StateError, match="position 400 of epoch 0"):
        state.check(changed)
    with pytest.raises(StateError, match="position 400 of epoch 0"):
        state.check(Orders(np.array([30] * 14 + [0] * 2), np.array([300] * 16), orders.settings))


def test_a_run_without_all_counts_has_states_too() -> None:
    full = orders_of([30] * 40)
    late = full(0).uses_from(0).shard[-4:]
    partial = full.with_counts(np.where(np.isin(np.arange(40), late), -1, 30))
    settled = partial(0).settled
    assert 0 < settled < 1200
    state = fresh(full)
    assert fresh(partial) == state
    assert state.at(partial, 0, settled - 1) == state.at(full, 0, settled - 1)
    with pytest.raises(DataError, match="known ones"):
        state.at(partial, 0, settled)
    last = settled // 4 - 1
    assert advance(state, last, partial, global_batch=4) == advance(state, last, full, global_batch=4)
    with pytest.raises(CountsUnknown):
        advance(state, last + 1, partial, global_batch=4)


def test_exchange_is_part_of_the_state() -> None:
    orders = orders_of([30] * 40, exchange=True)
    state = through_json(advance(fresh(orders), 400, orders, global_batch=4))
    again = Orders(np.array([30] * 40), np.array([300] * 40), state.settings)
    state.check(again)
    assert again.settings.exchange
    first, second = orders(0).plan, orders(1).plan
    assert first.digest != second.digest
    assert np.array_equal(again(1).locate(np.arange(50))[0], orders(1).locate(np.arange(50))[0])
    assert not orders_of([30], exchange=True, shuffle=False).settings.exchange
