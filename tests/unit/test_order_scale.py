"""What a pass of a rank on one of many nodes costs: nothing that grows with the number of samples."""

from __future__ import annotations

import time
import tracemalloc
from itertools import islice

import numpy as np
import pytest

from loader.epochs import Orders
from loader.nodeplan import NodePlan
from loader.nodetables import NodeTables
from loader.passes import BatchRule
from loader.workers import ALONE, Place

BATCH, RANKS, NODES = 4096, 128, 16


def plan_of(shards: int, samples: int, position: int = 0) -> NodePlan:
    counts = np.random.default_rng(0).integers(samples * 9 // 10, samples * 11 // 10 + 1, shards)
    orders = Orders.begin(counts, counts * 4096, batch=BATCH, nodes=NODES, seed=0, shuffle=True)
    tables, place = NodeTables(NODES), Place(77, RANKS)
    split = tables.split(place, orders.settings)
    assert split is not None and orders.settings.lanes == 64 and split.lanes.tolist() == [36, 37, 38, 39]
    return NodePlan(orders(3), BatchRule(BATCH, place, True, False), position, split=split)


@pytest.mark.parametrize("samples", [100, 10_000])
def test_iterating_takes_no_memory_that_grows_with_the_samples(samples: int) -> None:
    """10^7 and 10^9 samples in 10^5 shards and 64 lanes."""
    plan = plan_of(100_000, samples)
    tracemalloc.start()
    try:
        batches = sum(len(run.batches) for run in islice(plan.runs(ALONE), 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batches > 2000
    assert peak < 8e6


def test_any_batch_of_a_billion_samples_is_found_by_itself() -> None:
    """With memory for that batch alone: nothing before it is gone through."""
    plan = plan_of(100_000, 10_000)
    plan.positions(0)
    peaks = []
    for batch in np.random.default_rng(1).integers(0, plan.order.total // BATCH - 1, 50).tolist():
        tracemalloc.start()
        try:
            positions = plan.positions(batch)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert set(plan.order.lane_of(positions).tolist()) <= set(plan.split.lanes.tolist())
    assert max(peaks) < 2e6


@pytest.mark.slow
def test_any_batch_of_a_billion_samples_is_found_at_once() -> None:
    plan = plan_of(100_000, 10_000)
    costs = []
    for batch in np.random.default_rng(1).integers(0, plan.order.total // BATCH - 1, 50).tolist():
        began = time.process_time()
        plan.positions(batch)
        costs.append(time.process_time() - began)
    assert np.median(costs) < 5e-3
