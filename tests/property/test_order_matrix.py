"""What a user gets, over wide matrices: seeds, data sets, ranks, nodes, workers, restarts. Pure plans, no processes.

The same matrices, a seeded sample of them, run through real ranks and workers in tests/integration/test_order_real.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import ConfigError, EmptyDataset
from loader.batches import steps
from loader.epochs import Orders
from loader.nodeplan import NodePlan
from loader.nodes import grouped
from loader.nodetables import NodeTables, Table
from loader.passes import BatchRule, PassPlan
from loader.state import LoaderState, advance, begin_state
from loader.workers import Place, Worker

BATCH = 24
WORLDS = (1, 2, 3, 4, 6, 8, 12)
WORKERS = (1, 3)  # no worker at all reads as one does
SEEDS = (0, 11)
FAST = (0, 3, "short")  # what of the matrix is in every run
DATA_SETS = {
    "one sample": [1],
    "one shard": [50],
    "fewer samples than ranks": [3, 0, 2],
    "one sample a shard": [1] * 70,
    "exactly one batch": [24],
    "empty shards": [0, 30, 0, 0, 25, 0],
    "few shards": [13, 40, 8, 27],
    "many shards": [3, 9, 1, 0, 7, 12, 5, 5, 8, 2] * 6,
    "one giant": [150] + [2] * 50,
    "skewed": np.random.default_rng(5).lognormal(1, 1, 64).astype(int).tolist(),
}


@lru_cache(maxsize=256)
def orders_of(name: str, seed: int, nodes: int, shuffle: bool = True, batch: int = BATCH) -> Orders:
    counts = np.array(DATA_SETS[name], dtype=np.int64)
    return Orders.begin(
        counts, counts * 10, batch=batch, nodes=nodes, seed=seed, block_shards=2, shuffle=shuffle, exchange=seed == 11
    )


@dataclass(frozen=True)
class Job:
    """A run's ranks. ``nodes`` as in ``ShardDataset(nodes=...)``."""

    world: int
    nodes: Any = 1
    workers: int = 1
    batch: int = BATCH
    drop_last: bool = False
    pad: bool = False

    def plans(self, orders: Orders, state: LoaderState) -> list[PassPlan[Any]]:
        order, out = orders(state.epoch), []
        tables = NodeTables(self.nodes)
        settings = replace(state.settings, table=tables.remember(state.table))
        for rank in range(self.world):
            place = Place(rank, self.world)
            rule = BatchRule(self.batch, place, self.drop_last, self.pad, tables.run(place))
            split = tables.split(place, settings)
            if split is None:
                out.append(PassPlan(order, rule, state.position))
            else:
                out.append(NodePlan(order, rule, state.position, split=split))
        return out

    def table(self, state: LoaderState) -> Table:
        tables = NodeTables(self.nodes)
        return tables.table(Place(0, self.world), replace(state.settings, table=tables.remember(state.table)))

    def read(self, orders: Orders, state: LoaderState, batches: int | None = None) -> list[list[list[int]]]:
        """[step][rank] -> ids, as the ranks' users see them: their workers take turns."""
        ranks = []
        for plan in self.plans(orders, state):
            shares = [plan.share(Worker(index, self.workers)) for index in range(self.workers)]
            ranks.append(list(in_turn(shares))[:batches])
        assert len({len(rank) for rank in ranks}) == 1, "all ranks take the same steps"
        return [list(step) for step in zip(*ranks, strict=True)]

    def after(self, orders: Orders, state: LoaderState, batches: int) -> LoaderState:
        state = replace(state, table=self.table(state))
        rule: dict[str, Any] = {"global_batch": self.batch, "world": self.world}
        return advance(state, batches, orders, **rule, drop_last=self.drop_last, pad=self.pad)


def in_turn(shares: list[Iterator[Any]]) -> Iterator[list[int]]:
    turn = 0
    while shares:
        found = next(shares[turn % len(shares)], None)
        if found is None:
            return  # batches are dealt in turn: where one has none, none is left
        yield found[2].ids.tolist()
        turn += 1


