"""The promise of the order: no number of ranks, workers, nodes or restarts changes the sequence of global batches."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.batches import rank_positions, steps
from loader.epochs import Orders
from loader.nodes import assign_lanes, nodes_of_lanes, runs_of_ranks
from loader.permute import Int64s
from loader.state import LoaderState, advance, begin_state

GLOBAL_BATCH = 24
WORLDS = (1, 2, 3, 4, 6, 8, 12)
WORKERS = (1, 2, 3)
DATA_SETS = {
    "one shard": [50],
    "one sample a shard": [1] * 70,
    "exactly one batch": [24],
    "empty shards": [0, 30, 0, 0, 25, 0],
    "few shards": [13, 40, 8, 27],
    "many shards": [3, 9, 1, 0, 7, 12, 5, 5, 8, 2] * 12,
    "one giant": [400] + [2] * 60,
}


def orders_of(
    counts: list[int], *, seed: int = 0, nodes: int = 1, shuffle: bool = True, exchange: bool = False
) -> Orders:
    made = np.array(counts, dtype=np.int64)
    return Orders.begin(
        made, made * 10, batch=GLOBAL_BATCH, nodes=nodes, seed=seed, block_shards=2, shuffle=shuffle, exchange=exchange
    )


def delivered(
    orders: Orders,
    state: LoaderState,
    *,
    world: int,
    workers: int,
    node_of_lane: Int64s | None = None,
    pad: bool = False,
) -> tuple[list[list[list[int]]], int]:
    """What each rank's user sees of the epoch from a state on, [step][rank][position], with batches dealt to workers.

    A worker takes every ``workers``-th batch on its own, as DataLoader's workers do; the parent takes turns.
    """
    order = orders(state.epoch)
    count = steps(order.total, GLOBAL_BATCH, world=world, drop_last=not pad, pad=pad, start=state.position).batches
    per_rank = []
    for rank in range(world):
        dealt = [
            [
                rank_positions(
                    order,
                    step,
                    global_batch=GLOBAL_BATCH,
                    rank=rank,
                    world=world,
                    node_of_lane=node_of_lane,
                    start=state.position,
                    pad=pad,
                ).tolist()
                for step in range(worker, count, workers)
            ]
            for worker in range(workers)
        ]
        per_rank.append([dealt[step % workers][step // workers] for step in range(count)])
    return [[per_rank[rank][step] for rank in range(world)] for step in range(count)], count


def sample_sets(orders: Orders, epoch: int, batches: list[list[list[int]]]) -> list[frozenset[tuple[int, int]]]:
    order, sets = orders(epoch), []
    for batch in batches:
        shard, index = order.locate(np.array([p for part in batch for p in part], dtype=np.int64) % order.total)
        sets.append(frozenset(zip(shard.tolist(), index.tolist(), strict=True)))
    return sets


@pytest.mark.parametrize("name", DATA_SETS)
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_all_worlds_and_workers_see_the_same_global_batches(name: str, seed: int, shuffle: bool) -> None:
    orders = orders_of(DATA_SETS[name], seed=seed, shuffle=shuffle, exchange=bool(seed))
    start = begin_state("d", orders.settings, orders)
    total = sum(DATA_SETS[name])
    expected: list[frozenset[tuple[int, int]]] | None = None
    for world, workers in product(WORLDS, WORKERS):
        batches, count = delivered(orders, start, world=world, workers=workers)
        assert count == total // GLOBAL_BATCH
        for batch in batches:
            assert [len(part) for part in batch] == [GLOBAL_BATCH // world] * world
        sets = sample_sets(orders, 0, batches)
        assert sum(map(len, sets)) == len(frozenset().union(*sets)) == count * GLOBAL_BATCH
        expected = sets if expected is None else expected
        assert sets == expected


@pytest.mark.parametrize("name", DATA_SETS)
def test_padding_gives_every_sample_and_marks_the_rest(name: str) -> None:
    orders = orders_of(DATA_SETS[name])
    start = begin_state("d", orders.settings, orders)
    total = sum(DATA_SETS[name])
    for world in WORLDS:
        batches, count = delivered(orders, start, world=world, workers=2, pad=True)
        positions = [p for batch in batches for part in batch for p in part]
        assert len(positions) == count * GLOBAL_BATCH
        assert sorted(p for p in positions if p < total) == list(range(total))
        made = steps(total, GLOBAL_BATCH, world=world, drop_last=False, pad=True)
        assert sum(p >= total for p in positions) == made.repeats
        for rank in range(world):
            assert sum(len(batch[rank]) for batch in batches) == made.samples(rank)


@pytest.mark.parametrize("name", DATA_SETS)
def test_a_resume_at_every_batch_gives_the_uninterrupted_run(name: str) -> None:
    orders = orders_of(DATA_SETS[name], exchange=True)
    start = begin_state("d", orders.settings, orders)
    whole, state = [], start
    while state.epoch < 2:
        batches, count = delivered(orders, state, world=1, workers=1)
        whole += sample_sets(orders, state.epoch, batches)
        state = advance(state, count, orders, global_batch=GLOBAL_BATCH)
    assert len(whole) == 2 * (sum(DATA_SETS[name]) // GLOBAL_BATCH)
    for stopped in range(len(whole) + 1):
        saved = advance(start, stopped, orders, global_batch=GLOBAL_BATCH)
        state = LoaderState.from_dict(json.loads(json.dumps(saved.to_dict())), data="d")
        assert state == saved
        state.check(orders)
        world, workers = WORLDS[stopped % len(WORLDS)], WORKERS[stopped % len(WORKERS)]
        rest = []
        while state.epoch < 2:
            batches, count = delivered(orders, state, world=world, workers=workers)
            rest += sample_sets(orders, state.epoch, batches)
            state = advance(state, count, orders, global_batch=GLOBAL_BATCH, world=world)
        assert rest == whole[stopped:]
        assert (state.epoch, state.position) == (2, 0)


@given(
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 200), min_size=1, max_size=30).filter(any),
    st.integers(1, 5),
    st.data(),
)
def test_any_position_resumes_at_any_batch_size(seed: int, counts: list[int], lanes: int, data: st.DataObject) -> None:
    made = np.array(counts, dtype=np.int64)
    orders = Orders.begin(made, made, batch=4, lanes=lanes, seed=seed, shuffle=True)
    order = orders(0)
    sequence = np.stack(order.locate(np.arange(order.total)), axis=1).tolist()
    state, seen = begin_state("d", orders.settings, orders), []
    while state.epoch == 0:
        batch = data.draw(st.integers(1, order.total))
        world = data.draw(st.integers(1, min(batch, order.total - state.position)))
        size = min(batch, order.total - state.position)
        parts = [
            rank_positions(order, 0, global_batch=batch, rank=rank, world=world, start=state.position)
            for rank in range(world)
        ]
        assert [len(part) for part in parts] == [(r + 1) * size // world - r * size // world for r in range(world)]
        seen += np.stack(order.locate(np.concatenate(parts)), axis=1).tolist()
        state = state.at(orders, 0, state.position + size)
    assert seen == sequence


@given(
    nodes=st.integers(1, 6),
    ranks=st.integers(1, 4),
    rounds=st.integers(1, 4),
    lanes_a_node=st.integers(1, 6),
    shards=st.integers(1, 60),
    data=st.data(),
)
def test_nodes_read_only_their_own_lanes(
    nodes: int, ranks: int, rounds: int, lanes_a_node: int, shards: int, data: st.DataObject
) -> None:
    lanes = nodes * lanes_a_node
    batch, world = lanes * rounds, nodes * ranks
    counts = np.array(data.draw(st.lists(st.integers(5, 40), min_size=shards, max_size=shards)), dtype=np.int64)
    orders = Orders.begin(counts, counts, batch=batch, nodes=nodes, lanes=lanes, seed=1, shuffle=True)
    order = orders(0)
    node_of_rank = data.draw(st.permutations([f"n{i % nodes}" for i in range(world)]))
    names = {f"n{i}": ranks for i in range(nodes)}
    table = assign_lanes(lanes, {name: names[name] for name in dict.fromkeys(node_of_rank)})
    node_of_lane = nodes_of_lanes(table, dict.fromkeys(node_of_rank, 0))
    runs = runs_of_ranks(node_of_rank)
    full_rounds = int(order.plan.lengths.min())  # where every lane still takes part
    for step in range(min(full_rounds // rounds, 3)):
        covered = []
        for rank in range(world):
            positions = rank_positions(
                order, step, global_batch=batch, rank=int(runs[rank]), world=world, node_of_lane=node_of_lane
            )
            covered += positions.tolist()
            if batch >= world:
                assert {table[lane] for lane in order.lane_of(positions)} <= {node_of_rank[rank]}
        assert sorted(covered) == list(range(step * batch, (step + 1) * batch))


@given(
    lanes=st.integers(1, 6),
    ranks=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    data=st.data(),
)
def test_tables_keep_the_proportion_by_the_fewest_moves(lanes: int, ranks: list[int], data: st.DataObject) -> None:
    nodes = {f"n{i}": count for i, count in enumerate(ranks)}
    previous = tuple(data.draw(st.lists(st.sampled_from([*nodes, "gone", "away"]), min_size=lanes, max_size=lanes)))
    world = sum(ranks)

    def fair(table: tuple[str, ...]) -> bool:
        return all(
            lanes * count // world <= table.count(name) <= -(-lanes * count // world) for name, count in nodes.items()
        )

    def moves(table: tuple[str, ...]) -> int:
        return sum(a != b for a, b in zip(previous, table, strict=True))

    table = assign_lanes(lanes, nodes, previous)
    assert fair(table)
    assert moves(table) == min(moves(other) for other in product(nodes, repeat=lanes) if fair(other))
    assert assign_lanes(lanes, nodes, table) == table
    assert fair(assign_lanes(lanes, nodes))


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 16), st.booleans(), st.booleans(), st.integers(0, 499))
def test_lengths_are_what_is_yielded(
    total: int, batch: int, world: int, drop_last: bool, pad: bool, start: int
) -> None:
    start %= total
    orders = orders_of([total])
    rest = (total - start) % batch
    if batch < world or (start == 0 and drop_last and not pad and total < batch):
        return
    if not drop_last and not pad and 0 < rest < world:
        return
    made = steps(total, batch, world=world, drop_last=drop_last, pad=pad, start=start)
    for rank in {0, world // 2, world - 1}:
        parts = [
            rank_positions(orders(0), t, global_batch=batch, rank=rank, world=world, start=start, pad=pad)
            for t in range(made.batches)
        ]
        assert sum(map(len, parts)) == made.samples(rank)
        assert all(len(part) for part in parts), "no rank is without a sample in any step"


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(lambda counts: sum(counts) >= 8),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from([(True, False), (False, False), (False, True)]),
)
def test_states_add_up(counts: list[int], pieces: list[int], batch: int, rule: tuple[bool, bool]) -> None:
    orders = orders_of(counts, exchange=True)
    start = begin_state("d", orders.settings, orders)
    state, (drop_last, pad) = start, rule
    for count in pieces:
        state = advance(state, count, orders, global_batch=batch, drop_last=drop_last, pad=pad)
    assert state == advance(start, sum(pieces), orders, global_batch=batch, drop_last=drop_last, pad=pad)
    each = steps(orders.total, batch, world=1, drop_last=drop_last, pad=pad).batches
    assert (state.epoch, state.position) == (sum(pieces) // each, sum(pieces) % each * batch)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(any), st.booleans(), st.data())
def test_a_batch_is_ordered_by_node_and_cut(counts: list[int], pad: bool, data: st.DataObject) -> None:
    order = orders_of(counts, nodes=2)(0)
    lanes = order.plan.lanes
    node = data.draw(st.lists(st.integers(0, 3), min_size=lanes, max_size=lanes))
    batch, world = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 5))
    start = data.draw(st.integers(0, order.total - 1))
    parts = [
        rank_positions(
            order,
            0,
            global_batch=batch,
            rank=rank,
            world=world,
            node_of_lane=np.array(node, dtype=np.int64),
            start=start,
            pad=pad,
        ).tolist()
        for rank in range(world)
    ]
    positions = range(start, start + batch if pad else min(start + batch, order.total))
    lane = order.lane_of(np.array(positions) % order.total).tolist()
    assert [p for part in parts for p in part] == [
        p for _, p in sorted(zip([node[at] for at in lane], positions, strict=True))
    ]
    assert [len(part) for part in parts] == [
        (rank + 1) * len(positions) // world - rank * len(positions) // world for rank in range(world)
    ]
