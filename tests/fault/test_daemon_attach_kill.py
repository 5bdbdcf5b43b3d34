"""``kill -9`` of the daemon while clients attach: what is found later is right or absent, and nothing is left over."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from cachefs.config import MIB
from cachefs.objstore import BlockingStore
from cachefs.testing.node import Node, node, wait_until
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.chaos]

KEYS = ["a", "b"]
NAMES = [f"index.{n}" for n in range(4)]


def derived(key: str, name: str) -> bytes:
    return random.Random(key + name).randbytes(3 * MIB + 11)


def attach_until_killed(target: Node, bucket: str, pause: float) -> None:
    """Attach from two threads; the daemon dies after ``pause`` seconds of it."""
    with target.client() as client:
        shards = {key: client.open(f"s3://{bucket}/{key}") for key in KEYS}
        over = threading.Event()

        def work(key: str) -> None:
            while not over.is_set():
                for name in NAMES:
                    shards[key].attach(name, derived(key, name))
                    found = shards[key].attachment(name)
                    assert found is None or found == derived(key, name)

        threads = [threading.Thread(target=work, args=(key,)) for key in KEYS]
        failed: list[BaseException] = []
        hook, threading.excepthook = threading.excepthook, lambda args: failed.append(args.exc_value or SystemExit())
        try:
            for thread in threads:
                thread.start()
            over.wait(pause)  # the moment of the kill is the input of this test
            assert target.kill_daemon()
            over.set()
            for thread in threads:
                thread.join(60)
        finally:
            threading.excepthook = hook
        assert failed == []
        for shard in shards.values():
            shard.close()


@pytest.mark.timeout(300)
def test_a_daemon_killed_while_clients_attach(tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str) -> None:
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        for key in KEYS:
            store.put(key, random.Random(key).randbytes(2 * MIB))
    rng = random.Random(8)
    with node(tmp_path, seaweed.origin, quota=64 * MIB, connect_timeout=60.0) as target:
        folder = target.settings.cache_dir / "nearflash-v1" / "attached"
        for _ in range(3):
            attach_until_killed(target, s3_bucket, rng.uniform(0.02, 0.25))
            with target.client() as client:  # its daemon is an heir
                for key in KEYS:
                    with client.open(f"s3://{s3_bucket}/{key}") as shard:
                        for name in NAMES:
                            assert shard.attachment(name) in (None, derived(key, name))
                assert not list(folder.glob("*.new"))
                stats = client.stats()
                assert stats["flash_bad_attachments"] == 0, "whole or absent: a kill is no power cut"
                assert int(stats["used_bytes"] or 0) >= sum(p.stat().st_blocks * 512 for p in folder.iterdir())
                wait_until(lambda c=client: c.stats()["leases"] == 0)  # type: ignore[misc]
                assert client.evict([f"s3://{s3_bucket}/a"]).entries == 1
                wait_until(lambda c=client: c.stats()["dying_bytes"] == 0)  # type: ignore[misc]
        with target.client() as client:
            for key in KEYS:
                with client.open(f"s3://{s3_bucket}/{key}") as shard:
                    for name in NAMES:
                        shard.attach(name, derived(key, name))
                        assert shard.attachment(name) == derived(key, name)
            wait_until(lambda: client.stats()["leases"] == 0)
            assert client.evict(None).entries == 2
            wait_until(lambda: client.stats()["dying_bytes"] == 0)
            assert list(folder.iterdir()) == []
