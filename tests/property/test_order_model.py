"""The order against a model that walks it step by step, and against itself with less known."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loader.epochs import Orders, OrderSettings
from loader.lanes import LanePlan, plan_lanes
from loader.order import EpochOrder
from loader.permute import derive, permutation, seed_key
from loader.rounds import Rounds

COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)
SEEDS = st.integers(0, 2**64 - 1)


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    """An epoch's order of an arbitrary small data set under arbitrary settings."""
    counts = np.array(draw(COUNTS), dtype=np.int64)
    sizes = counts * 100 + np.array(draw(st.lists(st.integers(0, 99), min_size=len(counts), max_size=len(counts))))
    made = Orders.begin(
        counts,
        sizes,
        batch=draw(st.integers(1, 48)),
        nodes=draw(st.integers(1, 4)),
        lanes=draw(st.none() | st.integers(1, 20)),
        seed=draw(SEEDS),
        block_shards=draw(st.integers(1, 9)),
        shuffle=draw(st.booleans()),
        exchange=draw(st.booleans()),
        balance=draw(st.sampled_from(["bytes", "samples"])),
    )
    return made(draw(st.integers(0, 3)))


def walk(lengths: list[int]) -> list[tuple[int, int]]:
    """(lane, offset) of every position, by reading the lanes round after round."""
    return [(lane, r) for r in range(max(lengths, default=0)) for lane, n in enumerate(lengths) if n > r]


def samples(order: EpochOrder, end: int | None = None) -> list[tuple[int, int]]:
    shard, index = order.locate(np.arange(order.settled if end is None else end))
    return list(zip(shard.tolist(), index.tolist(), strict=True))


def pieces(plan: LanePlan, lane: int) -> set[tuple[int, int]]:
    shard, start, stop = (array.tolist() for array in plan.pieces(lane))
    return {(s, i) for s, a, b in zip(shard, start, stop, strict=True) for i in range(a, b)}


@given(orders())
def test_every_sample_comes_once_and_from_its_lane(order: EpochOrder) -> None:
    seen = samples(order)
    assert len(seen) == len(set(seen)) == order.total
    lanes = order.lane_of(np.arange(order.total)).tolist()
    assert lanes == [lane for lane, _ in walk(order.plan.lengths.tolist())]
    for lane in range(order.plan.lanes):
        assert {sample for sample, at in zip(seen, lanes, strict=True) if at == lane} == pieces(order.plan, lane)


def modelled(order: EpochOrder) -> list[tuple[int, int]]:
    """The definition of the order, spelled out one sample at a time."""
    key = derive(seed_key(order.seed), order.epoch)
    lanes: list[list[tuple[int, int]]] = []
    for lane in range(order.plan.lanes):
        left = list(zip(*(array.tolist() for array in order.plan.pieces(lane)), strict=True))
        if order.shuffle:
            left.sort(key=lambda piece: derive(derive(key, 3), piece[0], piece[1]))
        sequence, number = [], 0
        while left:
            size = min(2**number, order.block_shards) if order.shuffle else 1
            block = [(shard, i) for shard, start, stop in left[:size] for i in range(start, stop)]
            mixed = permutation(len(block), derive(derive(key, 4), lane, number)).tolist()
            sequence += [block[i] for i in mixed] if order.shuffle else block
            left, number = left[size:], number + 1
        lanes.append(sequence)
    return [lanes[lane][offset] for lane, offset in walk([len(sequence) for sequence in lanes])]


@given(orders())
def test_the_order_is_the_definition(order: EpochOrder) -> None:
    assert samples(order) == modelled(order)


@given(COUNTS, SEEDS, st.integers(0, 3))
def test_unshuffled_is_the_listing_order(counts: list[int], seed: int, epoch: int) -> None:
    made = np.array(counts, dtype=np.int64)
    order = Orders.begin(made, made, batch=8, nodes=2, seed=seed, shuffle=False, exchange=True)(epoch)
    assert samples(order) == [(s, i) for s, n in enumerate(counts) for i in range(n)]


@given(orders(), st.data())
def test_positions_can_be_asked_in_any_order_and_number(order: EpochOrder, data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.integers(0, order.total - 1), max_size=20))
    shard, index = order.locate(np.array(wanted, dtype=np.int64))
    whole = samples(order)
    assert list(zip(shard.tolist(), index.tolist(), strict=True)) == [whole[p] for p in wanted]


@given(orders())
def test_an_order_survives_pickling(order: EpochOrder) -> None:
    assert samples(pickle.loads(pickle.dumps(order))) == samples(order)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40))
