"""What every kind of shard promises: a local file, a cached object, one that is being cached, one past the cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.client import Client, Shard, connect
from cachefs.errors import ConfigError, NearflashError
from cachefs.testing.enginebox import CHUNK
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import served

DATA = {"k": random.Random(3).randbytes(5 * CHUNK + 77), "empty": b""}
Opener = Callable[[str], Shard]


@pytest.fixture(params=["local", "cached", "filling", "past the cache"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the objects of ``DATA`` by key, each time anew."""
    opened: list[Shard] = []

    def through(client: Client, prefix: str) -> Opener:
        def open_one(key: str) -> Shard:
            opened.append(client.open(f"{prefix}/{key}"))
            return opened[-1]

        return open_one

    store = ScriptedStore(dict(DATA))
    quota = 3 * CHUNK if request.param == "past the cache" else 64 << 20
    with served(tmp_path, store, quota=quota) as server, connect(server.settings) as client:
        if request.param == "local":
            for key, data in DATA.items():
                (tmp_path / key).write_bytes(data)
            yield through(client, str(tmp_path))
        else:
            if request.param == "cached":
                for key in DATA:
                    with client.open(f"s3://bucket/{key}") as shard:
                        shard.view()
            yield through(client, "s3://bucket")
        for shard in opened:
            shard.close()


@pytest.mark.parametrize("key", DATA)
def test_a_view_is_all_of_the_object_and_nobody_elses(opener: Opener, key: str) -> None:
    shard = opener(key)
    view = shard.view()
    assert (len(view), view.format, view.ndim, view.readonly) == (len(DATA[key]), "B", 1, False)
    assert bytes(view) == DATA[key]
    view[:] = bytes(len(view))
    assert bytes(shard.view()) == DATA[key]


@pytest.mark.parametrize("key", DATA)
def test_a_filling_view_has_the_bytes_that_are_ready(opener: Opener, key: str) -> None:
    shard, data = opener(key), DATA[key]
    filling = shard.filling()
    view = filling.view
    assert (len(view), view.format, view.ndim, view.readonly) == (len(data), "B", 1, False)
    for start, end in ((len(data) - 5, len(data)), (0, 1), (CHUNK - 1, CHUNK + 1), (7, 7), (0, len(data))):
        start, end = max(0, start), min(end, len(data))
        filling.ready(min(start, end), end)
        assert view[start:end] == data[start:end]
    view[:] = bytes(len(view))
    assert bytes(shard.view()) == data
    shard.close()
    filling.ready(0, len(data))  # known to be there


@pytest.mark.parametrize(("start", "end"), [(-1, 1), (2, 1), (0, len(DATA["k"]) + 1)])
def test_ranges_outside_the_object_are_refused(opener: Opener, start: int, end: int) -> None:
    shard = opener("k")
    filling = shard.filling()
    for call in (shard.wait, filling.ready):
        with pytest.raises(ConfigError, match=r"k: bytes -?\d+ to \d+ are not within its 327757"):
            call(start, end)
    filling.ready(0, len(DATA["k"]))
    with pytest.raises(ConfigError):
        filling.ready(start, end)


def test_attachments_are_kept_with_cached_objects_alone(opener: Opener) -> None:
    shard = opener("k")
    kept = shard.cached and shard.url.startswith("s3:")
    assert shard.attachment("x") is None
    shard.attach("x", b"derived")
    assert shard.attachment("x") == (b"derived" if kept else None)
    assert opener("k").attachment("x") == (b"derived" if kept else None)
    assert opener("empty").attachment("x") is None
    for call in (lambda: shard.attachment("X"), lambda: shard.attach("X", b"")):
        with pytest.raises(ConfigError, match="k: 'X' is not the name of an attachment"):
            call()


def test_a_closed_shard_says_so(opener: Opener) -> None:
    shard = opener("k")
    shard.close()
    shard.close()
    calls = (shard.fileno, shard.view, shard.filling, lambda: shard.attachment("x"), lambda: shard.attach("x", b""))
    for call in calls:
        with pytest.raises(NearflashError, match="closed"):
            call()
