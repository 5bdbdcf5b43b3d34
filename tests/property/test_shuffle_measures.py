"""The shuffles that are compared are orders, and what is measured of them is what its name says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import shuffle_measures as measures
from bench import shuffle_orders as orders
from bench import shuffle_skew as skew
from bench.shuffle_orders import Job
from loader.epochs import Orders
from loader.permute import Int64s

COUNTS = st.lists(st.integers(1, 30), min_size=1, max_size=24).map(lambda c: np.array(c, dtype=np.int64))
SEEDS = st.integers(0, 2**32 - 1)
JOBS = st.builds(
    lambda each, ranks, workers: Job(each * ranks, ranks, workers),
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 3),
)
PERMUTED = st.integers(2, 300).flatmap(lambda n: SEEDS.map(lambda s: np.random.default_rng(s).permutation(n)))


@given(COUNTS, SEEDS, JOBS, st.integers(1, 40), st.integers(1, 6))
def test_every_shuffle_gives_every_sample_once(counts: Int64s, seed: int, job: Job, size: int, nodes: int) -> None:
    nodes = min(nodes, int(counts.sum()))
    made = [
        orders.perfect(counts, 0, seed),
        orders.unshuffled(counts, 0, seed),
        orders.walked(orders.our_epoch(counts, 0, seed, job, lanes=nodes, block_shards=2), counts),
        orders.buffer(counts, 0, seed, job, size=size),
        orders.litdata(counts, 0, seed, job, window=size),
        orders.litdata(counts, 0, seed, job, window=None),
        orders.py2s(counts, 0, seed, job, canonical=nodes),
        orders.py1e(counts, 0, seed, job, canonical=nodes, block=4 * size),
    ]
    for order in made:
        assert np.array_equal(np.sort(order), np.arange(counts.sum()))


@given(st.integers(0, 200), st.integers(1, 50), SEEDS)
def test_the_buffer_is_one_that_is_walked(total: int, size: int, seed: int) -> None:
    stream = np.arange(total) + 1000
    out = orders._buffered(stream, size, np.random.default_rng(seed)).tolist()
    held = min(size, total)
    slots = stream[:held].tolist()
    drawn = np.random.default_rng(seed).integers(held, size=total - held).tolist() if held else []
    walked = []
    for slot, sample in zip(drawn, stream[held:].tolist(), strict=True):
        walked.append(slots[slot])
        slots[slot] = sample
    assert out[: len(walked)] == walked
    assert sorted(out[len(walked) :]) == sorted(slots)


@given(COUNTS, SEEDS)
def test_models_keep_to_what_the_tools_have_at_hand(counts: Int64s, seed: int) -> None:
    one = Job(batch=1, ranks=1, workers=1)
    shard = np.repeat(np.arange(len(counts)), counts)
    # a shard after the other where nothing mixes them
    for order in (
        orders.py2s(counts, 3, seed, one, canonical=1),
        orders.py1e(counts, 3, seed, one, block=1 + int(counts.min()) // 2),
        orders.litdata(counts, 3, seed, one),
    ):
        assert measures.in_use(order, shard).max() == 1
    # in every epoch a canonical node has the same samples
    first, second = (orders.py1e(counts, e, seed, one, canonical=2, block=16) for e in (0, 1))
    assert set(first[0 : 2 * (len(first) // 2) : 2]) == set(second[0 : 2 * (len(first) // 2) : 2])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
def test_in_turn_is_rounds_over_the_streams(lengths: list[int]) -> None:
    streams = [100 * i + np.arange(n) for i, n in enumerate(lengths)]
    expected = [100 * i + r for r in range(max(lengths)) for i, n in enumerate(lengths) if n > r]
    assert orders.in_turn(streams).tolist() == expected


@given(st.lists(st.integers(0, 30), min_size=6, max_size=6).filter(any))
def test_ranks_take_whole_batches_of_their_workers_in_turn(lengths: list[int]) -> None:
    job = Job(batch=6, ranks=2, workers=3)
    order = orders.in_batches([100 * i + np.arange(n) for i, n in enumerate(lengths)], job).tolist()
    walked = []
    for step in range(3 * max(lengths)):
        for rank in range(2):
            stream = rank * 3 + step % 3
            walked += range(100 * stream + step // 3 * 3, 100 * stream + min(step // 3 * 3 + 3, lengths[stream]))
    assert order == walked


@given(PERMUTED, st.integers(1, 5))
def test_autocorrelation_is_its_sum(order: Int64s, lags: int) -> None:
    lags = min(lags, len(order) - 1)
    centred = order - order.mean()
    expected = [(centred[lag:] * centred[:-lag]).sum() / (centred**2).sum() for lag in range(1, lags + 1)]
    assert measures.autocorrelation(order, lags) == pytest.approx(expected, abs=1e-9)


@given(PERMUTED, st.integers(1, 40), st.integers(2, 7))
def test_compositions_are_counted(order: Int64s, batch: int, groups: int) -> None:
    batch = min(batch, len(order))
    group = np.arange(len(order)) * groups // len(order)
    group -= group.min()
    rows = [group[order[i : i + batch]].tolist() for i in range(0, len(order) - batch + 1, batch)]
    counted = [[row.count(g) for g in range(int(group.max()) + 1)] for row in rows]
    assert measures.composition(order, group, batch).tolist() == counted
    assert measures.distinct(order, group, batch).tolist() == [len(set(row)) for row in rows]


@given(PERMUTED)
def test_shards_in_use_are_those_begun_and_not_done(order: Int64s) -> None:
    shard = np.arange(len(order)) // 7
    seen = shard[order].tolist()
    used = [len(set(seen[: i + 1]) & set(seen[i:])) for i in range(len(seen))]
    assert measures.in_use(order, shard).tolist() == used


@given(PERMUTED, SEEDS, st.integers(1, 20))
def test_who_meets_again_is_counted(one: Int64s, seed: int, batch: int) -> None:
    batch = min(batch + 1, len(one))
    other = np.random.default_rng(seed).permutation(len(one))
    a, b = (measures.places(order) // batch for order in (one, other))
    both = ((a[:, None] == a) & (b[:, None] == b)).sum() - len(a)
    alone = [(x[:, None] == x).sum() - len(x) for x in (a, b)]
    expected = both / (alone[0] * alone[1] / (len(a) * (len(a) - 1)))
    assert measures.met_again(one, other, batch) == pytest.approx(expected)


def test_a_perfect_shuffle_is_the_unit_of_every_measure() -> None:
    counts = np.full(64, 1000, dtype=np.int64)
    one, other = (orders.perfect(counts, epoch, 5) for epoch in (0, 1))
    label = np.arange(len(one)) * 100 // len(one)
    assert measures.imbalance(one, label, 250).mean() == pytest.approx(1, abs=0.05)
    assert measures.met_again(one, other, 250) == pytest.approx(1, abs=0.02)
    assert abs(measures.correlation(one, other)) < 0.02
    assert np.abs(measures.autocorrelation(one, 200)).max() < 0.02
    middle = measures.even_distance(len(one))
    for apart in (measures.scattered(one), measures.gathered(one)):
        assert np.median(apart) == pytest.approx(middle, rel=0.02)


@given(
    st.lists(st.integers(1, 60), min_size=8, max_size=40).map(lambda c: np.array(c, dtype=np.int64)),
    st.sampled_from([2, 3, 4, 8]),
    st.integers(1, 3),
    SEEDS,
)
def test_narrow_is_the_share_of_batches_from_fewer_than_half_of_the_lanes(
    counts: Int64s, lanes: int, rounds: int, seed: int
) -> None:
    batch = lanes * rounds
    order = Orders.begin(counts, counts * 1000, batch=batch, lanes=lanes, seed=seed, shuffle=True)(0)
    lane = order.lane_of(np.arange(order.total))
    share, batches = skew.narrow(skew.dealt(counts, lanes, seed)), max(order.total // batch, 1)
    # the batch in which the last lane leaves may count or not, and a short last batch does not
    assert measures.narrow_share(lane, lanes, batch) == pytest.approx(share, abs=2 / batches + 1e-9)


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=60).map(lambda c: np.array(c, dtype=np.int64)),
    st.integers(1, 16),
)
def test_an_even_deal_has_all_samples_and_no_lane_below_a_shard_that_could_be_divided(
    counts: Int64s, lanes: int
) -> None:
    lengths = skew.evened(counts, lanes)
    assert len(lengths) == lanes and lengths.sum() == pytest.approx(counts.sum())
    alone = lengths[lengths > lengths.min() + 1e-9]
    assert np.isin(np.rint(alone), counts).all()
