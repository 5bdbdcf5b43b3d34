"""One epoch's order: its start, its tail, its mixing, its cost, and what it refuses."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from cachefs.errors import ConfigError, CountsUnknown, DataError
from loader.epochs import Orders
from loader.lanes import plan_lanes
from loader.order import EpochOrder
from loader.permute import Int64s
from loader.rounds import Rounds


def order_of(counts: Int64s, *, epoch: int = 0, seed: int = 0, lanes: int = 4, blocks: int = 8) -> EpochOrder:
    made = Orders.begin(counts, counts * 10, batch=lanes, lanes=lanes, seed=seed, block_shards=blocks, shuffle=True)
    return made(epoch)


def test_an_epoch_starts_with_one_shard_a_lane() -> None:
    order = order_of(np.full(64, 100), lanes=4, blocks=6)
    shard, _ = order.locate(np.arange(order.total))
    lane = order.lane_of(np.arange(order.total))
    own = shard[lane == 2]
    used = 0
    for size in (1, 2, 4, 6, 3):  # 16 shards a lane: 1, 2, 4, then K = 6 and what is left
        block = own[used : used + 100 * size]
        assert len(set(block.tolist())) == size
        used += 100 * size
    assert used == len(own)
    first = [shard for shard, position in order.shards_from(0) if position < 4]
    assert sorted(first) == sorted(set(shard[:4].tolist()))


@pytest.mark.parametrize(("shards", "lanes"), [(64, 8), (256, 32), (1024, 128), (1024, 32)])
def test_few_batches_draw_from_less_than_half_of_the_lanes(shards: int, lanes: int) -> None:
    shares = []
    for seed in range(20):
        counts = (1000 * np.random.default_rng(seed).lognormal(0, 1, shards)).astype(np.int64) + 1
        order = order_of(counts, seed=seed, lanes=lanes)
        batch = 4 * lanes
        whole = order.total // batch * batch
        drawn = np.sort(order.lane_of(np.arange(whole)).reshape(-1, batch), axis=1)
        distinct = (np.diff(drawn, axis=1) > 0).sum(axis=1) + 1
        shares.append(float((distinct < lanes / 2).mean()))
    # a single shard can be larger than all others of some lanes together; no deal of whole shards mends that
    assert np.mean(shares) <= 0.03
    assert np.quantile(shares, 0.9) <= 0.1


def test_every_shard_is_equally_likely_in_every_block() -> None:
    epochs, sizes = 300, np.array([1, 2, 4, 8, 1])  # of a lane's 16 shards, 50 samples each
    starts = 4 * 50 * (np.cumsum(sizes) - sizes)
    seen = np.zeros((64, 5))
    for epoch in range(epochs):
        uses = order_of(np.full(64, 50), epoch=epoch).uses_from(0)
        np.add.at(seen, (uses.shard, np.searchsorted(starts, uses.first, side="right") - 1), 1)
    share = sizes / 16
    assert (np.abs(seen - epochs * share) < 5 * np.sqrt(epochs * share * (1 - share))).all()


def test_samples_of_a_shard_are_far_apart_and_differ_by_epoch() -> None:
    counts = np.full(128, 200)
    first, second = (order_of(counts, epoch=epoch) for epoch in (0, 1))
    positions = np.arange(first.total)
    ids = [shard * 200 + index for shard, index in (order.locate(positions) for order in (first, second))]
    where = [np.argsort(i) for i in ids]
    assert abs(np.corrcoef(ids[0], positions)[0, 1]) < 0.25  # 128 shards in 20 blocks: chance gives about 0.1
    assert abs(np.corrcoef(where[0], where[1])[0, 1]) < 0.25
    assert (ids[0] == ids[1]).sum() < 15
    # neighbours in a shard end up a third of a block apart: 8 shards of 200 samples over 4 lanes
    apart = np.abs(np.diff(where[0].reshape(128, 200), axis=1))
    assert np.median(apart) > 0.2 * 8 * 200 * 4
    assert (apart <= 4).mean() < 0.02


def test_positions_outside_the_epoch_are_refused() -> None:
    order = order_of(np.array([5, 6, 7]))
    for wrong in ([18], [0, -1], [-5, 3]):
        with pytest.raises(DataError, match="not among the 18"):
            order.locate(np.array(wrong))
        with pytest.raises(DataError, match="not among the 18"):
            order.lane_of(np.array(wrong))
    with pytest.raises(DataError, match="position 19"):
        order.cursors(19)
    assert [len(part) for part in order.locate(np.array([], dtype=np.int64))] == [0, 0]


def test_settings_that_do_not_fit_are_refused() -> None:
    counts = np.array([5, 6, 7])
    plan = plan_lanes(counts, counts, batch=4, seed=0, shuffle=True)
    with pytest.raises(ConfigError, match="shuffle=True, not for shuffle=False"):
        EpochOrder(plan, seed=0, epoch=0, block_shards=8, shuffle=False)
    with pytest.raises(ConfigError, match="block_shards=0"):
        EpochOrder(plan, seed=0, epoch=0, block_shards=0, shuffle=True)
    with pytest.raises(ConfigError, match="epoch -1"):
        EpochOrder(plan, seed=0, epoch=-1, block_shards=8, shuffle=True)


def test_missing_counts_are_named_and_len_has_no_length() -> None:
    counts = np.full(64, 10)
    counts[[3, 40]] = -1
    made = Orders.begin(counts, np.full(64, 100), batch=4, seed=0, shuffle=True)
    order = made(0)
    assert not order.complete
    assert set(order.unsettled()) <= {3, 40}
    with pytest.raises(CountsUnknown, match="2 of 64 shards are not counted"):
        _ = order.total
    assert issubclass(CountsUnknown, TypeError)
    with pytest.raises(CountsUnknown):
        _ = made.total
    assert made.with_counts(np.full(64, 10)).total == 640


def test_a_billion_samples_in_a_hundred_thousand_shards() -> None:
    counts = np.random.default_rng(0).integers(9_000, 11_001, 100_000)
    order = Orders.begin(counts, counts * 4096, batch=4096, nodes=16, seed=0, shuffle=True)(3)
    assert order.total == counts.sum() > 9.9e8
    positions = np.random.default_rng(2).integers(0, order.total, 100_000)
    shard, index = order.locate(positions)
    assert (index < counts[shard]).all()
    assert len(set(zip(shard.tolist(), index.tolist(), strict=True))) == len(set(positions.tolist()))


@pytest.mark.slow
def test_a_large_order_is_made_and_looked_into_in_little_time() -> None:
    counts = np.random.default_rng(0).integers(9_000, 11_001, 100_000)
    began = time.process_time()
    order = Orders.begin(counts, counts * 4096, batch=4096, nodes=16, seed=0, shuffle=True)(3)
    total = order.total
    assert time.process_time() - began < 2
    costs = []
    for position in np.random.default_rng(1).integers(0, total, 50).tolist():
        one = np.array([position])
        began = time.process_time()
        order.locate(one)
        costs.append(time.process_time() - began)
    assert np.median(costs) < 1e-3


def test_looking_into_a_large_order_takes_memory_for_what_is_asked_alone() -> None:
    """Nothing that grows with the shards is made for one position."""
    counts = np.full(100_000, 10_000)
    order = Orders.begin(counts, counts * 4096, batch=4096, nodes=16, seed=0, shuffle=True)(3)
    order.locate(np.array([0]))
    peaks = []
    for position in np.random.default_rng(1).integers(0, order.total, 20).tolist():
        tracemalloc.start()
        try:
            order.locate(np.array([position]))
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert max(peaks) < 2e5


def test_the_memory_of_a_large_order_is_bounded_by_its_shards() -> None:
    counts = np.full(100_000, 10_000)
    tracemalloc.start()
    try:
        order = Orders.begin(counts, counts * 4096, batch=4096, nodes=16, seed=0, shuffle=True)(0)
        assert order.total == 10**9
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100e6


def test_thousands_of_lanes_drop_out_one_by_one() -> None:
    lengths = np.random.default_rng(0).permutation(3000) + 5
    rounds = Rounds(lengths)
    assert rounds.total == lengths.sum()
    positions = np.sort(np.random.default_rng(1).integers(0, rounds.total, 20_000))
    lane, offset = rounds.locate(positions)
    assert (offset < lengths[lane]).all()
    assert np.array_equal(rounds.position(lane, offset), positions)
    for at in range(0, 20_000, 1_000):
        left = np.flatnonzero(lengths > offset[at])
        before = np.minimum(lengths, offset[at]).sum()
        assert left[positions[at] - before] == lane[at]
