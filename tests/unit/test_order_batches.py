"""How an epoch is cut into global batches and those into ranks' runs."""

from __future__ import annotations

import numpy as np
import pytest

from cachefs.errors import ConfigError, CountsUnknown, DataError, EmptyDataset
from loader.batches import rank_positions, steps
from loader.epochs import Orders
from loader.order import EpochOrder


def order_of(counts: list[int], *, batch: int = 4, shuffle: bool = True, nodes: int = 1) -> EpochOrder:
    made = np.array(counts, dtype=np.int64)
    return Orders.begin(made, np.abs(made) * 10, batch=batch, nodes=nodes, seed=0, shuffle=shuffle)(0)


@pytest.mark.parametrize(
    ("total", "batch", "world", "drop_last", "pad", "expected"),
    [
        # batches, last, repeats, dropped
        (20, 4, 1, True, False, (5, 4, 0, 0)),
        (21, 4, 1, True, False, (5, 4, 0, 1)),
        (21, 4, 1, False, False, (6, 1, 0, 0)),
        (21, 4, 1, True, True, (6, 4, 3, 0)),
        (21, 4, 4, False, True, (6, 4, 3, 0)),
        (20, 4, 4, False, True, (5, 4, 0, 0)),
        (23, 4, 3, False, False, (6, 3, 0, 0)),
        (3, 4, 2, False, False, (1, 3, 0, 0)),
        (1, 4, 4, False, True, (1, 4, 3, 0)),
    ],
)
def test_steps(total: int, batch: int, world: int, drop_last: bool, pad: bool, expected: tuple[int, ...]) -> None:
    made = steps(total, batch, world=world, drop_last=drop_last, pad=pad)
    assert (made.batches, made.last, made.repeats, made.dropped) == expected
    assert sum(made.samples(rank) for rank in range(world)) == total - made.dropped + made.repeats


def test_the_rest_of_an_epoch_may_hold_no_batch() -> None:
    made = steps(20, 8, world=1, drop_last=True, pad=False, start=16)
    assert (made.batches, made.dropped, made.samples(0)) == (0, 4, 0)
    assert steps(20, 8, world=1, drop_last=False, pad=False, start=16).last == 4
    assert steps(20, 8, world=1, drop_last=False, pad=False, start=20).batches == 0


@pytest.mark.parametrize(
    ("total", "batch", "world", "drop_last", "error", "text"),
    [
        (3, 4, 1, True, EmptyDataset, "3 samples are not enough"),
        (0, 4, 1, True, EmptyDataset, "no sample"),
        (21, 4, 2, False, ConfigError, "last batch of 1"),
        (20, 2, 3, True, ConfigError, "smaller than the 3 ranks"),
        (20, 0, 1, True, ConfigError, "cannot be"),
    ],
)
def test_what_leaves_someone_without_samples_is_refused(
    total: int, batch: int, world: int, drop_last: bool, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        steps(total, batch, world=world, drop_last=drop_last, pad=False)


@pytest.mark.parametrize("counts", [[8], [2, 2, 2, 1, 1]])
def test_one_shard_or_five_feed_three_ranks(counts: list[int]) -> None:
    order = order_of(counts, batch=3)
    made = steps(order.total, 3, world=3, drop_last=False, pad=True)
    seen = [
        [
            int(p)
            for t in range(made.batches)
            for p in rank_positions(order, t, global_batch=3, rank=r, world=3, pad=True)
        ]
        for r in range(3)
    ]
    assert [len(positions) for positions in seen] == [3, 3, 3] == [made.samples(rank) for rank in range(3)]
    shard, index = order.locate(np.concatenate(seen) % order.total)
    assert len(set(zip(shard.tolist(), index.tolist(), strict=True))) == 8


def test_repeats_come_from_the_epochs_beginning_and_can_be_told() -> None:
    order = order_of([5], batch=4)
    parts = [rank_positions(order, 1, global_batch=4, rank=r, world=2, pad=True).tolist() for r in range(2)]
    assert parts == [[4, 5], [6, 7]]  # 5 to 7 repeat 0 to 2
    alone = order_of([1], batch=4)
    assert rank_positions(alone, 0, global_batch=4, rank=0, world=1, pad=True).tolist() == [0, 1, 2, 3]
    node_of_lane = np.arange(order.plan.lanes) % 2
    parts = [
        rank_positions(order, 1, global_batch=4, rank=r, world=2, pad=True, node_of_lane=node_of_lane).tolist()
        for r in range(2)
    ]
    assert sorted(parts[0] + parts[1]) == [4, 5, 6, 7]


def test_nodes_read_their_own_lanes() -> None:
    order = order_of([100] * 64, batch=24, nodes=3)
    assert order.plan.lanes == 12
    node_of_lane = np.arange(12) % 3  # any table, not only neighbouring lanes
    for rank in range(6):
        positions = rank_positions(order, 5, global_batch=24, rank=rank, world=6, node_of_lane=node_of_lane)
        assert set(node_of_lane[order.lane_of(positions)]) == {rank // 2}


def test_unshuffled_ranks_get_neighbouring_samples() -> None:
    order = order_of([5, 0, 7], batch=4, shuffle=False)
    assert rank_positions(order, 1, global_batch=4, rank=1, world=2).tolist() == [6, 7]
    shard, index = order.locate(np.arange(12))
    assert shard.tolist() == [0] * 5 + [2] * 7
    assert index.tolist() == [*range(5), *range(7)]


def test_batches_that_are_not_there_are_refused() -> None:
    order = order_of([8])
    with pytest.raises(DataError, match="batch 2 is not in epoch 0"):
        rank_positions(order, 2, global_batch=4, rank=0, world=1)
    with pytest.raises(DataError, match="not among"):
        rank_positions(order, -1, global_batch=4, rank=0, world=1, node_of_lane=np.zeros(4, dtype=np.int64))
    with pytest.raises(ConfigError, match="rank 2 is not one of 2"):
        rank_positions(order, 0, global_batch=4, rank=2, world=2)


def test_batches_beyond_the_counted_shards_wait() -> None:
    order = order_of([4] * 15 + [-1])
    assert 0 < order.settled < 60
    last = order.settled // 4
    assert len(rank_positions(order, last - 1, global_batch=4, rank=0, world=1)) == 4
    for pad in (False, True):
        with pytest.raises(CountsUnknown, match="1 of 16 shards are not counted"):
            rank_positions(order, last, global_batch=4, rank=0, world=1, pad=pad)
