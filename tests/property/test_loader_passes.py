"""How a pass is shared by ranks and workers, for all sizes: every position once, in one order."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from cachefs.errors import ConfigError, EmptyDataset
from cachefs.shard import ObjectStat
from loader.batches import rank_positions
from loader.lanes import plan_lanes
from loader.order import EpochOrder
from loader.passes import BatchRule, PassPlan, Prefetch
from loader.workers import Place, Worker


def order_of(counts: list[int], seed: int, shuffle: bool = True, lanes: int = 3) -> EpochOrder:
    array = np.array(counts, dtype=np.int64)
    plan = plan_lanes(array, array * 10, batch=8, lanes=lanes, seed=seed, shuffle=shuffle)
    return EpochOrder(plan, seed=seed, epoch=1, block_shards=2, shuffle=shuffle)


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def plan_of(
    order: EpochOrder, batch: int, rank: int, world: int, drop_last: bool, pad: bool, position: int
) -> PassPlan:
    return PassPlan(order, BatchRule(batch, Place(rank, world), drop_last, pad), position)


@given(COUNTS, st.integers(0, 3), st.integers(1, 20), st.integers(1, 4), st.booleans(), st.booleans(), st.data())
def test_ranks_and_workers_share_what_one_reader_reads(
    counts: list[int], seed: int, batch: int, world: int, drop_last: bool, pad: bool, data: st.DataObject
) -> None:
    order = order_of(counts, seed)
    assume(batch >= world)
    position = data.draw(st.integers(0, order.total - 1))
    try:
        plans = [plan_of(order, batch, rank, world, drop_last, pad, position) for rank in range(world)]
        batches = plans[0].batches
    except (ConfigError, EmptyDataset):
        return
    assert {plan.batches for plan in plans} == {batches}
    for plan in plans:
        whole = list(plan.share(Worker(0, 1)))
        assert [number for number, _, _ in whole] == list(range(batches))
        for number, stamp, places in whole:
            positions = plan.positions(number)
            rank = plan.rule.place.rank
            wanted = rank_positions(order, number, global_batch=batch, rank=rank, world=world, start=position, pad=pad)
            assert positions.tolist() == wanted.tolist()
            shard, index = order.locate(positions % order.total)
            assert (places.shard.tolist(), places.row.tolist()) == (shard.tolist(), index.tolist())
            assert stamp.size == len(positions)
            assert stamp.end == min(position + (number + 1) * batch, plan.end)
        for workers in (2, 3):
            shares = [list(plan.share(Worker(w, workers))) for w in range(workers)]
            turns: Iterable[int] = (w for _ in range(batches) for w in range(workers))
            joined = [shares[w].pop(0) for w in turns if shares[w]]
            assert [(n, s, p.ids.tolist()) for n, s, p in joined] == [(n, s, p.ids.tolist()) for n, s, p in whole]
            first = data.draw(st.integers(0, batches))
            late = chain(*(plan.share(Worker(w, workers), first) for w in range(workers)))
            assert sorted(n for n, _, _ in late) == list(range(first, batches))
    if not pad:
        everything = np.concatenate([plan.positions(n) for plan in plans for n in range(batches)] or [np.zeros(0)])
        assert sorted(everything.tolist()) == list(range(position, plans[0].end))


@given(COUNTS, st.booleans(), st.integers(1, 2), st.integers(1, 20), st.booleans(), st.data())
def test_a_pass_in_order_is_what_its_positions_say(
    counts: list[int], shuffle: bool, lanes: int, batch: int, pad: bool, data: st.DataObject
) -> None:
    order = order_of(counts, 0, shuffle, lanes)
    position, count = data.draw(st.integers(0, order.total)), data.draw(st.integers(1, 50))
    found = order.neighbours(position, count)
    if position + count <= order.total:
        shard, index = order.locate(np.arange(position, position + count))
        together = bool((shard == shard[0]).all() and (np.diff(index) == 1).all())
        assert found == ((shard[0], index[0]) if together and not shuffle and order.plan.lanes == 1 else None)
    else:
        assert found is None
    assume(position < order.total)
    plan = plan_of(order, batch, 0, 1, False, pad, position)
    for number, stamp, places in plan.share(Worker(0, 1)):
        shard, index = order.locate(plan.positions(number) % order.total)
        assert (places.shard.tolist(), places.row.tolist()) == (shard.tolist(), index.tolist())
        assert stamp == plan.stamp(number, len(index))


@given(COUNTS, st.integers(1, 9), st.booleans(), st.booleans(), st.data())
def test_a_pass_that_begins_within_a_batch_ends_where_the_whole_one_does(
    counts: list[int], batch: int, drop_last: bool, pad: bool, data: st.DataObject
) -> None:
    order = order_of(counts, 0)
    try:
        whole = plan_of(order, batch, 0, 1, drop_last, pad, 0)
        end = whole.end
    except EmptyDataset:
        return
    everything = np.concatenate([whole.positions(n) for n in range(whole.batches)]).tolist()
    position = data.draw(st.integers(0, end - 1))
    rest = PassPlan(order, whole.rule, position, end)
    got = [part for _, _, places in rest.share(Worker(0, 1)) for part in places.ids.tolist()]
    assert got == whole.places(np.array(everything[position:])).ids.tolist()
    assert rest.stamp(rest.batches - 1, 1).end == end


class Asked:
    def __init__(self) -> None:
        self.urls: list[str] = []
        self.calls = 0

    def prefetch(self, items: Iterable[ObjectStat]) -> None:
        self.urls += [item.url for item in items]
        self.calls += 1

    def stat(self, number: int) -> ObjectStat:
        return ObjectStat(str(number), 1, "v")


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.integers(1, 8), st.integers(0, 5), st.data())
def test_prefetch_runs_ahead_in_order_of_first_use(
    counts: list[int], ahead: int, seed: int, data: st.DataObject
) -> None:
    order = order_of(counts, seed)
    begin = data.draw(st.integers(0, order.total - 1))
    asked = Asked()
    prefetch = Prefetch(asked, asked, order, begin, ahead=ahead)  # type: ignore[arg-type]
    wanted = [str(shard) for shard, _ in order.shards_from(begin)]
    first = dict(order.shards_from(begin))
    for position in range(begin, order.total):
        prefetch.reach(position)
        assert asked.urls == wanted[: len(asked.urls)]
        begun = sum(at <= position for at in first.values())
        assert min(begun + ahead // 2, len(wanted)) <= len(asked.urls) <= begun + ahead
    assert asked.urls == wanted
    assert asked.calls <= 2 + 2 * len(wanted) / max(ahead // 2, 1)
