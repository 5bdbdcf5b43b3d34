"""A cache disk that fails, fills up or can only be read: right bytes all along, one warning, and its own recovery."""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import threading
from pathlib import Path

import pytest

from cachefs.client import Client, connect
from cachefs.daemon.disk import REOPEN_INTERVAL
from cachefs.flash import EntryKey, FlashStore
from cachefs.flash.health import PROBE_INTERVAL
from cachefs.metrics import Metrics
from cachefs.testing.clock import ManualClock
from cachefs.testing.diskops import CHANGES, WatchedOps
from cachefs.testing.enginebox import CHUNK, box_settings
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import Served, served


class MoodyOps(WatchedOps):
    """A disk whose changes, or whose every call, fail with ``error`` while that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.error: int | None = None
        self.calls = CHANGES

    def before(self, call: str, name: str) -> None:
        if self.error is not None and call in self.calls:
            raise OSError(self.error, os.strerror(self.error))


def objects(count: int = 6) -> ScriptedStore:
    return ScriptedStore({f"k{i}": random.Random(i).randbytes(3 * CHUNK + i) for i in range(count)})


def reads(client: Client, store: ScriptedStore, key: str) -> bool:
    """Read an object, check its bytes, and tell whether it came from the cache."""
    with client.open(f"s3://bucket/{key}") as shard:
        assert bytes(shard.view()) == store.objects[key]
        return shard.cached


def events(server: Served) -> list[str]:
    lines = (server.settings.cache_dir / "daemon.log").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_spell_of_failing_writes(tmp_path: Path, caplog: pytest.LogCaptureFixture, error: int) -> None:
    store, ops, clock = objects(), MoodyOps(), ManualClock()
    with served(tmp_path, store, ops=ops, clock=clock) as server, connect(server.settings) as client:
        assert reads(client, store, "k0")
        ops.error = error
        with caplog.at_level(logging.WARNING, logger="cachefs"):
            for key in ("k1", "k2", "k1", "k3"):
                assert not reads(client, store, key)
        assert len(caplog.records) == 1, "one warning, not one per read"
        assert "past the cache" in caplog.text
        store.calls.clear()
        assert reads(client, store, "k0"), "what is warm is still served"
        assert store.count("get") == 0
        ops.error = None
        clock.advance(PROBE_INTERVAL)
        assert reads(client, store, "k1"), "it recovers by itself"
        assert reads(client, store, "k4")
        assert client.stats()["disk_fault"] is None
    assert [e for e in events(server) if e.startswith("bypass")] == ["bypass_begins", "bypass_ends"]


def test_a_disk_that_fails_in_the_middle_of_a_fill(tmp_path: Path) -> None:
    store, ops, clock = objects(), MoodyOps(), ManualClock()
    with served(tmp_path, store, ops=ops, clock=clock) as server, connect(server.settings) as client:
        server.hold_reads()
        shard = client.open("s3://bucket/k1")
        assert shard.cached
        ops.error = errno.ENOSPC
        server.let_reads()
        assert bytes(shard.view()) == store.objects["k1"]
        assert not shard.cached
        assert "no space" in shard.uncached_reason.lower()
        shard.close()
        ops.error = None
        clock.advance(PROBE_INTERVAL)
        assert reads(client, store, "k1")


def test_a_warm_cache_that_can_only_be_read(tmp_path: Path) -> None:
    store, clock = objects(), ManualClock()
    with served(tmp_path, store, clock=clock) as server, connect(server.settings) as client:
        assert reads(client, store, "k0")
    ops = MoodyOps()
    ops.error = errno.EROFS
    ops.calls = CHANGES | {"open_write", "sync"}
    with served(tmp_path, store, clock=clock, ops=ops) as server, connect(server.settings) as client:
        store.calls.clear()
        assert reads(client, store, "k0")
        assert store.count("get") == 0
        assert not reads(client, store, "k1")
        assert not reads(client, store, "k1")
        ops.error = None
        clock.advance(PROBE_INTERVAL)
        assert reads(client, store, "k1")


def test_a_directory_that_cannot_be_opened_at_first(tmp_path: Path) -> None:
    store, ops, clock = objects(), MoodyOps(), ManualClock()
    ops.error = errno.EIO
    ops.calls = frozenset({"open_top", "open_dir", *CHANGES})
    with served(tmp_path, store, ops=ops, clock=clock) as server, connect(server.settings) as client:
        assert not reads(client, store, "k0")
        assert "Input/output error" in str(client.stats()["disk_fault"])
        ops.error = None
        clock.advance(REOPEN_INTERVAL)
        assert reads(client, store, "k0")
        assert client.stats()["disk_fault"] is None


def test_a_file_that_rotted_while_no_daemon_ran_is_healed_under_its_readers(tmp_path: Path) -> None:
    store = objects(1)
    with served(tmp_path, store) as server, connect(server.settings) as client:
        assert reads(client, store, "k0")
    size = len(store.objects["k0"])
    (path,) = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size == size]
    with open(path, "r+b") as file:
        file.seek(2 * CHUNK)
        file.write(b"rot")
    with served(tmp_path, store) as server, connect(server.settings) as client:
        first, second = client.open("s3://bucket/k0"), client.open("s3://bucket/k0")
        for shard in (first, second):
            assert bytes(shard.view()) == store.objects["k0"]
            assert shard.cached
            shard.close()
        assert client.stats()["flash_bad_chunks"] == 1


class SlowOps(WatchedOps):
    """Writes of data wait for ``go``, once ``slow`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self.writing, self.go = threading.Event(), threading.Event()

    def before(self, call: str, name: str) -> None:
        if self.slow and call == "write":
            self.writing.set()
            assert self.go.wait(30)


def test_closing_waits_for_a_write_under_a_lease_and_no_longer(tmp_path: Path) -> None:
    ops = SlowOps()
    store = FlashStore.open(box_settings(tmp_path / "cache"), metrics=Metrics(), ops=ops)
    entry = store.create(EntryKey("e", "s3://b/k", "v"), 2 * CHUNK, lease=True)
    ops.slow = True
    writer = threading.Thread(target=entry.write_chunk, args=(0, bytes(CHUNK)))
    closer = threading.Thread(target=store.close)
    writer.start()
    assert ops.writing.wait(30)
    closer.start()
    closer.join(0.1)
    assert closer.is_alive(), "a write is under way"
    ops.go.set()
    writer.join(30)
    closer.join(20)
    assert not closer.is_alive()