def as_sets(batches: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(i for part in batch for i in part) for batch in batches]


def nodes_of(world: int) -> list[Any]:
    """One node, as many as there are ranks, some between, and ranks that are numbered across them, unequal ones too."""
    even = [count for count in (1, 2, 3, 4, world) if world % count == 0 and count <= world]
    mixed = [tuple(f"n{rank * 7 % 3}" for rank in range(world))] if world > 2 else []
    return [*dict.fromkeys(even), *mixed]


def everything(name: str) -> list[int]:
    return [shard << 32 | i for shard, count in enumerate(DATA_SETS[name]) for i in range(count)]


RULES = {"short": (False, False), "dropped": (True, False), "padded": (False, True)}


def _is_fast(name: str, *case: Any) -> bool:
    return case == FAST or (name in ("skewed", "empty shards") and case == (11, 1, "padded"))


MATRIX = [
    pytest.param(name, seed, planned, rule, marks=() if _is_fast(name, seed, planned, rule) else pytest.mark.slow)
    for name, seed, planned, rule in product(DATA_SETS, SEEDS, (1, 3), RULES)
]


@pytest.mark.parametrize(("name", "seed", "planned", "rule"), MATRIX)
def test_global_batches_are_the_same_sets_for_all_ranks_nodes_and_workers(
    name: str, seed: int, planned: int, rule: str
) -> None:
    """``planned``: the nodes that the run began with, which give the number of lanes."""
    total, (drop_last, pad) = sum(DATA_SETS[name]), RULES[rule]
    orders = orders_of(name, seed, planned)
    start = begin_state("d", orders.settings, orders)
    expected: list[list[int]] | None = None
    for world, workers in product(WORLDS, WORKERS):
        for nodes in nodes_of(world):
            job = Job(world, nodes, workers, drop_last=drop_last, pad=pad)
            try:
                made = steps(total, BATCH, world=world, drop_last=drop_last, pad=pad)
            except (ConfigError, EmptyDataset) as refused:
                with pytest.raises(type(refused)):
                    job.read(orders, start)
                continue
            batches = job.read(orders, start)
            assert len(batches) == made.batches
            for rank, plan in enumerate(job.plans(orders, start)):
                assert sum(len(batch[rank]) for batch in batches) == made.samples(plan.rule.run)
            sets = as_sets(batches)
            expected = sets if expected is None else expected
            assert sets == expected
    if expected is not None and not pad:
        seen = sorted(i for batch in expected for i in batch)
        assert len(seen) == len(set(seen)) == total - (total % BATCH if drop_last else 0)
        assert drop_last or seen == sorted(everything(name))
    if pad:
        assert expected is not None and set().union(*map(set, expected)) == set(everything(name))


