"""The engine without sockets: single flight, order, versions, pass-through, leases."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cachefs.config import Origin
from cachefs.daemon.chunkqueue import Tier
from cachefs.daemon.holdings import IDLE_SECONDS
from cachefs.daemon.origins import HEAD_TTL, Access
from cachefs.errors import CacheFull, Changed, ConfigError, Denied, NotFound, Unavailable
from cachefs.objstore.abc import ObjectMeta
from cachefs.objstore.buffers import check_version
from cachefs.testing.clock import ManualClock
from cachefs.testing.enginebox import ACCESS, CHUNK, EngineBox, engine_box, entry_of, until
from cachefs.testing.scripted import Call, ScriptedStore

if TYPE_CHECKING:
    from typing_extensions import Buffer


def data_of(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def drive(
    tmp_path: Path, store: ScriptedStore, test: Callable[[EngineBox], Coroutine[Any, Any, None]], **changes: Any
) -> None:
    async def go() -> None:
        async with engine_box(tmp_path / "cache", store, **changes) as box:
            await asyncio.wait_for(test(box), 60)

    asyncio.run(go())


def test_a_cold_object_is_fetched_once_for_eight_readers_and_never_again(tmp_path: Path) -> None:
    data = data_of(1, 5 * CHUNK + 17)
    store = ScriptedStore({"k": data})

    async def test(box: EngineBox) -> None:
        openings = await asyncio.gather(*(box.open("k") for _ in range(8)))
        assert [d == data for d in await asyncio.gather(*map(box.read, openings))] == [True] * 8
        assert store.count("head") == 1
        assert sorted((c.start, c.end) for c in store.calls if c.kind == "get") == [
            (i * CHUNK, min((i + 1) * CHUNK, len(data))) for i in range(6)
        ]
        before = len(store.calls)
        assert await box.read(await box.open("k")) == data
        assert len(store.calls) == before
        assert not box.engine.busy

    drive(tmp_path, store, test)


def test_version_and_size_of_a_listing_save_the_head(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(2, 1000)})
    meta = store.meta("k")

    async def test(box: EngineBox) -> None:
        assert await box.read(await box.open("k", version=meta.version, size=meta.size)) == store.objects["k"]
        assert store.count("head") == 0

    drive(tmp_path, store, test)


def test_a_claimed_size_of_nothing_is_checked_before_anything_is_published(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(2, 1000), "empty": b""})
    meta = store.meta("k")

    async def test(box: EngineBox) -> None:
        with pytest.raises(Changed, match="no longer the version"):
            await box.open("k", version=meta.version, size=0)
        assert await box.engine.entries() == []
        assert await box.read(await box.open("k", version=meta.version, size=1000)) == store.objects["k"]
        assert await box.read(await box.open("k")) == store.objects["k"]
        empty = store.meta("empty").version
        assert await box.read(await box.open("empty", version=empty, size=0)) == b""

    drive(tmp_path, store, test)


@pytest.mark.parametrize("wrong", [10, CHUNK, 5 * CHUNK])
def test_a_wrong_size_harms_only_those_who_claim_it(tmp_path: Path, wrong: int) -> None:
    data = data_of(2, 2 * CHUNK + 5)
    store = SizedStore({"k": data})
    version = store.meta("k").version

    async def test(box: EngineBox) -> None:
        claimed = await box.open("k", version=version, size=wrong)
        with pytest.raises(Changed):
            await box.wait_all(claimed)
        right = await box.open("k", version=version, size=len(data))
        assert isinstance(right.reason, CacheFull), "past the cache while the other one has it open"
        box.engine.release(claimed)
        for _ in range(5000):  # the wrong one's lease is given back in a thread
            right = await box.open("k", version=version, size=len(data))
            if right.holding is not None:
                break
            await asyncio.sleep(0.002)
        assert await box.read(right) == data
        with pytest.raises(Changed):
            await box.open("k", version=version, size=wrong)
        gets = store.count("get")
        assert await box.read(await box.open("k")) == data
        assert store.count("get") == gets, "the right one stays cached"

    drive(tmp_path, store, test)


class SizedStore(ScriptedStore):
    """Compares the size that it is asked with, as the backends do."""

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        data = await super().get_range(key, start, end, version=version)
        if version is not None:
            check_version(self.meta(key), version, url=f"s3://bucket/{key}")
        return data


def test_a_version_that_is_no_etag_is_checked_by_head(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(2, 1000)}, quoted=False)
    meta = store.meta("k")

    async def test(box: EngineBox) -> None:
        assert await box.read(await box.open("k", version=meta.version, size=meta.size)) == store.objects["k"]
        assert store.count("head") == 1
        with pytest.raises(Changed, match="no longer the version"):
            await box.open("k", version="other", size=meta.size)

    drive(tmp_path, store, test)


def test_demanded_chunks_come_first_then_file_order(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(3, 10 * CHUNK)})

    async def test(box: EngineBox) -> None:
        store.gate = asyncio.Event()
        opening = await box.open("k")
        entry = entry_of(opening)
        waiting = asyncio.create_task(box.engine.wait(entry, opening.source, 8, 9, 30))
        await until(lambda: store.count("get") >= 2)
        store.gate.set()
        assert (await waiting).done
        assert await box.read(opening) == store.objects["k"]
        starts = [c.start // CHUNK for c in store.calls if c.kind == "get"]
        assert starts.index(8) <= 3, f"chunk 8 was waited for, yet the order was {starts}"
        rest = [s for s in starts if s != 8]
        assert rest == sorted(rest)

    drive(tmp_path, store, test, transfer_bytes=2 * CHUNK)


def test_an_object_that_changes_during_a_fill_is_an_error_and_a_new_open_sees_the_new_one(tmp_path: Path) -> None:
    old, new = data_of(4, 4 * CHUNK), data_of(5, 3 * CHUNK)
    store = ScriptedStore({"k": old})

    def change(call: Call) -> None:
        if call.kind == "get" and call.start == 2 * CHUNK:
            store.objects["k"] = new

    async def test(box: EngineBox) -> None:
        store.before = change
        opening = await box.open("k")
        with pytest.raises(Changed):
            await box.wait_all(opening)
        box.engine.release(opening)
        assert await box.read(await box.open("k")) == new

    drive(tmp_path, store, test, transfer_bytes=CHUNK)


def test_a_change_is_seen_once_the_remembered_head_is_old(tmp_path: Path) -> None:
    old, new = data_of(6, 100), data_of(7, 200)
    store = ScriptedStore({"k": old})
    clock = ManualClock()

    async def test(box: EngineBox) -> None:
        assert await box.read(await box.open("k")) == old
        store.objects["k"] = new
        assert await box.read(await box.open("k")) == old
        clock.advance(HEAD_TTL)
        assert await box.read(await box.open("k")) == new
        store.objects["k"] = old
        assert (await box.engine.stat("s3://bucket/k", ACCESS)).size == 100, "stat asks afresh"

    drive(tmp_path, store, test, clock=clock)


def test_errors_of_the_origin_reach_every_reader_and_the_next_wait_tries_again(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(8, 3 * CHUNK)})
    broken = True

    def fail(call: Call) -> None:
        if broken and call.kind == "get" and call.start == CHUNK:
            raise Unavailable("cut", url="s3://bucket/k")

    async def test(box: EngineBox) -> None:
        nonlocal broken
        store.before = fail
        store.gate = asyncio.Event()
        a, b = await box.open("k"), await box.open("k")
        both = asyncio.gather(box.wait_all(a), box.wait_all(b), return_exceptions=True)
        await until(lambda: store.count("get") == 1)
        await asyncio.sleep(0)
        store.gate.set()
        results = await both
        assert [type(r) for r in results] == [Unavailable, Unavailable]
        broken = False
        assert await box.read(a) == store.objects["k"]
        assert await box.read(b) == store.objects["k"]
        assert box.metrics.get("fill_failures") == 1

    drive(tmp_path, store, test, transfer_bytes=CHUNK)


def test_wrong_key_wrong_rights_and_a_prefix(tmp_path: Path) -> None:
    store = ScriptedStore({"folder/a": b"1", "secret": b"2"})

    def deny(call: Call) -> None:
        if call.key == "secret":
            raise Denied("no right", url="s3://bucket/secret")

    async def test(box: EngineBox) -> None:
        store.before = deny
        with pytest.raises(NotFound, match="no such key"):
            await box.open("absent")
        with pytest.raises(NotFound, match=r"folder: is a prefix \(a directory\) with objects under it"):
            await box.open("folder")
        with pytest.raises(Denied):
            await box.open("secret")
        with pytest.raises(ConfigError, match="local path"):
            await box.engine.open("/etc/hostname", ACCESS, None, None)
        assert not box.engine.busy

    drive(tmp_path, store, test)


@pytest.mark.parametrize("quota", [0, 256 * 1024])
def test_an_object_beyond_the_quota_passes_through_without_waiting(tmp_path: Path, quota: int) -> None:
    data = data_of(9, 1 << 20)
    store = ScriptedStore({"big": data})
    meta = store.meta("big")

    async def test(box: EngineBox) -> None:
        for _ in range(3):
            opening = await box.open("big")
            assert opening.holding is None
            assert isinstance(opening.reason, CacheFull)
        assert box.metrics.get("open_bypasses") == 3
        url = "s3://bucket/big"
        got = b""
        for start in range(0, len(data), CHUNK):
            async with box.engine.read(url, ACCESS, meta.version, meta.size, start, start + CHUNK) as part:
                got += bytes(part)
        assert got == data
        usage = await box.disk.usage()
        assert usage is not None
        assert usage.entries == 0
        assert usage.used <= quota or quota == 0, "empty folders are all that is left"

    drive(tmp_path, store, test, quota=quota)


def test_a_client_that_is_slow_to_take_its_reply_holds_up_no_other(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(4, 4 * CHUNK)})
    meta = store.meta("k")

    async def test(box: EngineBox) -> None:
        def read() -> AbstractAsyncContextManager[Buffer]:
            return box.engine.read("s3://bucket/k", ACCESS, meta.version, meta.size, 0, CHUNK)

        async with read() as slow:
            assert bytes(slow) == store.objects["k"][:CHUNK]
            await until(lambda: not box.engine.busy)  # the bucket's only slot is free again
            assert await box.read(await box.open("k")) == store.objects["k"]
            async with read():
                third = asyncio.create_task(first_bytes(read()))
                await asyncio.sleep(0.01)
                assert not third.done(), "but what waits for slow clients is bounded as well"
            await asyncio.wait_for(third, 20)

    drive(tmp_path, store, test, origin_parallel=1, transfer_bytes=2 * CHUNK)


async def first_bytes(block: AbstractAsyncContextManager[Buffer]) -> bytes:
    async with block as data:
        return bytes(data)[:10]


def test_leases_keep_entries_and_a_full_cache_passes_through_until_one_is_given_back(tmp_path: Path) -> None:
    store = ScriptedStore({k: data_of(ord(k), 1 << 20) for k in "abc"})

    async def test(box: EngineBox) -> None:
        a, b = await box.open("a"), await box.open("b")
        assert a.holding is not None
        assert b.holding is None, "the quota holds one"
        await box.wait_all(a)
        box.engine.release(a)
        assert await box.read(await box.open("b")) == store.objects["b"]
        assert {e.url for e in await box.engine.entries()} == {"s3://bucket/b"}

    drive(tmp_path, store, test, quota=int(1.8 * (1 << 20)))


def test_wait_returns_after_its_seconds_with_progress(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(10, 3 * CHUNK)})

    async def test(box: EngineBox) -> None:
        store.gate = asyncio.Event()
        opening = await box.open("k")
        entry = entry_of(opening)
        progress = await box.engine.wait(entry, opening.source, 0, 3, 0.05)
        assert (progress.done, progress.present) == (False, 0)
        store.gate.set()
        progress = await box.engine.wait(entry, opening.source, 0, 3, 30)
        assert (progress.done, progress.present) == (True, 3)
        with pytest.raises(ConfigError, match="no chunks"):
            await box.engine.wait(entry, opening.source, 0, 4, 1)
        box.engine.release(opening)

    drive(tmp_path, store, test)


def test_a_restart_verifies_instead_of_fetching_and_resumes_a_partial_fill(tmp_path: Path) -> None:
    data = data_of(11, 6 * CHUNK)
    store = ScriptedStore({"k": data})

    async def first(box: EngineBox) -> None:
        store.gate = asyncio.Event()
        opening = await box.open("k")
        await until(lambda: store.count("get") == 6)
        box.engine.release(opening)

    async def second(box: EngineBox) -> None:
        store.gate = None
        store.calls.clear()
        opening = await box.open("k")
        await box.engine.wait(entry_of(opening), opening.source, 0, 3, 30)
        box.engine.release(opening)
        await until(lambda: not box.engine.busy)

    async def third(box: EngineBox) -> None:
        store.calls.clear()
        assert await box.read(await box.open("k")) == data
        assert store.count("get") == 0

    for test in (first, second, third):
        drive(tmp_path, store, test)


def test_a_chunk_that_rotted_on_disk_is_never_served(tmp_path: Path) -> None:
    data = data_of(12, 4 * CHUNK)
    store = ScriptedStore({"k": data})

    async def fill(box: EngineBox) -> None:
        assert await box.read(await box.open("k")) == data

    drive(tmp_path, store, fill)
    (path,) = [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size == len(data)]
    with open(path, "r+b") as f:
        f.seek(2 * CHUNK + 5)
        f.write(b"rot")

    async def reread(box: EngineBox) -> None:
        opening = await box.open("k")
        for _ in range(3):
            progress = await box.engine.wait(entry_of(opening), opening.source, 0, 4, 30)
            if progress.done:
                break
            assert progress.superseded
            box.engine.release(opening)
            opening = await box.open("k")
        assert await box.read(opening) == data

    drive(tmp_path, store, reread)


def test_cancelled_openings_give_back_leases_and_descriptors(tmp_path: Path) -> None:
    store = ScriptedStore({str(i): data_of(i, 1000) for i in range(40)})

    async def test(box: EngineBox) -> None:
        before = len(os.listdir("/proc/self/fd"))
        rng = random.Random(0)
        tasks = []
        for i in range(40):
            tasks.append(asyncio.create_task(box.open(str(i))))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            tasks[-1].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if not isinstance(result, BaseException):
                box.engine.release(result)
        await until(lambda: not box.engine.busy)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert sum(e.leases for e in await box.engine.entries()) == 0

    drive(tmp_path, store, test)


def test_listing_leaves_out_markers_and_tells_what_is_cached(tmp_path: Path) -> None:
    store = ScriptedStore({"d/": b"", "d/a": b"12", "d/b": b"345", "d/e/": b"", "d/e/f": b"6", "d2": b"7"})

    async def test(box: EngineBox) -> None:
        await box.read(await box.open("d/b"))
        flat = [
            s
            async for page in box.engine.list_folder("s3://bucket/d", ACCESS, delimiter=False, cached=True)
            for s in page
        ]
        assert [(s.url, s.cached_bytes) for s in flat] == [
            ("s3://bucket/d/a", 0),
            ("s3://bucket/d/b", 3),
            ("s3://bucket/d/e/f", 0),
        ]
        top = [
            s
            async for page in box.engine.list_folder("s3://bucket/d/", ACCESS, delimiter=True, cached=False)
            for s in page
        ]
        assert [s.url for s in top] == ["s3://bucket/d/a", "s3://bucket/d/b", "s3://bucket/d/e/"]
        assert [s.is_prefix for s in top] == [False, False, True]

    drive(tmp_path, store, test)


def test_evict_drops_what_is_free_and_counts_what_is_in_use(tmp_path: Path) -> None:
    store = ScriptedStore({k: data_of(1, 1000) for k in "abc"})

    async def test(box: EngineBox) -> None:
        held = await box.open("a")
        await box.wait_all(held)
        for key in "bc":
            await box.read(await box.open(key))
        gone = await box.engine.evict(["s3://bucket/a", "s3://bucket/b"], everything=False)
        assert (gone.entries, gone.busy) == (1, 1)
        assert gone.freed > 0
        box.engine.release(held)
        gone = await box.engine.evict([], everything=True)
        assert (gone.entries, gone.busy) == (2, 0)
        assert await box.engine.entries() == []

    drive(tmp_path, store, test)


def test_chunks_asked_for_ahead_of_time_wait_for_opened_ones(tmp_path: Path) -> None:
    store = ScriptedStore({"ahead": data_of(1, 6 * CHUNK), "now": data_of(2, 4 * CHUNK)})

    async def test(box: EngineBox) -> None:
        store.gate = asyncio.Event()
        ahead = await box.engine.open("s3://bucket/ahead", ACCESS, None, None, tier=Tier.AHEAD)
        await until(lambda: store.count("get") >= 1)
        now = await box.open("now")
        entry = entry_of(now)
        await until(lambda: box.engine.fetcher.left(entry) == 4)
        store.gate.set()
        await asyncio.gather(box.wait_all(now), box.engine.fetcher.finish(entry_of(ahead)))
        order = [c.key for c in store.calls if c.kind == "get"]
        assert order.index("now") <= 1
        assert order[-5:] == ["ahead"] * 5
        box.engine.release(now)
        box.engine.release(ahead)

    drive(tmp_path, store, test, transfer_bytes=CHUNK)


def test_any_key_is_readable_and_stays_inside_the_cache_directory(tmp_path: Path) -> None:
    keys = [
        "d/../../esc.bin", "../x", "/etc/x", "a/./b", "a//b", "k" * 1000, "n" * 300, "Case", "case", "k", "k/1",
        "a b", "a%20b", "a+b", "a?b", "a#b", "é", "e\u0301", "\x01", "trailing/", "..", ".",
    ]  # fmt: skip
    store = ScriptedStore({key: data_of(i, 100 + i) for i, key in enumerate(keys)})

    async def test(box: EngineBox) -> None:
        for key in keys:
            assert await box.read(await box.open(key)) == store.objects[key], key
        assert len(await box.engine.entries()) == len(keys)

    drive(tmp_path, store, test)
    assert {p.name for p in tmp_path.iterdir()} == {"cache"}
    for path in (tmp_path / "cache").rglob("*"):
        assert len(path.name) < 64


def test_the_same_url_at_two_endpoints_is_two_entries(tmp_path: Path) -> None:
    store = ScriptedStore({"k": b"same"})

    async def test(box: EngineBox) -> None:
        other = Access.by(Origin(endpoint="http://other.test/"))
        await box.read(await box.open("k"))
        await box.read(await box.engine.open("s3://bucket/k", other, None, None))
        assert sorted(e.endpoint for e in await box.engine.entries()) == ["http://origin.test", "http://other.test"]

    drive(tmp_path, store, test)


class ExpiredStore(ScriptedStore):
    """Refuses every read, once its gate is open."""

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        self.calls.append(Call("get", key, start, end))
        assert self.gate is not None
        await self.gate.wait()
        raise Denied("expired", url=f"s3://bucket/{key}")


def test_a_reader_with_rights_is_not_hurt_by_a_fill_that_began_without(tmp_path: Path) -> None:
    store = ScriptedStore({"k": data_of(1, 2 * CHUNK)})
    expired = ExpiredStore(store.objects)

    async def test(box: EngineBox) -> None:
        expired.gate = asyncio.Event()
        old = Access.by(Origin(endpoint="http://origin.test", session_token="old"))
        first, second = await box.engine.open("s3://bucket/k", old, None, None), await box.open("k")
        both = asyncio.gather(box.wait_all(first), box.wait_all(second), return_exceptions=True)
        await until(lambda: expired.count("get") == 2)
        assert store.count("get") == 0, "one fill for both"
        expired.gate.set()
        results = await both
        assert isinstance(results[0], Denied)
        assert results[1] is True
        box.engine.release(first)
        assert await box.read(second) == store.objects["k"]

    drive(tmp_path, store, test, choose=lambda origin: expired if origin.session_token else store)


def test_idle_entries_give_way_when_room_is_needed(tmp_path: Path) -> None:
    store = ScriptedStore({k: data_of(ord(k), 1 << 20) for k in "abcd"})

    async def test(box: EngineBox) -> None:
        for key in "abcd":
            assert await box.read(await box.open(key)) == store.objects[key]
        assert len(await box.engine.entries()) == 1

    drive(tmp_path, store, test, quota=int(1.8 * (1 << 20)))


def test_idle_entries_are_dropped_after_a_moment(tmp_path: Path) -> None:
    store = ScriptedStore({"k": b"x"})
    clock = ManualClock()

    async def test(box: EngineBox) -> None:
        await box.read(await box.open("k"))
        await box.engine.tidy()
        assert [e.leases for e in await box.engine.entries()] == [1]
        clock.advance(IDLE_SECONDS)
        await box.engine.tidy()
        assert [e.leases for e in await box.engine.entries()] == [0]

    drive(tmp_path, store, test, clock=clock)


def test_buckets_that_nobody_uses_are_closed_beyond_a_bound(tmp_path: Path) -> None:
    made: list[ScriptedStore] = []

    def choose(origin: Origin) -> ScriptedStore:
        made.append(ScriptedStore({"k": b"x"}))
        return made[-1]

    async def test(box: EngineBox) -> None:
        kept = await box.engine.open("s3://bucket/k", Access.by(Origin(session_token="kept")), None, None)
        for i in range(70):
            access = Access.by(Origin(endpoint="http://h", session_token=str(i)))
            await box.read(await box.engine.open("s3://bucket/k", access, None, None))
        await box.engine.tidy()
        assert [store.closed for store in made] == [False, *[True] * 7, *[False] * 63]
        box.engine.release(kept)

    drive(tmp_path, ScriptedStore(), test, choose=choose)
    assert all(store.closed for store in made)
