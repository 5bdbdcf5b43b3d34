"""Attachments in the flash store: kept and found, checked, counted, bounded, and gone with their entry."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs.attachments import MOST_PER_ENTRY, check_name
from cachefs.errors import CacheError, CacheFull, ConfigError, DiskFault
from cachefs.flash import Entry, FlashStore
from cachefs.testing.clock import ManualClock
from cachefs.testing.diskops import FaultyOps
from cachefs.testing.flashkit import CHUNK, disk_usage, files_of, fill, flip_bit, open_store, thing

A, B, C = (thing(name, 3 * CHUNK - 7) for name in "abc")
DATA = random.Random(5).randbytes(100_000)


def attached(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "nearflash-v1" / "attached").iterdir())


def found(store: FlashStore, what=A) -> Entry:  # type: ignore[no-untyped-def]
    entry = store.lookup(what.key)
    assert entry is not None
    return entry


@pytest.mark.parametrize("data", [b"", b"x", DATA])
def test_what_was_attached_is_found_also_after_a_restart(tmp_path: Path, data: bytes) -> None:
    with open_store(tmp_path) as store:
        entry = fill(store, A)
        assert store.attachments.read(entry, "index.1-a") is None
        assert store.attachments.size(entry, "index.1-a") is None
        assert store.attachments.keep(entry, "index.1-a", data)
        assert store.attachments.read(entry, "index.1-a") == data
        assert store.attachments.size(entry, "index.1-a") is not None
        assert store.attachments.read(entry, "index.1") is None
        assert store.attachments.read(fill(store, B), "index.1-a") is None
        (name,) = attached(tmp_path)
        mode = os.stat(tmp_path / "nearflash-v1" / "attached" / name).st_mode
        assert stat.S_IMODE(mode) == 0o600
        assert stat.S_IMODE(os.stat(tmp_path / "nearflash-v1" / "attached").st_mode) == 0o700
        used = store.usage().used
    with open_store(tmp_path) as store:
        assert disk_usage(tmp_path) <= store.usage().used <= used
        assert store.attachments.read(found(store), "index.1-a") == data
        assert store.usage().dying == 0


def test_an_entry_that_is_filled_has_attachments_and_keeps_them(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = store.create(A.key, len(A.data), lease=True)
        entry.write_chunk(0, A.chunk(0))
        assert store.attachments.keep(entry, "early", DATA)
        entry.release()
    with open_store(tmp_path) as store:
        entry = fill_rest(store)
        assert store.attachments.read(entry, "early") == DATA
        [info] = store.entries()
        assert info.state == "published"
        assert info.disk_bytes >= len(A.data) + len(DATA)
    with open_store(tmp_path) as store:
        assert store.attachments.read(found(store), "early") == DATA


def fill_rest(store: FlashStore) -> Entry:
    entry = store.create(A.key, len(A.data), lease=True)
    for i in entry.missing():
        if not entry.verify_chunk(i):
            entry.write_chunk(i, A.chunk(i))
    entry.release()
    return entry


def test_the_first_of_a_name_stays_and_the_oldest_makes_room(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = fill(store, A)
        for i in range(MOST_PER_ENTRY + 2):
            assert store.attachments.keep(entry, f"n{i}", b"%d" % i)
            assert store.attachments.keep(entry, f"n{i}", b"another")
            stamp = 1_000_000 + i
            for path in (tmp_path / "nearflash-v1" / "attached").glob(f"*.n{i}.att"):
                os.utime(path, (stamp, stamp))
        kept = {f"n{i}": b"%d" % i for i in range(2, MOST_PER_ENTRY + 2)}
        assert {name: store.attachments.read(entry, name) for name in kept} == kept
        assert store.attachments.read(entry, "n1") is None
        assert len(attached(tmp_path)) == MOST_PER_ENTRY
        assert store.usage().dying == 0
    with open_store(tmp_path) as store:
        assert store.attachments.keep(found(store), "x", b"")
        assert store.attachments.read(found(store), "n2") is None, "the order survives"
        assert store.attachments.read(found(store), "n3") == b"3"


@pytest.mark.parametrize("filled", [True, False])
def test_they_go_with_their_entry(tmp_path: Path, filled: bool) -> None:
    with open_store(tmp_path) as store:
        before = store.usage().used
        entry = fill(store, A) if filled else store.create(A.key, len(A.data))
        store.attachments.keep(entry, "x", DATA)
        store.attachments.keep(entry, "y", DATA)
        assert store.evict(A.key.name) >= 2 * len(DATA)
        assert attached(tmp_path) == []
        assert store.usage().used <= before + 2 * 4096  # directories do not shrink
        with pytest.raises(CacheError, match="gone"):
            store.attachments.keep(entry, "x", DATA)
        with pytest.raises(CacheError, match="gone"):
            store.attachments.read(entry, "x")
        assert store.attachments.read(fill(store, A), "x") is None


def test_they_go_when_a_bad_chunk_replaces_the_entry(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.attachments.keep(fill(store, A), "x", b"made from bytes that rotted since")
    with open_store(tmp_path) as store:
        flip_bit(files_of(tmp_path, found(store))["data"], CHUNK)
        entry = store.lookup(A.key, lease=True)
        assert entry is not None
        assert not entry.verify_chunk(1)
        entry.release()
        store.drop_dying()
        assert store.attachments.read(found(store), "x") is None
        assert attached(tmp_path) == []


def test_a_rotten_header_of_the_entry_takes_them_along(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = fill(store, A)
        store.attachments.keep(entry, "x", DATA)
        meta = files_of(tmp_path, entry)["meta"]
    flip_bit(meta, 30)
    with open_store(tmp_path) as store:
        assert store.lookup(A.key) is None
        store.drop_dying()
        assert attached(tmp_path) == []
        assert store.usage().dying == 0


@pytest.mark.parametrize("place", [0, 9, 17, 24, 24 + len(DATA) - 1])
def test_a_damaged_one_is_absent_and_removed(tmp_path: Path, place: int) -> None:
    with open_store(tmp_path) as store:
        store.attachments.keep(fill(store, A), "x", DATA)
        (name,) = attached(tmp_path)
        flip_bit(tmp_path / "nearflash-v1" / "attached" / name, place)
        assert store.attachments.read(found(store), "x") is None
        assert attached(tmp_path) == []
        assert store.attachments.keep(found(store), "x", DATA)
        assert store.attachments.read(found(store), "x") == DATA


@pytest.mark.parametrize("length", [0, 5, 24, 1000])
def test_what_a_power_cut_left_is_absent_and_removed(tmp_path: Path, length: int) -> None:
    with open_store(tmp_path) as store:
        store.attachments.keep(fill(store, A), "x", DATA)
    (name,) = attached(tmp_path)
    os.truncate(tmp_path / "nearflash-v1" / "attached" / name, length)
    with open_store(tmp_path) as store:
        assert store.attachments.size(found(store), "x") is not None
        assert store.attachments.read(found(store), "x") is None
        assert attached(tmp_path) == []
        assert store.fault is None


def test_one_that_somebody_removed_is_absent(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        store.attachments.keep(fill(store, A), "x", DATA)
        (name,) = attached(tmp_path)
        (tmp_path / "nearflash-v1" / "attached" / name).unlink()
        assert store.attachments.read(found(store), "x") is None
        assert store.usage().dying == 0
        assert store.fault is None


def test_they_count_in_the_quota_and_make_room_like_entries(tmp_path: Path) -> None:
    quota = 5 * 3 * CHUNK
    with open_store(tmp_path, quota) as store:
        for what in (A, B, C):
            fill(store, what)
        entry = store.lookup(C.key, lease=True)
        assert entry is not None
        big = bytes(7 * CHUNK)
        assert store.attachments.keep(entry, "big", big)
        assert store.lookup(A.key) is None, "the least recently used made room"
        assert disk_usage(tmp_path) <= store.usage().used <= quota
        with pytest.raises(CacheFull):
            store.attachments.keep(entry, "more", bytes(7 * CHUNK))
        with pytest.raises(CacheFull, match="do not fit into the quota"):
            store.attachments.keep(entry, "most", bytes(quota))
        assert store.attachments.read(entry, "big") == big
        assert disk_usage(tmp_path) <= store.usage().used <= quota
        assert store.fault is None
        entry.release()


def test_orphans_are_removed_and_foreign_files_stay(tmp_path: Path) -> None:
    """An orphan has the name of ours and no entry; whatever has another name is somebody else's."""
    with open_store(tmp_path) as store:
        entry = fill(store, A)
        store.attachments.keep(entry, "x", DATA)
    folder = tmp_path / "nearflash-v1" / "attached"
    other = "0" * 40
    for name in (f"{other}.x.att", f"{other}.x.new", f"{entry.name}.y.new"):
        (folder / name).write_bytes(DATA)
    foreign = [f"{other}.X.att", "notes", f"{other}.att", f"{entry.name}..x", f"{other}.{'a' * 65}.att"]
    for name in foreign:
        (folder / name).write_bytes(b"mine")
    (folder / f"{other}.folder.att").mkdir()
    with open_store(tmp_path) as store:
        assert store.attachments.read(found(store), "x") == DATA
        assert store.usage().dying == 0
        assert attached(tmp_path) == sorted([f"{entry.name}.x.att", f"{other}.folder.att", *foreign])
        store.evict(A.key.name)
        assert attached(tmp_path) == sorted([f"{other}.folder.att", *foreign])