def test_rounds_are_the_walk(lengths: list[int]) -> None:
    rounds = Rounds(np.array(lengths, dtype=np.int64))
    expected = walk(lengths)
    assert rounds.total == len(expected)
    positions = np.arange(len(expected))
    lanes = np.array([lane for lane, _ in expected], dtype=np.int64)
    offsets = np.array([offset for _, offset in expected], dtype=np.int64)
    found = rounds.locate(positions)
    assert (found[0].tolist(), found[1].tolist()) == (lanes.tolist(), offsets.tolist())
    assert rounds.position(lanes, offsets).tolist() == positions.tolist()
    for position in range(len(expected) + 1):
        assert rounds.taken(position).tolist() == np.bincount(lanes[:position], minlength=len(lengths)).tolist()


@given(orders(), st.data())
def test_cursors_are_the_samples_taken(order: EpochOrder, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, order.total))
    next_lane, blocks, offsets = order.cursors(position)
    lanes = order.lane_of(np.arange(order.total))
    if position < order.total:
        assert next_lane == lanes[position]
    taken = np.bincount(lanes[:position], minlength=order.plan.lanes)
    for lane in range(order.plan.lanes):
        before = [b for b in range(position) if lanes[b] == lane]
        # the cursors on the way count up from 1 in each block
        if taken[lane] == 0:
            assert (blocks[lane], offsets[lane]) == (0, 0)
            continue
        _, earlier_blocks, earlier_offsets = order.cursors(before[-1])
        if earlier_blocks[lane] == blocks[lane]:
            assert offsets[lane] == earlier_offsets[lane] + 1
        else:
            assert (blocks[lane] > earlier_blocks[lane], offsets[lane]) == (True, 1)


@given(orders(), st.data())
def test_uses_cover_what_is_to_come(order: EpochOrder, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, order.total))
    wanted = data.draw(st.none() | st.sets(st.integers(0, order.plan.lanes - 1)))
    limit = None if wanted is None else np.array(sorted(wanted), dtype=np.int64)
    uses = order.uses_from(position, limit)
    lanes = order.lane_of(np.arange(order.total)).tolist()
    ahead: dict[int, list[int]] = {}
    for at, (shard, _) in enumerate(samples(order)):
        if at >= position and (wanted is None or lanes[at] in wanted):
            ahead.setdefault(shard, []).append(at)
    spans = {s: (a, b) for s, a, b in zip(uses.shard.tolist(), uses.first.tolist(), uses.last.tolist(), strict=True)}
    assert len(spans) == len(uses.shard)
    assert set(ahead) <= set(spans)
    for shard, (first, last) in spans.items():
        assert position <= first <= last < order.total
        if shard in ahead:
            assert first <= ahead[shard][0] and last >= ahead[shard][-1]
    # as early as it says something is needed, something is
    needed = sorted(at for places in ahead.values() for at in places)
    if needed:
        assert uses.first[0] == needed[0]
        assert uses.last.max() == needed[-1]
    assert list(order.shards_from(position, limit)) == list(zip(uses.shard.tolist(), uses.first.tolist(), strict=True))
    assert uses.first.tolist() == sorted(uses.first.tolist())


@given(COUNTS, SEEDS, st.data())
def test_fewer_known_counts_settle_a_beginning_of_the_same_order(
    counts: list[int], seed: int, data: st.DataObject
) -> None:
    sizes = np.array(counts, dtype=np.int64) * 10
    settings = OrderSettings(
        seed=seed,
        lanes=data.draw(st.integers(1, 12)),
        block_shards=data.draw(st.integers(1, 5)),
        shuffle=data.draw(st.booleans()),
        exchange=False,
        balance="bytes",
        cut=False,
    )
    full = Orders(np.array(counts, dtype=np.int64), sizes, settings)
    known = np.array(data.draw(st.lists(st.booleans(), min_size=len(counts), max_size=len(counts))))
    epoch = data.draw(st.integers(0, 2))
    while True:  # counting what is asked for settles everything in the end
        order = full.with_counts(np.where(known, counts, -1))(epoch)
        assert samples(order) == samples(full(epoch), order.settled)
        for position in {0, order.settled // 2, order.settled - 1} & set(range(order.settled)):
            mine, whole = order.cursors(position), full(epoch).cursors(position)
            assert [np.asarray(a).tolist() for a in mine] == [np.asarray(a).tolist() for a in whole]
        asked = order.unsettled()
        assert order.complete == (len(asked) == 0)
        if order.complete:
            break
        assert not known[asked].any()
        known[asked] = True
    assert order.settled == sum(counts)
    assert samples(order) == samples(full(epoch))


@given(COUNTS, SEEDS, st.integers(1, 60))
def test_cut_lanes_are_equally_long_and_hold_everything(counts: list[int], seed: int, lanes: int) -> None:
    made = np.array(counts, dtype=np.int64)
    plan = plan_lanes(made, made, batch=1, lanes=lanes, seed=seed, shuffle=True, cut=True)
    assert plan.lanes == lanes
    assert plan.lengths.max() - plan.lengths.min() <= 1
    everything = sorted(sample for lane in range(lanes) for sample in pieces(plan, lane))
    assert everything == [(s, i) for s, n in enumerate(counts) for i in range(n)]