@pytest.mark.parametrize("world", [5, 7, 9, 16])
def test_ranks_that_do_not_divide_the_batch(world: int) -> None:
    """Whole batches, dealt by the data set: their parts differ by a sample."""
    orders = orders_of("many shards", 0, 2)
    start = begin_state("d", orders.settings, orders)
    expected = as_sets(Job(1).read(orders, start))
    for workers, nodes in product(WORKERS, nodes_of(world)):
        batches = Job(world, nodes, workers).read(orders, start)
        assert as_sets(batches) == expected
        sizes = {len(part) for batch in batches[:-1] for part in batch}
        assert sizes <= {BATCH // world, BATCH // world + 1}


@pytest.mark.parametrize("name", DATA_SETS)
@pytest.mark.parametrize("nodes", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_resume_at_every_batch_three_times_in_a_row(name: str, nodes: int) -> None:
    orders = orders_of(name, 0, nodes)
    start = begin_state("d", orders.settings, orders)
    job = Job(1, pad=True)
    each = len(job.read(orders, start))
    whole: list[list[int]] = []
    state = start
    for _ in range(3):
        whole += as_sets(job.read(orders, state))
        state = job.after(orders, state, each)
    jobs = [Job(world, of, 3 if world % 2 else 1, pad=True) for world in WORLDS for of in nodes_of(world)]
    for stopped in range(each + 1):
        state, seen = start, 0
        for leg in range(3):
            job = jobs[(stopped * 5 + leg * 7) % len(jobs)]
            taken = stopped if leg == 0 else (stopped * 3 + leg) % (each + 1)
            batches, position = [], state
            left = taken
            while left:
                got = job.read(orders, position, left)
                batches += got
                position, left = job.after(orders, position, len(got)), left - len(got)
            assert as_sets(batches) == whole[seen : seen + taken]
            state, seen = job.after(orders, state, taken), seen + taken
            assert replace(position, table=state.table) == state
            state = LoaderState.from_dict(json.loads(json.dumps(state.to_dict())), data="d")
            state.check(orders)
            if seen + each >= len(whole):
                break


@given(
    counts=st.lists(st.integers(0, 25), min_size=1, max_size=24).filter(any),
    lanes=st.integers(1, 13),
    world=st.integers(1, 8),
    rounds=st.integers(1, 5),
    position=st.integers(0, 2000),
    pad=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40)
def test_runs_of_batches_are_the_batches_one_by_one(
    counts: list[int], lanes: int, world: int, rounds: int, position: int, pad: bool, data: st.DataObject
) -> None:
    """Whatever lanes and batches do not divide, wherever lanes end: batches that are moved along are right."""
    made = np.array(counts, dtype=np.int64)
    orders = Orders.begin(made, made * 10, batch=lanes, lanes=lanes, seed=3, shuffle=True)
    names = data.draw(st.lists(st.sampled_from("abc"), min_size=world, max_size=world))
    batch = data.draw(st.sampled_from([lanes * rounds, lanes * rounds + 1, rounds, world * rounds]))
    start = replace(begin_state("d", orders.settings, orders), position=position % orders.total)
    if batch < world:
        return
    job = Job(world, tuple(names), batch=batch, pad=pad, drop_last=not pad)
    try:
        plans = job.plans(orders, start)
        batches = plans[0].batches
    except (ConfigError, EmptyDataset):
        return
    for plan in plans:
        for workers in (1, 3):
            for worker in range(workers):
                got = [(number, places.ids.tolist()) for number, _, places in plan.share(Worker(worker, workers))]
                assert got == [
                    (number, plan.places(plan.positions(number)).ids.tolist())
                    for number in range(worker, batches, workers)
                ]
    seen = [i for number in range(batches) for plan in plans for i in plan.positions(number).tolist()]
    assert sorted(seen) == list(range(start.position, start.position + len(seen)))


@given(
    nodes=st.integers(2, 6),
    ranks=st.integers(1, 4),
    lanes=st.integers(1, 5),
    rounds=st.integers(1, 3),
    gone=st.booleans(),
    data=st.data(),
)
def test_in_every_run_a_node_reads_only_its_own_lanes_while_these_last(
    nodes: int, ranks: int, lanes: int, rounds: int, gone: bool, data: st.DataObject
) -> None:
    """P divides C and C divides B; also after a restart with other nodes and renumbered ranks."""
    count = nodes * lanes
    made = np.full(4 * count, 6, dtype=np.int64)
    orders = Orders.begin(made, made, batch=count * rounds, lanes=count, seed=1, shuffle=True)
    old = [f"n{i}" for i in range(nodes)]
    new = [*old[1:], "new"] if gone else old
    state = replace(
        begin_state("d", orders.settings, orders),
        table=Job(nodes, tuple(old)).table(begin_state("d", orders.settings, orders)),
    )
    of_rank = tuple(data.draw(st.permutations(grouped(nodes * ranks, new))))
    job = Job(nodes * ranks, of_rank, batch=count * rounds)
    table = job.table(state)
    kept = sum(a == b for a, b in zip(table, state.table, strict=True))
    assert kept == (count - lanes if gone else count)
    if count * rounds < job.world:
        return
    full = int(orders(0).plan.lengths.min()) // rounds
    for rank, plan in enumerate(job.plans(orders, state)):
        for batch in range(0, full, 3):
            of = orders(0).lane_of(plan.positions(batch))
            assert {table[lane] for lane in of.tolist()} <= {of_rank[rank]}