@pytest.mark.parametrize("suffix", ["att", "new"])
def test_a_file_in_the_way_is_not_replaced(tmp_path: Path, suffix: str) -> None:
    with open_store(tmp_path) as store:
        entry = fill(store, A)
        path = tmp_path / "nearflash-v1" / "attached" / f"{entry.name}.x.{suffix}"
        path.write_bytes(b"mine")
        used = store.usage().used
        assert not store.attachments.keep(entry, "x", DATA)
        assert store.attachments.read(entry, "x") is None
        assert path.read_bytes() == b"mine"
        assert store.usage().used == used
        assert store.fault is None


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, CacheFull), (errno.EIO, DiskFault), (errno.EROFS, DiskFault)]
)
@pytest.mark.parametrize("call", ["create", "allocate", "write", "rename", "disk_bytes", "stat"])
def test_a_refusing_disk_leaves_nothing(tmp_path: Path, call: str, number: int, kind: type[CacheError]) -> None:
    broken = False
    clock = ManualClock()

    def fault(name: str, file: str) -> int | None:
        return number if broken and name == call else None

    with open_store(tmp_path, ops=FaultyOps(fault), clock=clock) as store:
        entry = fill(store, A)
        used = store.usage().used
        broken = True
        with pytest.raises(CacheError) as caught:
            store.attachments.keep(entry, "x", DATA)
        assert type(caught.value) is kind
        broken = False
        clock.advance(10)
        store.check()
        store.drop_dying()
        assert attached(tmp_path) == []
        assert store.usage().used == used
        assert store.attachments.keep(entry, "x", DATA)
        assert store.attachments.read(entry, "x") == DATA


