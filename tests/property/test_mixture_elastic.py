"""A mixture is one sequence, whoever reads it: any ranks, workers and batch sizes, resumed anywhere, and often."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import StateError
from loader import Mixture, ShardDataset
from loader.testing import write_tars
from loader.workers import Worker

COUNTS = {"a": [7, 0, 11, 4, 8], "b": [3, 2], "c": [1], "d": [6, 6, 6]}
Item = tuple[int, int, int, int]
"""Number of the source, its epoch, shard, row."""


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ShardDataset]:
    root = tmp_path_factory.mktemp("mixture")
    for name, counts in COUNTS.items():
        write_tars(root / name, counts)
    return {name: source(root / name, seed) for seed, name in enumerate(COUNTS)}


def source(folder: Path, seed: int) -> ShardDataset:
    return ShardDataset(folder, batch_size=1, seed=seed, lanes=2)


def mix(sets: dict[str, ShardDataset], batch: int, rank: int = 0, world: int = 1, **options: Any) -> Mixture:
    own = {"weights": [0.5, 0.25, 0.05, 0.2], "seed": 3, **options}
    return Mixture(sets, global_batch_size=batch, rank=rank, world_size=world, **own)


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint brings it back."""
    out: dict[str, Any] = json.loads(json.dumps(state))
    return out


def items(mixture: Mixture, places: Any) -> list[Item]:
    origin, read = places.origin, mixture._definition.options.read
    return list(
        zip(
            [read[number] for number in origin.source.tolist()],
            origin.epoch.tolist(),
            places.shard.tolist(),
            places.row.tolist(),
            strict=True,
        )
    )


def batches(mixture: Mixture, workers: int = 1) -> Iterator[tuple[list[Item], Any]]:
    """A pass as so many workers read it and a DataLoader puts it together: no sample is read."""
    with mixture.begin_pass() as reading:
        shares = deque(reading.plan.share(Worker(index, workers)) for index in range(workers))
        while (found := next(shares[0], None)) is not None:
            _, stamp, places = found
            yield items(mixture, places), stamp
            shares.rotate(-1)


def global_batches(mixtures: list[Mixture], workers: int) -> Iterator[tuple[list[Item], list[Any]]]:
    """What all ranks read together, batch by batch."""
    for parts in zip(*(batches(mixture, workers) for mixture in mixtures), strict=True):
        yield [item for part, _ in parts for item in part], [stamp for _, stamp in parts]


def sequence(sets: dict[str, ShardDataset], length: int, **options: Any) -> list[Item]:
    """The beginning of the mixture's one sequence."""
    mixture = mix(sets, 1, **options)
    out: list[Item] = []
    while len(out) < length:
        out += [item for batch, _ in batches(mixture) for item in batch]
    return out[:length]


def stamped(mixture: Mixture, stamp: Any) -> dict[str, Any]:
    """The state after a batch with that stamp."""
    batch = [_Stamped(stamp)] if stamp.size == 1 else _Stamped(stamp)
    return mixture.state_after(batch)


class _Stamped:
    def __init__(self, stamp: Any) -> None:
        self.stamp = stamp


STOPS = st.sampled_from(
    [
        {},
        {"stop": "first", "weights": [0.5, 0.25, 0, 0.2]},
        {"samples": 37},
        {"repeat": [1, 2, 3, 0.5], "weights": None},
        {"within": "batch"},
    ]
)


