"""Dealing shards to lanes: how many lanes, how even, and what happens when there is little to deal."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest

from cachefs.errors import ConfigError, EmptyDataset
from loader.lanes import LanePlan, default_lanes, plan_lanes
from loader.permute import Int64s


def plan(
    counts: Any, sizes: Any = None, *, batch: int = 8, seed: int = 0, shuffle: bool = True, **more: Any
) -> LanePlan:
    counts = np.asarray(counts, dtype=np.int64)
    sizes = counts * 100 if sizes is None else np.asarray(sizes, dtype=np.int64)
    return plan_lanes(counts, sizes, batch=batch, seed=seed, shuffle=shuffle, **more)


def shards_of(made: LanePlan) -> list[list[int]]:
    return [made.pieces(lane)[0].tolist() for lane in range(made.lanes)]


def lane_sums(made: LanePlan, amounts: Int64s) -> Int64s:
    return np.array([amounts[made.pieces(lane)[0]].sum() for lane in range(made.lanes)])


@pytest.mark.parametrize(
    ("batch", "nodes", "lanes"),
    [
        (1, 1, 1),
        (2, 1, 2),  # below 4P: the largest that divides
        (4, 1, 4),
        (6, 1, 6),  # the smallest in [4, 16]
        (12, 1, 4),
        (32, 1, 4),
        (14, 1, 7),
        (17, 1, 1),  # a prime above 16P
        (256, 8, 32),
        (96, 3, 12),
        (24, 3, 12),
        (12, 6, 12),
        (6, 6, 6),
        (6, 4, 6),  # no divisor is a multiple of 4: the largest up to 64
        (100, 3, 25),  # ... or up to 48
        (4096, 100, 1024),
    ],
)
def test_default_number_of_lanes(batch: int, nodes: int, lanes: int) -> None:
    assert default_lanes(batch, nodes) == lanes


@pytest.mark.parametrize(("batch", "nodes"), [(0, 1), (1, 0), (-4, 1)])
def test_no_lanes_for_nothing(batch: int, nodes: int) -> None:
    with pytest.raises(ConfigError):
        default_lanes(batch, nodes)


def test_lanes_are_balanced_by_bytes_or_by_samples() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 1000, 400)
    sizes = (1e6 * rng.lognormal(0, 0.5, 400)).astype(np.int64)
    for balance, amounts in (("bytes", sizes), ("samples", counts)):
        sums = lane_sums(plan(counts, sizes, balance=balance), amounts)
        assert sums.max() - sums.min() < 0.01 * sums.mean()


def test_lanes_of_equal_shards_hold_equally_many() -> None:
    made = plan([10] * 64)
    assert made.lanes == 4
    assert not made.cut
    assert [len(shards) for shards in shards_of(made)] == [16] * 4
    assert [len(shards) for shards in shards_of(plan([10] * 64, [0] * 64))] == [16] * 4


def test_the_deal_depends_on_the_seed_and_on_the_epoch_if_asked() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(500, 1000, 100)
    base = shards_of(plan(counts))
    assert shards_of(plan(counts)) == base
    for other in (plan(counts, seed=1), plan(counts, epoch=0), plan(counts, epoch=1)):
        assert sorted(np.concatenate(shards_of(other)).tolist()) == list(range(100))
        # of the 1200 pairs that share a lane, a quarter meets again by chance
        again = sum(math.comb(len(set(a) & set(b)), 2) for a in base for b in shards_of(other))
        assert 200 < again < 400
    assert shards_of(plan(counts, epoch=0)) != shards_of(plan(counts, epoch=1))


def test_few_shards_are_cut_by_samples() -> None:
    made = plan([8], batch=3)
    assert (made.lanes, made.cut) == (3, True)
    assert made.lengths.tolist() == [2, 3, 3]
    made = plan([5, 0, 7, 100, 1], batch=8, nodes=2)
    assert made.cut
    assert made.lengths.max() - made.lengths.min() <= 1
    assert made.lengths.sum() == 113
    assert 1 not in made.shard  # the empty one


@pytest.mark.parametrize(("shards", "lanes", "cut"), [(15, 4, True), (16, 4, False), (39, 10, True), (40, 10, False)])
def test_four_shards_a_lane_are_enough(shards: int, lanes: int, cut: bool) -> None:
    assert plan([10] * shards, lanes=lanes).cut == cut
    assert not plan([10] * shards, lanes=lanes, cut=False).cut  # a state's word counts


def test_fewer_samples_than_lanes_leave_lanes_empty() -> None:
    made = plan([1], batch=8)
    assert (made.lanes, sorted(made.lengths.tolist())) == (4, [0, 0, 0, 1])
    made = plan([1, 0, 1], lanes=5)
    assert sorted(made.lengths.tolist()) == [0, 0, 0, 1, 1]


def test_unknown_counts_shrink_the_lanes_and_do_not_change_the_deal() -> None:
    assert plan([-1] * 5, [10] * 5, batch=8).lanes == 1
    assert plan([-1] * 9, [10] * 9, batch=8).lanes == 2
    assert plan([-1] * 17, [10] * 17, batch=12, nodes=2).lanes == 4
    assert plan([-1] * 3, [10] * 3, lanes=4).lanes == 4  # asked for
    sizes = np.arange(1, 41) * 1000
    counts = np.arange(1, 41)
    known = plan(counts, sizes)
    unknown = plan(np.where(counts % 3 == 0, -1, counts), sizes)
    assert shards_of(unknown) == shards_of(known)
    assert known.complete
    assert not unknown.complete


def test_without_shuffle_there_is_one_lane_in_listing_order() -> None:
    made = plan([3, 0, 2], shuffle=False, lanes=7, nodes=3, batch=12)
    assert shards_of(made) == [[0, 1, 2]]
    assert made.lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("counts", "more", "error"),
    [
        ([], {}, EmptyDataset),
        ([0, 0], {}, EmptyDataset),
        ([0], {"shuffle": False}, EmptyDataset),
        ([1, -2], {}, ConfigError),
        ([1], {"sizes": [-1]}, ConfigError),
        ([1], {"sizes": [1, 2]}, ConfigError),
        ([1], {"lanes": 0}, ConfigError),
        ([1], {"balance": "luck"}, ConfigError),
        ([1], {"seed": 2**64}, ConfigError),
        ([-1] * 40, {"sizes": [1] * 40, "balance": "samples"}, ConfigError),
        ([-1], {"sizes": [1], "cut": True}, ConfigError),
    ],
)
def test_what_cannot_be_dealt_is_refused(counts: list[int], more: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        plan(counts, **more)


def test_a_plan_is_a_fixed_value() -> None:
    made = plan([4, 5, 6])
    again = pickle.loads(pickle.dumps(made))
    assert again.digest == made.digest
    assert again.shard.tolist() == made.shard.tolist()
    assert plan([4, 5, 7]).digest != made.digest
    assert plan([4, 5, 6], seed=1).digest != made.digest
    with pytest.raises(ValueError, match="read-only"):
        made.shard[0] = 1
