"""Maps of objects that are still being fetched: what they show, what waiting costs, and when to map anew."""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cachefs.client import FillingView, connect
from cachefs.errors import DeadlineExceeded, NearflashError, NotFound, Superseded
from cachefs.filling import Arrivals, Source
from cachefs.maps import follows_file, private_map
from cachefs.objstore.abc import ObjectMeta
from cachefs.testing.enginebox import CHUNK
from cachefs.testing.scripted import Call, ScriptedStore
from cachefs.testing.served import served

if TYPE_CHECKING:
    from typing_extensions import Buffer

URL = "s3://bucket/k"
DATA = random.Random(9).randbytes(4 * CHUNK + 11)
linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a filling view waits for everything")


# --- what the system does -------------------------------------------------------------------------------------------


def nameless(folder: Path) -> int:
    return os.memfd_create("t", os.MFD_CLOEXEC)


def on_disk(folder: Path) -> int:
    fd = os.open(folder / "f", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, 8 * mmap.PAGESIZE)
    return fd


def sparse(folder: Path) -> int:
    return os.open(folder / "f", os.O_RDWR | os.O_CREAT)


def in_memory(folder: Path) -> int:
    path = Path("/dev/shm") / f"nearflash-test-{os.getpid()}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    path.unlink()
    return fd


@linux
@pytest.mark.parametrize("make", [on_disk, sparse, in_memory, nameless])
def test_a_private_page_that_was_only_read_shows_what_the_file_gets_later(
    tmp_path: Path, make: Callable[[Path], int]
) -> None:
    """All that filling views rely on; and a page that was written to is this process's own, as it should be."""
    page = mmap.PAGESIZE
    writer = make(tmp_path)
    os.ftruncate(writer, 8 * page)
    reader = os.open(f"/proc/self/fd/{writer}", os.O_RDONLY)
    view = private_map(reader, 8 * page)
    os.close(reader)
    assert bytes(view) == bytes(8 * page)  # every page is there now, and zero
    view[3 * page] = 7
    os.pwrite(writer, b"x" * (6 * page), page)
    assert bytes(view[:page]) == bytes(page)
    assert bytes(view[page : 3 * page]) == b"x" * (2 * page)
    assert bytes(view[3 * page : 4 * page]) == b"\x07" + bytes(page - 1)
    assert bytes(view[4 * page : 7 * page]) == b"x" * (3 * page)
    pid = os.fork()
    if pid == 0:
        os.pwrite(writer, b"y" * page, 7 * page)  # another process, as the daemon is
        os._exit(0)
    os.waitpid(pid, 0)
    assert bytes(view[7 * page :]) == b"y" * page
    os.close(writer)


LOCKER = """
import ctypes
from cachefs.maps import follows_file
assert follows_file()
libc = ctypes.CDLL(None, use_errno=True)
page = ctypes.create_string_buffer(1 << 16)
if libc.mlock(page, len(page)):
    print("may not lock")
else:
    print(follows_file())
"""


@linux
def test_a_process_that_locks_its_memory_waits_for_everything() -> None:
    said = subprocess.run([sys.executable, "-c", LOCKER], capture_output=True, text=True, check=True).stdout
    if "may not" in said:
        pytest.skip(said)
    assert said == "False\n"


@pytest.mark.parametrize("text", ["VmLck:\t      12 kB\n", "", None])
def test_who_cannot_tell_waits_for_everything(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "status").write_text(text)
    assert not follows_file(str(tmp_path / "status"))


# --- what arrives ---------------------------------------------------------------------------------------------------


class Chunks:
    """A source of four-byte chunks that counts how often it is asked."""

    def __init__(self, fd: int, n: int = 100_000) -> None:
        self.fd = fd
        self.there = bytearray(n)
        self.asked = 0

    def has(self, start: int, end: int) -> bool:
        self.asked += 1
        return self.there.find(0, start // 4, -(-end // 4)) < 0

    def present_to(self, start: int) -> int:
        self.asked += 1
        missing = self.there.find(0, start // 4)
        return 4 * len(self.there) if missing < 0 else max(start, 4 * missing)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[int]]:
    """Two descriptors of one file, and one of another."""
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "aab"]
    yield fds
    for fd in fds:
        os.close(fd)


