"""Small parts of the daemon: idleness, its place in the file system, its log, single flight, prefetching."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from cachefs.config import Origin
from cachefs.daemon.idle import IdleWatch
from cachefs.daemon.log import LOG_NAME, MOST_LOG_BYTES, Log, safe_text
from cachefs.daemon.origins import Access, Origins
from cachefs.daemon.place import ListeningSocket, SocketLock
from cachefs.daemon.prefetch import PARALLEL, Prefetcher, Wish
from cachefs.daemon.singleflight import SingleFlight
from cachefs.daemon.transfers import Transfers
from cachefs.errors import CacheError, ConfigError, Unavailable
from cachefs.metrics import Metrics
from cachefs.objstore.url import parse_url
from cachefs.testing.clock import ManualClock
from cachefs.testing.enginebox import ACCESS, CHUNK, EngineBox, engine_box, until
from cachefs.testing.scripted import ScriptedStore

# --- idle -----------------------------------------------------------------------------------------------------------


def test_idleness_counts_from_the_last_use() -> None:
    watch = IdleWatch(10.0, now=0.0)
    assert not watch.expired(busy=False, now=9.9)
    assert not watch.expired(busy=True, now=50.0)
    assert not watch.expired(busy=False, now=59.9)
    assert watch.expired(busy=False, now=60.0)


def test_a_timeout_of_zero_never_expires() -> None:
    assert not IdleWatch(0.0, now=0.0).expired(busy=False, now=1e9)


# --- place ----------------------------------------------------------------------------------------------------------


def test_one_holder_at_a_time_and_the_lock_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    first = SocketLock.take(path)
    assert first is not None
    assert SocketLock.take(path) is None
    first.close()
    first.close()
    second = SocketLock.take(path)
    assert second is not None
    second.close()
    assert stat.S_IMODE(os.stat(f"{path}.lock").st_mode) == 0o600


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "s.sock.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="cannot be locked"):
        SocketLock.take(tmp_path / "s.sock")
    assert not (tmp_path / "victim").exists()


def test_the_socket_replaces_a_dead_one_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with ListeningSocket(path) as place:
        assert place.in_place
        assert stat.S_IMODE(os.lstat(path).st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert os.listdir(tmp_path) == []


def test_a_socket_that_is_not_ours_any_more_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with ListeningSocket(path) as place:
        path.unlink()
        assert not place.in_place
        path.write_text("somebody else's")
        assert not place.in_place
    assert path.read_text() == "somebody else's"


def test_a_path_too_long_for_a_socket_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set NEARFLASH_SOCKET to a short path"):
        ListeningSocket(tmp_path / ("x" * 150))


# --- log ------------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def running(log: Log) -> AsyncIterator[None]:
    writing = asyncio.create_task(log.run())
    try:
        yield
    finally:
        log.close()
        await asyncio.wait_for(writing, 30)


def test_records_are_one_json_line_each_with_the_clocks_time(tmp_path: Path) -> None:
    async def test() -> None:
        log = Log(tmp_path, ManualClock(time=123.0))
        async with running(log):
            log.record("started", pid=1)
            log.record("odd", text="two\nlines \u00e9", flag=True, nothing=None)

    asyncio.run(test())
    lines = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert lines == [
        {"time": 123.0, "event": "started", "pid": 1},
        {"time": 123.0, "event": "odd", "text": "two lines \u00e9", "flag": True, "nothing": None},
    ]
    assert stat.S_IMODE((tmp_path / LOG_NAME).stat().st_mode) == 0o600


def test_signatures_in_urls_are_cut_off() -> None:
    assert safe_text("https://h/k?X-Amz-Signature=abc: cut") == "https://h/k cut"
    assert safe_text("s3://b/what?is=this") == "s3://b/what?is=this"


def test_a_log_that_cannot_be_written_costs_records_only(tmp_path: Path) -> None:
    folder = tmp_path / "gone"

    async def test() -> None:
        log = Log(folder, ManualClock())
        async with running(log):
            log.record("lost")
            await asyncio.sleep(0.05)
            folder.mkdir()
            log.record("kept")

    asyncio.run(test())
    (line,) = (folder / LOG_NAME).read_text().splitlines()
    assert json.loads(line)["event"] == "kept"


def test_the_log_is_bounded_at_every_moment(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def test() -> None:
        log = Log(tmp_path, ManualClock())
        async with running(log):
            for _ in range(40):
                for _ in range(100):
                    log.record("event", text="x" * 1000)
                await asyncio.sleep(0.005)
                with contextlib.suppress(FileNotFoundError):  # renamed while we look
                    sizes.append(sum(p.stat().st_size for p in tmp_path.iterdir()))

    asyncio.run(test())
    assert {p.name for p in tmp_path.iterdir()} == {LOG_NAME, LOG_NAME + ".1"}
    assert max(sizes) <= MOST_LOG_BYTES
    last = json.loads((tmp_path / LOG_NAME).read_text().splitlines()[-1])
    assert last["event"] == "event"


def test_a_long_field_is_cut_and_a_burst_costs_records_not_memory(tmp_path: Path) -> None:
    async def test() -> None:
        log = Log(tmp_path, ManualClock())
        for _ in range(10_000):
            log.record("burst", text="y" * 100_000)
        assert log.queued_bytes <= (1 << 20) + 4096, "at most one record beyond"
        async with running(log):
            await until(lambda: not log.queued_bytes)
            log.record("after")

    asyncio.run(test())
    lines = [json.loads(line) for line in (tmp_path / LOG_NAME).read_text().splitlines()]
    assert len(lines[0]["text"]) <= 2048
    assert lines[0]["text"].endswith("\u2026")
    assert lines[-1]["lost_records"] > 9000


# --- single flight --------------------------------------------------------------------------------------------------


def test_callers_share_one_run_its_result_and_its_error() -> None:
    async def test() -> None:
        flight: SingleFlight[int] = SingleFlight()
        runs = 0

        async def work() -> int:
            nonlocal runs
            runs += 1
            await asyncio.sleep(0.01)
            if runs == 2:
                raise CacheError("no")
            return runs

        assert await asyncio.gather(*(flight.do("k", work) for _ in range(5))) == [1] * 5
        results = await asyncio.gather(*(flight.do("k", work) for _ in range(3)), return_exceptions=True)
        assert [type(r) for r in results] == [CacheError] * 3
        assert await flight.do("k", work) == 3

    asyncio.run(test())


def test_the_work_goes_on_for_those_who_stay_and_ends_with_the_last() -> None:
    async def test() -> None:
        flight: SingleFlight[str] = SingleFlight()
        release, cancelled = asyncio.Event(), asyncio.Event()

        async def work() -> str:
            try:
                await release.wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return "done"

        first, second = (asyncio.create_task(flight.do("k", work)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        release.set()
        assert await second == "done"
        release.clear()
        third = asyncio.create_task(flight.do("k", work))
        await asyncio.sleep(0.01)
        third.cancel()
        await asyncio.wait_for(cancelled.wait(), 5)
        release.set()
        assert await flight.do("k", work) == "done"

    asyncio.run(test())


# --- prefetch -------------------------------------------------------------------------------------------------------


def wishes(*keys: str) -> list[Wish]:
    return [Wish(f"s3://bucket/{key}", None, None, ACCESS) for key in keys]


def test_wishes_are_brought_in_order_each_once_and_failures_do_not_stop_them(tmp_path: Path) -> None:
    store = ScriptedStore({f"k{i}": random.Random(i).randbytes(2 * CHUNK) for i in range(8)})

    async def test() -> None:
        async with engine_box(tmp_path / "cache", store) as box:
            prefetcher = Prefetcher(box.engine, box.metrics, box.log)
            task = asyncio.create_task(prefetcher.run())
            await prefetcher.add(wishes("k3", "absent", "k1", "k3", "k0", "k5", "k6", "k7", "k2"))
            assert prefetcher.busy
            await until(lambda: not prefetcher.busy)
            task.cancel()
            gets = [c.key for c in store.calls if c.kind == "get"]
            assert sorted(gets) == sorted([f"k{i}" for i in (0, 1, 2, 3, 5, 6, 7)] * 2)
            first_seen = list(dict.fromkeys(gets))
            assert set(first_seen[: PARALLEL - 1]) <= {"k3", "k1", "k0", "k5"}
            assert first_seen[-1] in {"k2", "k7", "k6"}
            assert box.metrics.get("prefetch_failures") == 1
            assert await cached(box) == 7 * 2 * CHUNK
            assert all(e.leases <= 1 for e in await box.engine.entries()), "idle at most"

    asyncio.run(test())


async def cached(box: EngineBox) -> int:
    return sum(e.cached_bytes for e in await box.engine.entries())


def test_the_queue_is_bounded_and_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_box(tmp_path / "cache", ScriptedStore()) as box:
            room = sum(wish.memory for wish in wishes(*"abcde"))
            prefetcher = Prefetcher(box.engine, box.metrics, box.log, most_bytes=room)
            await prefetcher.add(wishes(*"abcdefg"))
            await prefetcher.add(wishes("a"))
            assert box.metrics.get("prefetch_dropped") == 2
            assert box.metrics.get("prefetch_queued") == 5

    asyncio.run(test())


def test_long_wishes_take_more_of_the_queue_than_short_ones(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine_box(tmp_path, ScriptedStore()) as box:
            prefetcher = Prefetcher(box.engine, box.metrics, box.log, most_bytes=10_000)
            await prefetcher.add(wishes(*(f"{i:03}" + "k" * 997 for i in range(100))))
            assert 90 <= box.metrics.get("prefetch_dropped") < 100
            task = asyncio.create_task(prefetcher.run())
            await until(lambda: not prefetcher.busy)
            before = box.metrics.get("prefetch_dropped")
            await prefetcher.add(wishes("k" * 1000))
            assert box.metrics.get("prefetch_dropped") == before, "what was worked off is room again"
            await until(lambda: not prefetcher.busy)
            task.cancel()

    asyncio.run(test())


def test_objects_that_do_not_fit_are_skipped(tmp_path: Path) -> None:
    store = ScriptedStore({"big": bytes(4 << 20), "small": b"x"})

    async def test() -> None:
        async with engine_box(tmp_path / "cache", store, quota=1 << 20) as box:
            prefetcher = Prefetcher(box.engine, box.metrics, box.log)
            task = asyncio.create_task(prefetcher.run())
            await prefetcher.add(wishes("big", "small"))
            await until(lambda: not prefetcher.busy)
            task.cancel()
            assert box.metrics.get("prefetch_bypassed") == 1
            assert [e.url for e in await box.engine.entries()] == ["s3://bucket/small"]

    asyncio.run(test())


class SlowToClose(ScriptedStore):
    """Its closing waits for its gate."""

    async def close(self) -> None:
        assert self.gate is not None
        await self.gate.wait()
        await super().close()


def test_a_bucket_that_is_opened_while_idle_ones_are_closed_works() -> None:
    async def test() -> None:
        gate = asyncio.Event()
        transfers = Transfers(100, Metrics())
        origins = Origins(lambda url, origin: SlowToClose(gate=gate), transfers, 4, ManualClock())
        accesses = [Access.by(Origin(session_token=str(i))) for i in range(66)]
        target = parse_url("s3://bucket/k")
        first = [origins.bucket(target, access) for access in accesses]
        closing = asyncio.create_task(origins.close_idle())
        await asyncio.sleep(0)
        with origins.bucket(target, accesses[1]) as bucket:
            gate.set()
            await closing
            assert not cast(SlowToClose, bucket.store).closed
            async with asyncio.timeout(10), transfers.turn(bucket.lane, 10):
                pass
        assert [cast(SlowToClose, b.store).closed for b in first] == [True] * 2 + [False] * 64

    asyncio.run(test())


def test_a_store_that_fails_to_close_does_not_keep_the_others_open() -> None:
    class Broken(ScriptedStore):
        async def close(self) -> None:
            await super().close()
            raise Unavailable("cannot be closed", url="s3://b")

    async def test() -> None:
        origins = Origins(lambda url, origin: Broken(), Transfers(100, Metrics()), 4, ManualClock())
        buckets = [origins.bucket(parse_url("s3://b/k"), Access.by(Origin(session_token=str(i)))) for i in range(67)]
        with pytest.raises(Unavailable):
            await origins.close_idle()
        assert [cast(Broken, b.store).closed for b in buckets] == [True] * 3 + [False] * 64

    asyncio.run(test())


def test_origins_are_told_apart_by_all_they_are() -> None:
    one = Access.by(Origin(endpoint="http://h/", access_key_id="a"))
    two = Access.by(Origin(endpoint="http://h", access_key_id="b"))
    assert one.identity != two.identity
    assert one.endpoint == two.endpoint == "http://h"
    assert "access_key_id" not in repr(one)
