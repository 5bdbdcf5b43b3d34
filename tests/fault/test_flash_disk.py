"""A disk that fills up, fails, becomes read-only or goes away under the flash store."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.errors import CacheError, CacheFull, DiskFault
from cachefs.flash import FlashStore
from cachefs.flash.health import PROBE_INTERVAL
from cachefs.testing.clock import ManualClock
from cachefs.testing.diskops import FaultyOps, WatchedOps
from cachefs.testing.flashkit import CHUNK, Reader, disk_usage, files_of, fill, flip_bit, open_store, thing

A, B, C = (thing(name, 3 * CHUNK + 11) for name in "abc")
WRITES = {"create", "write", "allocate", "rename", "unlink", "make_dir", "touch", "sync"}


def always(number: int, *calls: str) -> FaultyOps:
    return FaultyOps(lambda call, name: number if call in calls else None)


def read_whole(store: FlashStore, what: object = A) -> bytes:
    entry = store.lookup(A.key, lease=True)
    assert entry is not None
    assert all(entry.verify_chunk(i) for i in entry.needs_verify())
    reader = Reader(entry)
    assert reader.map is not None
    data = reader.map[:]
    reader.close()
    entry.release()
    return data


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, CacheFull),
        (errno.EDQUOT, CacheFull),
        (errno.EIO, DiskFault),
        (errno.EROFS, DiskFault),
        (errno.EACCES, DiskFault),
    ],
)
@pytest.mark.parametrize("call", ["create", "allocate", "write"])
def test_a_refused_entry_is_one_line_with_the_path_and_leaves_no_trace(
    tmp_path: Path, number: int, error: type[CacheError], call: str
) -> None:
    clock, ops = ManualClock(), FaultyOps()
    with open_store(tmp_path, clock=clock, ops=ops) as store:
        fill(store, A).lease()
        used = store.usage().used
        ops.fault = lambda c, name: number if c == call else None
        with pytest.raises(error) as caught:
            store.create(B.key, len(B.data))
        text = str(caught.value)
        assert "\n" not in text and f"{B.key.name}.data" in text and os.strerror(number) in text
        assert type(store.fault) is error
        assert store.usage().used == used and disk_usage(tmp_path) <= used
        assert read_whole(store) == A.data  # what is there is still served

        tries = len(ops.calls)
        with pytest.raises(error):
            store.create(B.key, len(B.data))
        assert "create" not in ops.calls[tries:]  # at once, without asking the disk again
        clock.advance(PROBE_INTERVAL)
        with pytest.raises(CacheError):
            store.create(B.key, len(B.data))  # probed: still bad
        ops.fault = None
        with pytest.raises(CacheError):
            store.create(B.key, len(B.data))
        clock.advance(PROBE_INTERVAL)
        fill(store, B)
        assert store.fault is None and store.usage().entries == 2


@pytest.mark.parametrize(
    ("number", "way_out"), [(errno.EMFILE, "raise ulimit -n"), (errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "memory")]
)
def test_a_process_at_its_limits_is_no_failed_disk(tmp_path: Path, number: int, way_out: str) -> None:
    ops = FaultyOps()
    with open_store(tmp_path, ops=ops) as store:
        fill(store, A)
    with open_store(tmp_path, ops=ops) as store:
        ops.fault = lambda call, name: number if call in ("create", "open") else None
        with pytest.raises(CacheFull, match=rf"{os.strerror(number)} while .*\(.*{way_out}.*reads pass through"):
            store.create(B.key, len(B.data))
        with pytest.raises(CacheFull, match=way_out):
            read_whole(store)
        assert store.fault is None
        ops.fault = None
        fill(store, B)  # at once
        assert read_whole(store) == A.data and store.usage().entries == 2


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, DiskFault), (errno.ENOSPC, CacheFull)])
def test_a_chunk_that_cannot_be_written_stays_missing(tmp_path: Path, number: int, error: type[CacheError]) -> None:
    clock, ops = ManualClock(), FaultyOps()
    with open_store(tmp_path, clock=clock, ops=ops) as store:
        entry = store.create(A.key, len(A.data), lease=True)
        reader = Reader(entry)
        entry.write_chunk(0, A.chunk(0))
        ops.fault = lambda call, name: number if call == "write" else None
        with pytest.raises(error, match="writing chunk 1"):
            entry.write_chunk(1, A.chunk(1))
        assert entry.missing() == [1, 2, 3] and not reader.bits.has(1)
        ops.fault = None
        with pytest.raises(error):
            entry.write_chunk(1, A.chunk(1))
        clock.advance(PROBE_INTERVAL)
        for i in entry.missing():
            entry.write_chunk(i, A.chunk(i))
        assert entry.complete and reader.wrong(A) == [] and store.entries()[0].state == "published"
        reader.close()


def test_a_full_disk_makes_room_from_our_own_entries_first(tmp_path: Path) -> None:
    refusals = iter([errno.EDQUOT])
    ops = FaultyOps(lambda call, name: next(refusals, None) if call == "allocate" and name == "" else None)
    store = open_store(tmp_path, ops=FaultyOps())
    fill(store, A)
    store.close()
    with open_store(tmp_path, ops=ops) as store:
        fill(store, B)
        assert [info.url[-1] for info in store.entries()] == ["b"] and store.fault is None


@pytest.mark.parametrize("broken", [1, 2])
def test_a_failed_publish_is_made_up_for(tmp_path: Path, broken: int) -> None:
    """The n-th rename fails, and all after it until the disk is well again."""
    clock, ops = ManualClock(), FaultyOps()
    with open_store(tmp_path, clock=clock, ops=ops) as store:
        renames = 0

        def fault(call: str, name: str) -> int | None:
            nonlocal renames
            renames += call == "rename"
            return errno.EIO if call == "rename" and renames >= broken else None

        ops.fault = fault
        entry = fill(store, A)
        assert entry.complete and isinstance(store.fault, DiskFault)
        assert store.entries()[0].state == "filling"
        assert read_whole(store) == A.data
        ops.fault = None
        clock.advance(PROBE_INTERVAL)
        fill(store, B)
        assert store.lookup(A.key) is entry
        assert {info.state for info in store.entries()} == {"published"}
    with open_store(tmp_path) as store:
        assert read_whole(store) == A.data


def test_a_spell_of_read_errors_loses_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, A)
    store.close()
    clock, ops = ManualClock(), FaultyOps()
    with open_store(tmp_path, clock=clock, ops=ops) as store:
        entry = store.lookup(A.key, lease=True)
        assert entry is not None and entry.verify_chunk(0)
        ops.fault = lambda call, name: errno.EIO if call in {"read", *WRITES} else None
        with pytest.raises(DiskFault, match="reading chunk 1: Input/output error"):
            entry.verify_chunk(1)
        assert not entry.superseded and entry.needs_verify() == [1, 2, 3]
        ops.fault = None
        assert entry.verify_chunk(1)  # what is there is served as soon as it can be read
        clock.advance(PROBE_INTERVAL)
        fill(store, B)
        assert store.fault is None
        entry.release()
        assert read_whole(store) == A.data


def test_one_unreadable_spot_is_a_bad_chunk_not_a_failed_disk(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, A)
    store.close()
    ops = FaultyOps()
    with open_store(tmp_path, ops=ops) as store:
        entry = store.lookup(A.key, lease=True)
        assert entry is not None
        entry.missing()
        broken = iter([errno.EIO])
        ops.fault = lambda call, name: next(broken, None) if call == "read" else None
        assert not entry.verify_chunk(2)
        assert entry.superseded and store.fault is None
        new = store.lookup(A.key, lease=True)
        assert new is not None and new.needs_verify() == [0, 1, 3]
        assert all(new.verify_chunk(i) for i in new.needs_verify())
        new.write_chunk(2, A.chunk(2))
        assert new.complete
        new.release()
        entry.release()
        assert read_whole(store) == A.data


def test_an_unreadable_spot_in_the_entry_that_is_replaced(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    old = fill(store, A)
    store.close()
    flip_bit(files_of(tmp_path, old)["data"], 0)
    ops = FaultyOps()
    with open_store(tmp_path, ops=ops) as store:
        entry = store.lookup(A.key, lease=True)
        assert entry is not None and not entry.verify_chunk(0)
        new = store.lookup(A.key, lease=True)
        assert new is not None and new.needs_verify() == [1, 2, 3]
        broken = iter([errno.EIO])
        ops.fault = lambda call, name: next(broken, None) if call == "read" else None
        assert not new.verify_chunk(1)
        assert new.needs_verify() == [2, 3] and not new.superseded and store.fault is None
        new.write_chunk(1, A.chunk(1))
        new.write_chunk(0, A.chunk(0))
        assert new.verify_chunk(2) and new.verify_chunk(3) and new.complete
        entry.release()
        new.release()
        assert read_whole(store) == A.data


def test_a_read_only_disk_still_serves_what_it_has(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, A)
    b = store.create(B.key, len(B.data))
    store.close()
    files_of(tmp_path, b)["meta"].unlink()  # a leftover to tidy up, which it cannot
    clock, ops = ManualClock(), always(errno.EROFS, *WRITES, "open_write")
    with open_store(tmp_path, clock=clock, ops=ops) as store:
        assert read_whole(store) == A.data
        clock.advance(1000)
        with pytest.raises(DiskFault, match="Read-only file system"):
            store.create(C.key, len(C.data))
        with pytest.raises(DiskFault, match="Read-only file system"):
            store.evict(A.key.name)
        assert read_whole(store) == A.data
        ops.fault = None
        clock.advance(PROBE_INTERVAL)
        fill(store, C)
        fill(store, B)  # the leftover of that name is out of the way
        assert {info.url[-1] for info in store.entries()} == {"a", "b", "c"}


def test_a_new_cache_on_a_read_only_disk_is_a_disk_fault(tmp_path: Path) -> None:
    for calls in (("make_dir",), ("create",), ("write",)):
        with pytest.raises(DiskFault, match="Read-only file system") as caught:
            open_store(tmp_path / calls[0], ops=always(errno.EROFS, *calls, "open_write"))
        assert str(tmp_path) in str(caught.value)
    with pytest.raises(DiskFault, match="Permission denied"):
        open_store(tmp_path / "denied", ops=always(errno.EACCES, "make_dir"))


def test_periodic_tidying_does_not_put_the_probe_off(tmp_path: Path) -> None:
    clock, ops = ManualClock(), FaultyOps()
    with open_store(tmp_path, clock=clock, ops=ops) as store:
        a = fill(store, A)
        a.lease()
        reader = Reader(a)
        a.release()
        store.evict(a.name)
        reader.close()
        ops.fault = lambda call, name: errno.EIO if call == "unlink" else None
        for _ in range(5):
            store.drop_dying()
            clock.advance(PROBE_INTERVAL / 4)
        assert store.usage().dying > 0
        ops.fault = None
        fill(store, B)
        assert store.fault is None and store.usage().dying == 0


def test_a_vanished_directory_is_a_failed_disk_and_comes_back(tmp_path: Path) -> None:
    folder, away = tmp_path / "cache", tmp_path / "away"
    clock = ManualClock()
    with open_store(folder, clock=clock) as store:
        a = fill(store, A)
        os.rename(folder, away)
        (away / "nearflash-v1" / "entries" / f"{a.name}.meta").touch()
        with pytest.raises(DiskFault, match="has vanished or was replaced"):
            store.create(B.key, len(B.data))
        folder.mkdir()
        clock.advance(PROBE_INTERVAL)
        with pytest.raises(DiskFault, match="has vanished or was replaced"):
            store.create(B.key, len(B.data))
        assert list(folder.iterdir()) == []  # an empty mount point is not taken for an empty cache
        folder.rmdir()
        os.rename(away, folder)
        clock.advance(PROBE_INTERVAL)
        fill(store, B)
        assert store.fault is None and store.usage().entries == 2


def test_a_removed_directory_is_a_failed_disk(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    clock = ManualClock()
    with open_store(folder, clock=clock) as store:
        a = fill(store, A)
        a.lease()
        reader = Reader(a)
        shutil.rmtree(folder)
        assert reader.map is not None and reader.map[:] == A.data
        reader.close()
        a.release()
        with pytest.raises(DiskFault, match="has vanished or was replaced"):
            store.create(B.key, len(B.data))
        with pytest.raises(DiskFault, match="has vanished or was replaced"):
            a.lease()
            a.reader_fds()
        a.release()
        open_store(folder).close()  # somebody else's, later
        clock.advance(PROBE_INTERVAL)
        with pytest.raises(DiskFault, match="has vanished or was replaced"):
            store.create(B.key, len(B.data))


def test_without_lease_support_the_leases_alone_count(tmp_path: Path) -> None:
    """The documented weakness: a map kept after its lease was given back is not seen."""

    class NoLeases(FaultyOps):
        def is_held(self, fd: int) -> bool | None:
            return None

    with open_store(tmp_path, ops=NoLeases()) as store:
        a = fill(store, A)
        a.lease()
        with pytest.raises(CacheError, match="in use"):
            store.evict(a.name)
        reader = Reader(a)
        a.release()
        assert store.evict(a.name) >= len(A.data)
        assert reader.map is not None and reader.map[:] == A.data  # right bytes all the same
        reader.close()


def test_without_preallocation_the_quota_still_holds(tmp_path: Path) -> None:
    class Sparse(FaultyOps):
        def allocate(self, fd: int, size: int) -> None:
            os.ftruncate(fd, size)

    with open_store(tmp_path, 16 * CHUNK, ops=Sparse()) as store:
        for n in range(8):
            what = thing(f"s{n}", 4 * CHUNK)
            fill(store, what)
            assert disk_usage(tmp_path) <= store.usage().used <= 16 * CHUNK


CALLS = sorted({name for name in vars(WatchedOps) if not name.startswith("_")} - {"before", "release", "close"})


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_whatever_call_fails_the_error_is_ours_and_it_passes(tmp_path: Path, call: str, number: int) -> None:
    """One system call always fails: nothing but our own errors comes out, and afterwards all is well."""
    clock, ops = ManualClock(), FaultyOps()
    name = "open_write" if call == "open" else call
    store = open_store(tmp_path, 7 * CHUNK, clock=clock, ops=ops)
    a = fill(store, A)
    store.close()
    store = open_store(tmp_path, 7 * CHUNK, clock=clock, ops=ops)
    for fault in (lambda c, n: number if c in {call, name} else None, None):
        ops.fault = fault
        for what in (A, B, C):
            with contextlib.suppress(CacheError):
                entry = store.create(what.key, len(what.data), lease=True)
                try:
                    reader = Reader(entry)
                    for i in entry.missing():
                        if not entry.verify_chunk(i) and not entry.superseded:
                            entry.write_chunk(i, what.chunk(i))
                    assert reader.wrong(what) == []
                    reader.close()
                finally:
                    entry.release()
        for other in (store.entries, store.usage, store.drop_dying, lambda: store.evict(a.name), store.check):
            with contextlib.suppress(CacheError):
                other()
        clock.advance(PROBE_INTERVAL)
    fill(store, B)
    assert store.fault is None
    store.close()
    store = open_store(tmp_path, 7 * CHUNK)
    assert disk_usage(tmp_path) <= store.usage().used <= 7 * CHUNK
    store.close()


@pytest.mark.parametrize("call", CALLS)
def test_whatever_call_fails_opening_leaves_nothing_open(tmp_path: Path, call: str) -> None:
    open_store(tmp_path).close()
    ops = always(errno.EIO, call)
    with contextlib.suppress(CacheError):
        open_store(tmp_path, ops=ops).close()
    assert ops.open_fds == set()
    open_store(tmp_path).close()


# --- a real small file system ---------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root on Linux")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m,mode=0700", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_really_full_disk(small_disk: Path) -> None:
    """The quota allows far more than the disk has; somebody else fills the rest."""
    clock = ManualClock()
    with open_store(small_disk / "cache", 1 << 30, clock=clock) as store:
        for n in range(12):  # 3 MiB through 2 MiB of disk: the disk is the limit
            fill(store, thing(f"t{n}", 4 * CHUNK))
        assert 3 <= store.usage().entries <= 7 and store.fault is None
        hog = small_disk / "hog"
        with contextlib.suppress(OSError), open(hog, "wb", buffering=0) as f:
            while True:
                f.write(bytes(4096))
        big = thing("big", 30 * CHUNK)
        with pytest.raises(CacheFull) as caught:
            store.create(big.key, len(big.data))
        assert str(big.key.url) in str(caught.value) and "\n" not in str(caught.value)
        fill(store, A)  # room is made from our own
        hog.unlink()
        clock.advance(PROBE_INTERVAL)
        fill(store, big)
        assert disk_usage(small_disk) <= 2 << 20


def test_a_disk_that_is_unmounted_and_mounted_again(tmp_path: Path, small_disk: Path) -> None:
    clock = ManualClock()
    with open_store(small_disk / "cache", clock=clock) as store:
        a = fill(store, A)
        subprocess.run(["mount", "--bind", str(tmp_path), str(small_disk)], check=True)  # hides the tmpfs
        try:
            with pytest.raises(DiskFault, match="has vanished or was replaced"):
                store.create(B.key, len(B.data))
            assert store.lookup(A.key) is a and a.complete  # open files and descriptors still lead there
        finally:
            subprocess.run(["umount", str(small_disk)], check=True)
        clock.advance(PROBE_INTERVAL)
        fill(store, B)
        assert read_whole(store) == A.data


def test_a_remounted_read_only_disk(small_disk: Path) -> None:
    folder = small_disk / "cache"
    clock = ManualClock()
    store = open_store(folder, clock=clock)
    a = fill(store, A)
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with open_store(folder, clock=clock) as store:
        assert read_whole(store) == A.data
        with pytest.raises(DiskFault, match="Read-only file system"):
            store.create(B.key, len(B.data))
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
        clock.advance(PROBE_INTERVAL)
        fill(store, B)
        flip_bit(files_of(folder, a)["data"], 5)
    with open_store(folder) as store:
        entry = store.lookup(A.key, lease=True)
        assert entry is not None and not entry.verify_chunk(0)
