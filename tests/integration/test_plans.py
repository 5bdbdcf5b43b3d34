"""A job that declares what it will read, through a real socket, daemon and disk: it costs what the simulator says."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from cachefs.client import Client, connect
from cachefs.flash.quota import HEADROOM_BLOCKS
from cachefs.schedule import Plan
from cachefs.shard import ObjectStat
from cachefs.testing.enginebox import CHUNK
from cachefs.testing.flashkit import fill, open_store, thing
from cachefs.testing.replay import Replay
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import Served, served

SIZE, COUNT, FITS = 4 * CHUNK, 24, 6
"""Bytes of an object, how many there are, and how many the cache holds: a quarter."""


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.002)


@pytest.fixture
def quota(tmp_path: Path) -> int:
    """Just room for ``FITS`` objects."""
    with open_store(tmp_path / "weighed") as store:
        empty = store.usage().used
        fill(store, thing("one", SIZE))
        one = store.usage().used - empty
        block = store._parts.layout.block_bytes
    return empty + HEADROOM_BLOCKS * block + FITS * one + one // 2


@pytest.fixture
def server(tmp_path: Path, quota: int) -> Iterator[Served]:
    rng = random.Random(2)
    store = ScriptedStore({f"k{i:02d}": rng.randbytes(SIZE) for i in range(COUNT)})
    with served(tmp_path, store, quota=quota) as running:
        yield running


def settled(server: Served) -> None:
    """Return once everything was brought in that is to be brought in now."""
    until(lambda: server.call(lambda: not server.control._prefetcher.busy and not server.box.engine.fetcher.busy))


def read(client: Client, stat: ObjectStat, data: bytes) -> None:
    with client.open(stat.url, version=stat.version, size=stat.size) as shard:
        view = shard.view()
        assert view == data
        view.release()


def epoch(number: int) -> list[int]:
    order = list(range(COUNT))
    random.Random(number).shuffle(order)
    return order


def uses_of(orders: Sequence[list[int]], first: int = 0) -> list[tuple[int, int, int]]:
    """Object ``n`` at a position of its own in each epoch."""
    return [(n, COUNT * e + at, COUNT * e + at) for e, order in enumerate(orders, first) for at, n in enumerate(order)]


@pytest.mark.parametrize("horizon", [1, 2, 3])
def test_origin_fetches_are_those_of_the_simulator(server: Served, quota: int, horizon: int) -> None:
    """Each epoch declares itself and the next ``horizon - 1``."""
    data = list(server.store.objects.values())
    replay = Replay(FITS * SIZE, budget=quota // 8)
    with connect(server.settings) as client:
        stats = client.list("s3://bucket/")
        for number in range(3):
            uses = uses_of([epoch(n) for n in range(number, min(3, number + horizon))], number)
            position = number * COUNT
            assert client.plan("train", stats, uses, position=position)
            replay.declare("train", Plan.of([s.url for s in stats], [SIZE] * COUNT, uses), position=position)
            for at, n in enumerate(epoch(number), position):
                assert client.progress("train", at)
                settled(server)
                read(client, stats[n], data[n])
                replay.progress("train", at)
                replay.access(stats[n].url, SIZE)
        shown = client.stats()
    fetches = server.store.count("get") / (SIZE // CHUNK)
    assert fetches == replay.fetches
    assert shown["plans"] == 1 and shown["plan_objects"] == COUNT
    assert str(shown["plan_progress"]).endswith(f": {3 * COUNT - 1} of {3 * COUNT}")
    assert shown["open_bypasses"] == replay.bypassed == 0
    if horizon > 1:
        assert 3 * COUNT - fetches >= 2 * (FITS - 2), "what fits besides what is read and what comes next stays"
