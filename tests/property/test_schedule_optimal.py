"""What plans cost, against what is best: Belady's MIN with bypass for equal sizes, the flow bound for others."""

from __future__ import annotations

import random
from collections import OrderedDict
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.schedule import Plan
from cachefs.testing.replay import Replay

INF = 1 << 60


def plan_of(trace: list[int], sizes: dict[int, int] | None = None, *, start: int = 0) -> Plan:
    """A plan whose uses are single positions: access t of the trace is at ``start + t``."""
    objects = sorted(set(trace))
    number = {name: i for i, name in enumerate(objects)}
    return Plan.of(
        [str(name) for name in objects],
        [1 if sizes is None else sizes[name] for name in objects],
        [(number[name], start + t, start + t) for t, name in enumerate(trace)],
    )


def minimum(trace: list[int], capacity: int, held: frozenset[int] = frozenset()) -> int:
    """Fetches of Belady's MIN with bypass, objects of size 1."""
    following, later = [INF] * len(trace), {}
    for t in range(len(trace) - 1, -1, -1):
        following[t] = later.get(trace[t], INF)
        later[trace[t]] = t
    inside = {name: later.get(name, INF) for name in held}
    fetches = 0
    for t, name in enumerate(trace):
        fetches += name not in inside
        inside[name] = following[t]
        if len(inside) > capacity:
            del inside[max(inside, key=lambda other: inside[other])]
    return fetches


def exhaustive(trace: list[int], capacity: int) -> int:
    """The fewest fetches of any policy, with bypass; objects of size 1."""

    @cache
    def best(t: int, inside: frozenset[int]) -> int:
        if t == len(trace):
            return 0
        name = trace[t]
        if name in inside:
            return best(t + 1, inside)
        choices = [inside]
        if len(inside) < capacity:
            choices.append(inside | {name})
        else:
            choices += [inside - {gone} | {name} for gone in inside]
        return 1 + min(best(t + 1, choice) for choice in choices)

    return best(0, frozenset())


def least_recently_used(trace: list[int], capacity: int) -> int:
    inside: OrderedDict[int, None] = OrderedDict()
    fetches = 0
    for name in trace:
        fetches += name not in inside
        inside[name] = None
        inside.move_to_end(name)
        if len(inside) > capacity:
            inside.popitem(last=False)
    return fetches


def epochs(objects: int, count: int, seed: int) -> list[int]:
    rng, trace = random.Random(seed), []
    for _ in range(count):
        order = list(range(objects))
        rng.shuffle(order)
        trace += order
    return trace


def flow_bound(trace: list[int], sizes: dict[int, int], capacity: int, reached: int, rounds: int = 1500) -> float:
    """Fewer fetches than this are impossible.

    Each fetch saved is an interval between two uses of an object for which it has to be held; intervals over one moment
    must fit into the capacity together (the flow, or interval, formulation of offline caching). Any prices of the
    moments give a bound by weak duality; these are improved by subgradient steps towards what was ``reached``.
    """
    last: dict[int, int] = {}
    rows = []
    for t, name in enumerate(trace):
        if name in last:
            rows.append((last[name], t, sizes[name]))
        last[name] = t
    begin, end, size = (np.array(column) for column in zip(*rows, strict=True))
    prices = chosen = np.zeros(len(trace) - 1)
    best, scale, stalled = float(len(rows)), 1.0, 0
    for _ in range(rounds):
        before = np.concatenate(([0.0], np.cumsum(prices)))
        gain = 1 - size * (before[end] - before[begin])
        value = gain[gain > 0].sum() + capacity * prices.sum()
        if value < best - 1e-9:
            best, chosen, stalled = float(value), prices, 0
        elif (stalled := stalled + 1) >= 20:
            scale, stalled, prices = scale / 1.3, 0, chosen
            continue
        change = np.zeros(len(trace))
        np.add.at(change, begin[gain > 0], size[gain > 0])
        np.add.at(change, end[gain > 0], -size[gain > 0])
        slope = np.cumsum(change)[:-1] - capacity
        slope = np.where((prices <= 0) & (slope < 0), 0, slope)
        if not slope.any():
            break
        prices = np.maximum(0, prices + scale * (value - reached) / (slope @ slope) * slope)
    return len(trace) - best