@given(STOPS, st.integers(1, 4), st.integers(1, 3), st.integers(4, 11), st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_global_batches_are_the_same_for_every_number_of_ranks_and_workers(
    sets: dict[str, ShardDataset], stop: dict[str, Any], world: int, workers: int, batch: int, seed: int
) -> None:
    alone = mix(sets, batch, seed=seed, **stop)
    ranks = [mix(sets, batch, rank, world, seed=seed, **stop) for rank in range(world)]
    for _ in range(2):
        expected = [part for part, _ in batches(alone)]
        assert [part for part, _ in global_batches(ranks, workers)] == expected
        assert len(expected) == alone.steps
        assert all(len(part) == batch for part in expected)


@given(STOPS, st.booleans(), st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_what_was_used_is_always_a_beginning_of_the_one_sequence(
    sets: dict[str, ShardDataset], stop: dict[str, Any], by_stamp: bool, seed: int
) -> None:
    """Resumed again and again, at other ranks, workers and batch sizes: nothing is lost, nothing comes twice."""
    stop = {name: value for name, value in stop.items() if name != "within"}  # that fixes what a batch has by its size
    rng = random.Random(seed)
    used: list[Item] = []
    state: dict[str, Any] | None = None
    for _ in range(5):
        world, workers, batch = rng.randint(1, 3), rng.randint(1, 3), rng.randint(3, 9)
        drop_last = world > 1 or rng.random() < 0.7
        ranks = [mix(sets, batch, rank, world, drop_last=drop_last, **stop) for rank in range(world)]
        if state is not None:
            for mixture in ranks:
                mixture.load_state_dict(stored(state))
        left, count = rng.randint(0, 12), 0
        states = [mixture.state_at(0) for mixture in ranks]
        while left:
            for part, stamps in global_batches(ranks, workers):
                used += part
                count += 1
                states = [stamped(mixture, stamp) for mixture, stamp in zip(ranks, stamps, strict=True)]
                left -= 1
                if not left:
                    break
        assert all(state == states[0] for state in states)
        assert ranks[0].state_at(count) == states[0]
        state = states[0] if by_stamp else ranks[0].state_at(count)
    assert used == sequence(sets, len(used), **stop)


def test_a_run_may_be_broken_off_at_every_position_three_times(sets: dict[str, ShardDataset]) -> None:
    options: dict[str, Any] = {"samples": 23}
    whole = sequence(sets, 92, **options)
    for first in range(24):
        used: list[Item] = []
        state = None
        for take, batch in ((first, 1), (2, 5), (1, 7), (2, 2)):
            mixture = mix(sets, batch, **options)
            if state is not None:
                mixture.load_state_dict(stored(state))
            taken = 0
            while taken < take:
                for part, _ in batches(mixture):
                    used += part
                    taken += 1
                    if taken == take:
                        break
            state = mixture.state_at(take)
        assert used == whole[: len(used)]


@given(STOPS, st.integers(0, 2**32))
@settings(max_examples=8, deadline=None)
def test_every_sample_of_a_source_comes_once_in_each_of_its_epochs(
    sets: dict[str, ShardDataset], stop: dict[str, Any], seed: int
) -> None:
    mixture = mix(sets, 5, seed=seed, **stop)
    seen: dict[int, list[tuple[int, int, int]]] = {}
    for _ in range(3):
        for part, _ in batches(mixture):
            for number, epoch, shard, row in part:
                seen.setdefault(number, []).append((epoch, shard, row))
    for number, counts in enumerate(COUNTS.values()):
        own, size = seen.get(number, []), sum(counts)
        for epoch in range(len(own) // size):
            turn = own[epoch * size : (epoch + 1) * size]
            assert sorted(turn) == [(epoch, s, row) for s, count in enumerate(counts) for row in range(count)]


@pytest.mark.parametrize("batch", [1, 4, 10, 20, 33])
def test_each_global_batch_has_its_proportions(sets: dict[str, ShardDataset], batch: int) -> None:
    weights = [0.5, 0.25, 0.05, 0.2]
    mixture = mix(sets, batch, within="batch", weights=weights, samples=20 * batch, drop_last=False)
    total: Counter[int] = Counter()
    for number, (part, _) in enumerate(batches(mixture), 1):
        here = Counter(item[0] for item in part)
        total += here
        for at, weight in enumerate(weights):
            assert abs(total[at] - weight * batch * number) < 2
            assert abs(here[at] - weight * batch) < 4
        if batch == 20:
            assert [here[at] for at in range(4)] == [10, 5, 1, 4]


@given(st.integers(0, 60), st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any), st.integers(1, 9))
@settings(max_examples=15, deadline=None)
def test_sources_go_on_where_they_stood_in_a_mixture_with_other_weights(
    sets: dict[str, ShardDataset], position: int, weights: list[int], batch: int
) -> None:
    before = mix(sets, 1, samples=37)
    used: list[Item] = []
    while len(used) < position:
        for part, _ in batches(before):
            used += part
            if len(used) >= position:
                break
    state = stored(before.state_at(position))
    after = mix(sets, batch, weights=weights, samples=90)
    with pytest.raises(StateError, match=r"weights|a mixture of"):
        after.load_state_dict(state)
    after.load_state_dict(stored(after.remixed(state)))
    more: list[Item] = []
    for part, _ in batches(after):
        more += part
    halfway = stored(after.state_at(3))
    again = mix(sets, 2, weights=weights, samples=90)
    again.load_state_dict(halfway)
    assert next(batches(again))[0] == [item for part, _ in batches(_loaded(after, halfway)) for item in part][:2]
    for at, counts in enumerate(COUNTS.values()):
        own = [item[1:] for item in used if item[0] == at]
        own += [item[1:] for item in more if item[0] == at]
        size = sum(counts)
        assert [epoch for epoch, _, _ in own] == [number // size for number in range(len(own))]
        for epoch in range(len(own) // size):  # those of a source that the new mixture leaves out are begun only
            assert len(set(own[epoch * size : (epoch + 1) * size])) == size


def _loaded(mixture: Mixture, state: dict[str, Any]) -> Mixture:
    mixture.load_state_dict(state)
    return mixture
