"""What a mixture asks for ahead: the shards of every source before they are read, and of its next epoch in time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loader.epochs import Orders
from loader.mixing import Mixing
from loader.mixtureahead import MixtureAhead
from loader.mixtureorder import MixtureOrder, MixtureSettings, SourceOrders


class Asked:
    """A client that notes the shards it is asked for, in order."""

    def __init__(self) -> None:
        self.shards: list[int] = []

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
    settings = MixtureSettings(3, 16, 0, 0, total, (0,) * len(counts), tuple(one.settings for one in orders))
    sources = [SourceOrders(one) for one in orders]
    return MixtureOrder(Mixing(shares, 16, 3), sources, settings, epoch=0, total=total, usual=total)


@pytest.mark.parametrize("begin", [0, 100, 301])
@pytest.mark.parametrize("batch", [1, 8, 50])
def test_each_shard_is_asked_for_before_it_is_read(batch: int, begin: int) -> None:
    order = order_of([[4] * 60, [3] * 50, [2, 1], [5] * 9], (5, 3, 1, 2), 600)
    clients = [Asked() for _ in range(4)]
    manifests = [manifest("s3://b/", 60), manifest("s3://b/", 50), manifest("s3://b/", 2), manifest("/local/", 9)]
    sources: Any = [SimpleNamespace(client=client) for client in clients]
    ahead = MixtureAhead(order, begin, sources, manifests)
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
    assert not MixtureAhead(order, 0, [SimpleNamespace()], [manifest("/local/", 6)]).remote  # type: ignore[list-item]
