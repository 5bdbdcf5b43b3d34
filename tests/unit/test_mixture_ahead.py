"""What a mixture asks for ahead: the shards of every source before they are read, and of its next epoch in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.epochs import Orders
from loader.mixing import Mixing
from loader.mixtureahead import MixtureAhead
from loader.mixtureorder import MixtureOrder, MixtureSettings, SourceOrders
from loader.planahead import PlanNames


class Asked:
    """A client of a daemon that takes no plans: it notes the shards it is asked for, in order."""

    settings: Any = None

    def __init__(self, settings: object) -> None:
        self.settings = settings
        self.shards: list[int] = []

    def plan(self, *args: Any, **options: Any) -> bool:
        return False

    def withdraw(self, name: str) -> None:
        """It took none."""

    def prefetch(self, stats: list[Any]) -> None:
        self.shards += [stat.shard for stat in stats]


def manifest(scheme: str, shards: int) -> Any:
    stats = [SimpleNamespace(url=f"{scheme}{number}", shard=number) for number in range(shards)]
    return SimpleNamespace(shards=stats, stat=stats.__getitem__, format=SimpleNamespace(folder=False))


def order_of(counts: list[list[int]], shares: tuple[int, ...], total: int) -> MixtureOrder:
    orders = []
    for seed, own in enumerate(counts):
        array = np.array(own, dtype=np.int64)
        orders.append(Orders.begin(array, array * 10, batch=8, lanes=2, seed=seed, block_shards=2, shuffle=True))
    made = MixtureSettings(3, 16, 0, 0, total, (0,) * len(counts), tuple(one.settings for one in orders))
    sources = [SourceOrders(one) for one in orders]
    return MixtureOrder(Mixing(shares, 16, 3), sources, made, epoch=0, total=total, usual=total)


@pytest.mark.parametrize("begin", [0, 100, 301])
@pytest.mark.parametrize("batch", [7, 50])
def test_each_shard_is_asked_for_before_it_is_read(batch: int, begin: int) -> None:
    order = order_of([[4] * 60, [3] * 50, [2, 1], [5] * 9], (5, 3, 1, 2), 600)
    clients = [Asked(number) for number in range(4)]
    manifests = [manifest("s3://b/", 60), manifest("s3://b/", 50), manifest("s3://b/", 2), manifest("/local/", 9)]
    sources: Any = [SimpleNamespace(client=client) for client in clients]
    ahead = MixtureAhead(order, begin, sources, manifests, PlanNames())
    assert ahead.remote
    used: list[set[int]] = [set() for _ in clients]
    for first in range(begin, 600, batch):
        last = min(first + batch, 600)
        ahead.reach(last)
        places = order.places(np.arange(first, last, dtype=np.int64))
        assert places.origin is not None
        for source, shard in zip(places.origin.source.tolist(), places.shard.tolist(), strict=True):
            used[source].add(shard)
            assert source == 3 or shard in clients[source].shards
    ahead.close()
    assert clients[3].shards == [], "a local file is there"
    at = order.taken(600).tolist()
    for source, size in ((0, 240), (1, 150)):
        asked = clients[source].shards
        # the window is about 16 shards, of this epoch of the source and of the next one
        if at[source] <= size - size // 8 - 16:
            assert len(set(asked)) == len(asked) <= len(used[source]) + 24


def test_nothing_is_asked_of_local_files() -> None:
    order = order_of([[4] * 6], (1,), 20)
    sources: Any = [SimpleNamespace()]
    assert not MixtureAhead(order, 0, sources, [manifest("/local/", 6)], PlanNames()).remote


class Planned:
    """A client of a daemon that takes plans, and forgets the first one."""

    settings = "the same"

    def __init__(self) -> None:
        self.plans: dict[str, Any] = {}
        self.told: list[int] = []
        self.forgets = 1
        self.resting: list[str] = []

    def plan(self, name: str, objects: Any, uses: Any, *, position: int) -> bool:
        self.plans[name] = (objects, uses, position)
        return True

    def progress(self, name: str, position: int) -> bool:
        self.told.append(position)
        self.forgets -= 1
        return name in self.plans and self.forgets != 0

    def pause(self, name: str) -> None:
        self.resting.append(name)

    def withdraw(self, name: str) -> None:
        del self.plans[name]

    def prefetch(self, stats: Any) -> None:
        raise AssertionError("the plan says what is needed")


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=40), min_size=1, max_size=4),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.integers(0, 200),
)
@settings(max_examples=15, deadline=None)
def test_one_plan_says_when_each_shard_is_read_in_this_epoch_and_the_next(
    counts: list[list[int]], shares: list[int], begin: int
) -> None:
    order = order_of(counts, tuple(shares[: len(counts)]), 200)
    manifests = [manifest(f"s3://{source}/", len(own)) for source, own in enumerate(counts)]
    clients = [Planned() for _ in counts]
    sources: Any = [SimpleNamespace(client=client) for client in clients]
    ahead = MixtureAhead(order, begin, sources, manifests, PlanNames())
    ahead.reach(begin)
    [(objects, uses, position)] = clients[0].plans.values()
    assert position == begin and not any(client.plans for client in clients[1:])
    declared: dict[str, list[tuple[int, int]]] = {}
    for number, first, last in uses:
        assert begin <= first <= last < 400
        declared.setdefault(objects[number].url, []).append((first, last))
    places = order.places(np.arange(begin, 400, dtype=np.int64))
    assert places.origin is not None
    for at, source, shard in zip(range(begin, 400), places.origin.source, places.shard, strict=True):
        assert any(first <= at <= last for first, last in declared[f"s3://{source}/{shard}"])
    for at in range(begin, 200):
        ahead.reach(at)
    assert clients[0].told == sorted(clients[0].told)
    [(_, _, position)] = clients[0].plans.values()
    assert position in (begin, clients[0].told[0] if clients[0].told else begin)  # declared anew where it was unknown
    ahead.close()
    ahead.close()
    assert clients[0].resting == list(clients[0].plans), "until the next pass's takes its place"