def test_a_disk_that_cannot_be_read_is_a_fault_and_no_damage(tmp_path: Path) -> None:
    broken = False
    clock = ManualClock()

    def fault(name: str, file: str) -> int | None:
        return errno.EIO if broken and name in {"read", "write"} else None

    with open_store(tmp_path, ops=FaultyOps(fault), clock=clock) as store:
        entry = fill(store, A)
        store.attachments.keep(entry, "x", DATA)
        broken = True
        with pytest.raises(DiskFault):
            store.attachments.read(entry, "x")
        broken = False
        assert store.attachments.read(entry, "x") == DATA


def test_one_that_cannot_be_removed_is_tried_again(tmp_path: Path) -> None:
    broken = False
    clock = ManualClock()

    def fault(name: str, file: str) -> int | None:
        return errno.EIO if broken and name == "unlink" and file.endswith(".att") else None

    with open_store(tmp_path, ops=FaultyOps(fault), clock=clock) as store:
        entry = fill(store, A)
        store.attachments.keep(entry, "x", DATA)
        broken = True
        store.evict(A.key.name)
        assert store.usage().dying >= len(DATA)
        assert disk_usage(tmp_path) <= store.usage().used
        clock.advance(10)
        store.check()
        entry = fill(store, A)  # moves the old one out of its way
        assert store.attachments.read(entry, "x") is None
        broken = False
        store.drop_dying()
        assert store.usage().dying == 0
        assert store.attachments.keep(entry, "x", b"new")
        assert store.attachments.read(entry, "x") == b"new"


def test_threads_attach_and_read_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path) as store, ThreadPoolExecutor(8) as pool:
        entry = fill(store, A)

        def work(i: int) -> bool:
            name = f"n{i % 4}"
            store.attachments.keep(entry, name, name.encode() * 1000)
            return store.attachments.read(entry, name) == name.encode() * 1000

        assert all(pool.map(work, range(64)))
        assert len(attached(tmp_path)) == 4
        assert disk_usage(tmp_path) <= store.usage().used


def test_closing_waits_for_one_that_is_written(tmp_path: Path) -> None:
    inside, go = threading.Event(), threading.Event()

    def fault(name: str, file: str) -> int | None:
        if name == "rename" and file.endswith(".x.new"):
            inside.set()
            go.wait(20)
        return None

    store = open_store(tmp_path, ops=FaultyOps(fault))
    entry = fill(store, A)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(store.attachments.keep, entry, "x", DATA)
        assert inside.wait(20)
        closing = pool.submit(store.close)
        go.set()
        assert writing.result(20)
        closing.result(20)
    with open_store(tmp_path) as store:
        assert store.attachments.read(found(store), "x") == DATA


@pytest.mark.parametrize("name", ["", "a" * 65, "A", "a/b", "a_b", "ä", "a b", "a\0", "a\n"])
def test_names_are_short_and_plain(name: str) -> None:
    with pytest.raises(ConfigError, match="is not the name of an attachment"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", ".", "..", "-", "x.new", "x.att", "a" * 64])
def test_plain_names_cannot_leave_the_folder_or_meet(tmp_path: Path, name: str) -> None:
    check: Callable[[str], str] = check_name
    assert check(name) == name
    with open_store(tmp_path) as store:
        entry = fill(store, A)
        assert store.attachments.keep(entry, name, DATA)
        assert store.attachments.keep(entry, "x", b"other")
        assert attached(tmp_path) == sorted([f"{entry.name}.{name}.att", f"{entry.name}.x.att"])
    with open_store(tmp_path) as store:
        assert store.attachments.read(found(store), name) == DATA
        assert store.attachments.read(found(store), "x") == b"other"