def replayed(trace: list[int], capacity: int, sizes: dict[int, int] | None = None, **options: Any) -> int:
    replay = Replay(capacity, **options)
    replay.declare("plan", plan_of(trace, sizes))
    return replay.run("plan")


@settings(max_examples=150)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=10), st.integers(1, 4))
def test_the_reference_is_the_best_there_is(trace: list[int], capacity: int) -> None:
    assert minimum(trace, capacity) == exhaustive(trace, capacity)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=120), st.integers(1, 9))
def test_random_traces_cost_the_minimum(trace: list[int], capacity: int) -> None:
    assert replayed(trace, capacity) == minimum(trace, capacity)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 35), st.booleans(), st.integers(0, 1000))
def test_epochs_cost_the_minimum(objects: int, count: int, capacity: int, scan: bool, seed: int) -> None:
    trace = list(range(objects)) * count if scan else epochs(objects, count, seed)
    assert replayed(trace, capacity) == minimum(trace, capacity)


@given(st.integers(2, 25), st.integers(1, 25), st.data())
def test_a_resumed_job_goes_on_at_the_minimum(objects: int, capacity: int, data: st.DataObject) -> None:
    trace = epochs(objects, 3, data.draw(st.integers(0, 1000)))
    at = data.draw(st.integers(0, len(trace) - 1))
    replay = Replay(capacity)
    replay.declare("plan", plan_of(trace), position=at)
    assert replay.run("plan", start=at) == minimum(trace[at:], capacity)


@given(st.integers(2, 25), st.integers(1, 25), st.data())
def test_a_plan_made_anew_costs_the_minimum_from_there(objects: int, capacity: int, data: st.DataObject) -> None:
    """A job of another size goes on in another order, with what the old one left in the cache."""
    old, new = (epochs(objects, 2, data.draw(st.integers(0, 1000))) for _ in range(2))
    at = data.draw(st.integers(0, len(old)))
    replay = Replay(capacity)
    replay.declare("plan", plan_of(old))
    before = replay.run("plan", stop=at)
    held = frozenset(map(int, replay.held))
    replay.declare("plan", plan_of(new))
    assert replay.run("plan") - before == minimum(new, capacity, held)


@given(st.integers(4, 40), st.integers(1, 4), st.integers(1, 10), st.integers(0, 10), st.integers(0, 1000))
def test_bringing_in_ahead_costs_no_more_than_its_room(
    objects: int, count: int, kept: int, budget: int, seed: int
) -> None:
    """Besides what is brought in ahead, what is in use takes room."""
    trace = epochs(objects, count, seed)
    assert replayed(trace, kept + 1 + budget, budget=budget) <= minimum(trace, kept)


@pytest.mark.parametrize("budget", [0, 4, 12])
def test_a_quarter_of_the_data_hits_more_than_twice_as_often_as_with_lru(budget: int) -> None:
    trace = epochs(400, 4, 7)
    after_first = len(trace) - 400
    hits = len(trace) - replayed(trace, 100, budget=budget)
    assert hits >= 2 * (len(trace) - least_recently_used(trace, 100))
    assert hits / after_first > 0.22


SIZES = {
    "alike": lambda rng: rng.randint(7, 13),
    "wide": lambda rng: rng.randint(1, 20),
    "heavy": lambda rng: int(min(200, max(1, rng.paretovariate(1) * 3))),
}


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("part", [0.15, 0.25, 0.4])
def test_unequal_sizes_stay_within_a_tenth_of_the_flow_bound(kind: str, part: float) -> None:
    for seed in range(2):
        rng = random.Random(seed)
        sizes = {name: SIZES[kind](rng) for name in range(60)}
        trace = epochs(60, 5, seed)
        capacity = int(part * sum(sizes.values()))
        fetches = replayed(trace, capacity, sizes)
        bound = flow_bound(trace, sizes, capacity, len(trace) - fetches)
        assert bound <= fetches <= 1.1 * bound


def test_the_bound_is_tight_for_equal_sizes() -> None:
    trace = epochs(40, 4, 3)
    best = minimum(trace, 10)
    assert 0.98 * best <= flow_bound(trace, dict.fromkeys(trace, 1), 10, len(trace) - best) <= best
