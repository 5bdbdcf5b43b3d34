"""``kill -9`` of the daemon at random moments of a cold fill: right bytes, nothing to clean, never beyond the quota."""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.client import Client
from cachefs.config import MIB
from cachefs.objstore import BlockingStore
from cachefs.testing.node import Node, node, wait_until
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.chaos]

SIZES = {"a": 6 * MIB + 17, "b": 3 * MIB, "c": 9 * MIB + 1, "d": 100}
QUOTA = 14 * MIB
"""Less than all objects together, so that fills evict while they are interrupted."""


def disk_use(folder: Path) -> int:
    """Blocks of everything below a folder, in bytes; files that vanish meanwhile take none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


class Killer:
    """Kills the node's daemon at seeded moments and watches the disk all along."""

    def __init__(self, target: Node, seed: int, kills: int) -> None:
        self._node = target
        self._rng = random.Random(seed)
        self._left = kills
        self._over = threading.Event()
        self.kills = 0
        self.most = 0
        self._threads = [threading.Thread(target=self._kill), threading.Thread(target=self._watch)]

    def _kill(self) -> None:
        while self._left and not self._over.wait(self._rng.uniform(0.02, 0.5)):
            if self._node.kill_daemon():
                self.kills += 1
                self._left -= 1
                pid = self._node.daemon_pid
                # the next kill shall meet a daemon at work, not the start of one
                while self._node.daemon_pid == pid and not self._over.wait(0.01):
                    pass

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.most = max(self.most, disk_use(self._node.settings.cache_dir))

    @property
    def finished(self) -> bool:
        return not self._left

    def __enter__(self) -> Killer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


@contextmanager
def objects(seaweed: SeaweedServer, bucket: str) -> Iterator[dict[str, str]]:
    digests = {}
    with BlockingStore(f"s3://{bucket}", seaweed.origin) as store:
        for key, size in SIZES.items():
            data = random.Random(key).randbytes(size)
            store.put(key, data)
            digests[key] = hashlib.sha256(data).hexdigest()
    yield digests


def read_all(client: Client, bucket: str, digests: dict[str, str], keys: list[str]) -> None:
    for key in keys:
        with client.open(f"s3://{bucket}/{key}") as shard:
            assert hashlib.sha256(shard.view()).hexdigest() == digests[key], f"wrong bytes of {key}"


def kill_during_fills(tmp_path: Path, seaweed: SeaweedServer, bucket: str, *, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    with (
        objects(seaweed, bucket) as digests,
        CountingProxy(seaweed.endpoint, rate=12 * MIB) as proxy,
        node(
            tmp_path,
            replace(seaweed.origin, endpoint=proxy.endpoint),
            quota=QUOTA,
            chunk_size=256 * 1024,
            transfer_bytes=4 * MIB,
            connect_timeout=60.0,
        ) as target,
    ):
        deadline = time.monotonic() + 30 + 15 * kills
        with target.client() as client, Killer(target, seed, kills) as killer:
            while not killer.finished:
                assert time.monotonic() < deadline, f"{killer.kills} kills in the time for {kills}"
                read_all(client, bucket, digests, rng.sample(sorted(SIZES), len(SIZES)))
                client.evict(None)
        assert killer.kills == kills
        with target.client() as client:
            read_all(client, bucket, digests, sorted(SIZES))
            stats = client.stats()
            assert int(stats["used_bytes"] or 0) <= QUOTA
            assert stats["disk_fault"] is None
            client.evict(None)
            wait_until(lambda: client.stats()["dying_bytes"] == 0)
            assert client.stats()["entries"] == 0
        own = {"daemon.json", "daemon.log", "lock", "MARKER"}
        left = [p for p in target.settings.cache_dir.rglob("*") if p.is_file() and p.name not in own]
        assert left == [], "nothing of a killed daemon stays behind"
        assert killer.most <= QUOTA, f"{killer.most} bytes on disk with a quota of {QUOTA}"
        assert sorted(os.listdir(target.settings.socket.parent)) == ["s.sock", "s.sock.lock", "s.sock.start"]


def test_three_kills(tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str) -> None:
    kill_during_fills(tmp_path, seaweed, s3_bucket, kills=3, seed=11)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_twenty_kills(tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str, seed: int) -> None:
    kill_during_fills(tmp_path, seaweed, s3_bucket, kills=20, seed=seed)