def test_reading_from_front_to_back_asks_once_for_what_is_there(files: list[int]) -> None:
    source = Chunks(files[0])
    n = len(source.there)

    def wait(start: int, end: int, accept: Callable[[Source], None]) -> None:
        accept(source)
        source.there[: min(n, start // 4 + 1000)] = b"\x01" * min(n, start // 4 + 1000)

    view = memoryview(bytearray(4 * n))
    filling = FillingView(view, URL, Arrivals(URL, source, wait).arrive)
    for at in range(0, 4 * n, 4):
        filling.ready(at, at + 4)
    assert source.asked <= 2 * n // 1000 + 2


def test_bytes_behind_a_gap_are_ready_without_a_wait(files: list[int]) -> None:
    source = Chunks(files[0], 10)
    source.there[7] = source.there[0] = 1

    def wait(start: int, end: int, accept: Callable[[Source], None]) -> None:
        raise AssertionError("nothing is missing")

    filling = FillingView(memoryview(bytearray(40)), URL, Arrivals(URL, source, wait).arrive)
    filling.ready(28, 32)
    filling.ready(0, 4)
    filling.ready(29, 30)


def test_the_same_file_opened_anew_is_followed_and_another_is_not(files: list[int]) -> None:
    first, again, other = (Chunks(fd, 10) for fd in files)
    first.there[0] = 1
    again.there[:5] = other.there[:] = b"\x01" * 5
    sources = [again]

    def wait(start: int, end: int, accept: Callable[[Source], None]) -> None:
        for source in sources:
            accept(source)

    filling = FillingView(memoryview(bytearray(40)), URL, Arrivals(URL, first, wait).arrive)
    filling.ready(0, 20)
    asked = again.asked
    filling.ready(16, 20)
    assert again.asked == asked
    sources = [again, other]
    with pytest.raises(Superseded, match=f"{URL}: the cache goes on with another file.*map it anew"):
        filling.ready(20, 21)
    filling.ready(0, 20)  # what was ready stays so


# --- through a daemon -----------------------------------------------------------------------------------------------


@linux
def test_a_map_that_was_looked_at_too_early_fills_under_its_reader(tmp_path: Path) -> None:
    with served(tmp_path, ScriptedStore({"k": DATA})) as server, connect(server.settings) as client:
        server.hold_reads()
        with client.open(URL) as shard, ThreadPoolExecutor(1) as pool:
            filling = shard.filling()
            assert bytes(filling.view) == bytes(len(DATA))
            waiting = pool.submit(filling.ready, 0, len(DATA))
            assert not waiting.done()
            server.let_reads()
            waiting.result(30)
            assert bytes(filling.view) == DATA
            before = client.stats()["control_requests"]
            other = shard.filling()
            for at in range(0, len(DATA), 1000):
                other.ready(at, min(len(DATA), at + 1000))
            assert client.stats()["control_requests"] == int(before or 0) + 1
            assert bytes(other.view) == DATA


@linux
def test_a_shard_indexes_while_it_fills(tmp_path: Path) -> None:
    """The bytes that are asked for come first, and those that came are ready whatever the others do."""
    stuck = threading.Event()
    store = ScriptedStore({"k": DATA})

    def before(call: Call) -> None:
        if call.kind == "get" and call.start >= 2 * CHUNK:
            stuck.set()
            raise NotFound("gone since", url=URL)

    with served(tmp_path, store, transfer_bytes=CHUNK) as server, connect(server.settings) as client:
        store.before = before
        with client.open(URL) as shard:
            filling = shard.filling()
            filling.ready(0, 2 * CHUNK)
            assert stuck.wait(20)
            assert filling.view[: 2 * CHUNK] == DATA[: 2 * CHUNK]
            with pytest.raises(NotFound, match="gone since"):
                filling.ready(0, len(DATA))
            filling.ready(100, 2 * CHUNK)
            store.before = lambda call: None
            filling.ready(0, len(DATA))
            assert bytes(filling.view) == DATA


@linux
def test_a_deadline_ends_the_wait_for_bytes(tmp_path: Path) -> None:
    with served(tmp_path, ScriptedStore({"k": DATA})) as server, connect(server.settings) as client:
        server.hold_reads()
        with client.open(URL, deadline=0.2) as shard:
            filling = shard.filling()
            with pytest.raises(DeadlineExceeded, match=r"not all there after 0\.2 s"):
                filling.ready(0, 1)
        with pytest.raises(NearflashError, match="closed"):
            filling.ready(0, 1)
        server.let_reads()


class FirstChunkOnly(ScriptedStore):
    """Never answers for any other."""

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if start >= CHUNK:
            await asyncio.Event().wait()
        return await super().get_range(key, start, end, version=version)


@linux
@pytest.mark.parametrize("evicted", [False, True])
def test_a_map_outlives_its_daemon_but_not_its_file(tmp_path: Path, evicted: bool) -> None:
    """The heir of a daemon goes on with the half-filled file, and so does the map; unless it was evicted."""
    store = FirstChunkOnly({"k": DATA})
    with served(tmp_path, store) as server:
        client = connect(server.settings)
        shard = client.open(URL)
        filling = shard.filling()
        filling.ready(0, CHUNK)
        assert filling.view[:CHUNK] == DATA[:CHUNK]
    with served(tmp_path, ScriptedStore({"k": DATA})) as server:
        if evicted:
            with connect(server.settings) as other:
                assert other.evict([URL]).entries == 1
            with pytest.raises(Superseded):
                filling.ready(CHUNK, len(DATA))
            assert filling.view[:CHUNK] == DATA[:CHUNK]
            filling = shard.filling()
        filling.ready(0, len(DATA))
        assert bytes(filling.view) == DATA
        shard.close()
        client.close()


@linux
def test_a_map_is_replaced_when_the_cache_gives_up(tmp_path: Path) -> None:
    """The disk refuses in the middle of a fill: the rest is had past the cache, in another map."""
    from cachefs.testing.diskops import WatchedOps

    class Refusing(WatchedOps):
        refuse = False

        def before(self, call: str, name: str) -> None:
            if self.refuse and call in {"write", "create"}:
                raise OSError(28, "No space left on device")

    ops = Refusing()
    with served(tmp_path, ScriptedStore({"k": DATA}), ops=ops) as server, connect(server.settings) as client:
        server.hold_reads()
        with client.open(URL) as shard:
            filling = shard.filling()
            ops.refuse = True
            server.let_reads()
            with pytest.raises(Superseded):
                filling.ready(0, len(DATA))
            assert not shard.cached
            filling = shard.filling()
            filling.ready(CHUNK, 2 * CHUNK)
            assert filling.view[CHUNK : 2 * CHUNK] == DATA[CHUNK : 2 * CHUNK]
            assert bytes(filling.view[:CHUNK]) == bytes(CHUNK), "only what was asked for takes memory"
            filling.ready(0, len(DATA))
            assert bytes(filling.view) == DATA
            ops.refuse = False


def test_where_maps_do_not_follow_everything_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.remote.follows_file", lambda: False)
    with (
        served(tmp_path, ScriptedStore({"k": DATA})) as server,
        connect(server.settings) as client,
        client.open(URL) as shard,
    ):
        assert bytes(shard.filling().view) == DATA


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_goes_on_with_the_map(tmp_path: Path) -> None:
    with served(tmp_path, ScriptedStore({"k": DATA})) as server, connect(server.settings) as client:
        server.hold_reads()
        with client.open(URL) as shard:
            filling = shard.filling()
            assert bytes(filling.view[:10]) == bytes(10)
            pid = os.fork()
            if pid == 0:
                good = False
                try:
                    filling.ready(0, len(DATA))
                    good = bytes(filling.view) == DATA
                finally:
                    os._exit(0 if good else 1)
            server.let_reads()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            filling.ready(0, len(DATA))
            assert bytes(filling.view) == DATA
