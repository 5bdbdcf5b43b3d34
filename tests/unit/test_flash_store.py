"""The flash store: what it keeps, what it gives up, and what it refuses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs.errors import CacheBusy, CacheError, CacheFull
from cachefs.flash import EntryKey, FlashStore
from cachefs.testing.clock import ManualClock
from cachefs.testing.flashkit import CHUNK, Reader, Thing, disk_usage, files_of, fill, flip_bit, open_store, thing

A, B, C, D = (thing(name, 5 * CHUNK - 7) for name in "abcd")
TREE = "nearflash-v1"


def restart(store: FlashStore, folder: Path, **kwargs: int) -> FlashStore:
    store.close()
    return open_store(folder, **kwargs)


def verify_all(store: FlashStore, what: Thing) -> None:
    entry = store.lookup(what.key, lease=True)
    assert entry is not None
    assert all(entry.verify_chunk(i) for i in entry.needs_verify())
    entry.release()


# --- filling and reading --------------------------------------------------------------------------------------------


def test_an_entry_is_filled_chunk_by_chunk_and_published(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = store.create(A.key, len(A.data), lease=True)
        reader = Reader(entry)
        assert entry.missing() == [0, 1, 2, 3, 4] and entry.needs_verify() == []
        for i in (4, 0, 2, 3, 1):
            assert not reader.bits.has(i)
            assert [info.state for info in store.entries()] == ["filling"]
            entry.write_chunk(i, memoryview(bytearray(A.chunk(i))))
            assert reader.bits.has(i) and reader.wrong(A) == []
        assert entry.complete and reader.bits.all_set and entry.missing() == []
        assert reader.map is not None and reader.map[:] == A.data
        [info] = store.entries()
        assert (info.url, info.version, info.size, info.state) == (A.key.url, "v1", len(A.data), "published")
        assert (info.cached_bytes, info.leases) == (len(A.data), 1)
        entry.release()
        reader.close()


def test_an_object_without_bytes_is_complete_at_once(tmp_path: Path) -> None:
    empty = thing("empty", 0)
    with open_store(tmp_path) as store:
        entry = store.create(empty.key, 0, lease=True)
        assert entry.complete and entry.n_chunks == 0 and entry.missing() == []
        reader = Reader(entry)
        assert reader.bits.all_set
        reader.close()
    with open_store(tmp_path) as store:
        found = store.lookup(empty.key)
        assert found is not None and found.complete and found.size == 0


def test_the_data_file_is_the_object_and_modes_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with open_store(folder) as store:
        entry = fill(store, A)
        files = files_of(folder, entry)
        assert files["data"].read_bytes() == A.data
        assert files["data"].parent.name == "entries"
        assert entry.name == A.key.name and "bucket" not in str(files["data"])
        for path in folder.rglob("*"):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_keys_that_look_alike_or_like_paths_share_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folder = tmp_path / "cache"
    names = ["k", "k/1", "K", "../x", "/etc/x", "a/./b", "d/../../esc.bin", "x" * 300, "y" * 1000, "é", "e\u0301"]
    things = [thing(name, 100 + i) for i, name in enumerate(names)]
    with open_store(folder) as store:
        for what in things:
            fill(store, what)
        for what in things:
            entry = store.lookup(what.key, lease=True)
            assert entry is not None and entry.key == what.key
            reader = Reader(entry)
            assert reader.map is not None and reader.map[:] == what.data
            reader.close()
            entry.release()
        assert len(store.entries()) == len(names)
    assert list(outside.iterdir()) == [] and sorted(p.name for p in tmp_path.iterdir()) == ["cache", "outside"]


def test_info_tells_without_using(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        assert store.info(A.key) is None
        entry = store.create(A.key, len(A.data), lease=True)
        fill(store, B)
        entry.write_chunk(4, A.chunk(4))
        info = store.info(A.key)
        assert info is not None and info.cached_bytes == len(A.chunk(4)) == entry.cached_bytes()
        assert [i.url[-1] for i in store.entries()] == ["a", "b"]


def test_a_chunk_of_the_wrong_length_or_number_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = store.create(A.key, len(A.data), lease=True)
        with pytest.raises(CacheError, match=f"chunk 1 has 5 bytes instead of {CHUNK}"):
            entry.write_chunk(1, b"short")
        with pytest.raises(CacheError, match="no chunk 5, it has 5"):
            entry.write_chunk(5, A.chunk(0))
        with pytest.raises(CacheError, match="no chunk -1"):
            entry.verify_chunk(-1)
        assert entry.missing() == [0, 1, 2, 3, 4]


def test_a_chunk_that_can_be_read_is_not_written_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = store.create(A.key, len(A.data), lease=True)
        entry.write_chunk(0, A.chunk(0))
        entry.write_chunk(0, bytes(CHUNK))
        reader = Reader(entry)
        assert reader.wrong(A) == []
        reader.close()


def test_creating_twice_gives_the_same_entry(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = store.create(A.key, len(A.data))
        assert store.create(A.key, len(A.data), lease=True) is entry
        with pytest.raises(CacheError, match=f"cached with {len(A.data)} bytes, not 9"):
            store.create(A.key, 9, lease=True)
        assert store.entries()[0].leases == 1
        assert store.lookup(B.key) is None


def test_threads_fill_one_entry_and_many_at_once(tmp_path: Path) -> None:
    things = [thing(f"t{i}", 9 * CHUNK + i) for i in range(8)]
    with open_store(tmp_path, 32 << 20) as store, ThreadPoolExecutor(8) as pool:
        start = threading.Barrier(8)

        def make(what: Thing) -> None:
            start.wait(10)
            for other in (what, things[0]):
                entry = store.create(other.key, len(other.data), lease=True)
                for i in entry.missing():
                    entry.write_chunk(i, other.chunk(i))
                entry.release()

        list(pool.map(make, things, timeout=60))
        assert all(info.state == "published" and info.leases == 0 for info in store.entries())
        for what in things:
            entry = store.lookup(what.key, lease=True)
            assert entry is not None and entry.complete
            reader = Reader(entry)
            assert reader.map is not None and reader.map[:] == what.data
            reader.close()
            entry.release()


def test_a_store_leaves_no_descriptor_open(tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc/self/fd")
    before = set(os.listdir("/proc/self/fd"))
    store = open_store(tmp_path)
    entry = store.create(A.key, len(A.data), lease=True)
    entry.write_chunk(0, A.chunk(0))
    fill(store, B)
    entry.release()
    idle = len(os.listdir("/proc/self/fd"))
    entry.lease()
    entry.missing()
    assert len(os.listdir("/proc/self/fd")) > idle  # an entry in use has files open, an idle one none
    entry.release()
    assert len(os.listdir("/proc/self/fd")) == idle
    store.close()
    store.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = store.create(A.key, len(A.data), lease=True)
    store.close()
    for call in (
        lambda: store.lookup(A.key),
        lambda: store.create(B.key, 1),
        lambda: store.entries(),
        lambda: store.evict("x"),
        lambda: entry.write_chunk(0, A.chunk(0)),
        lambda: entry.lease(),
    ):
        with pytest.raises(CacheError, match="closed"):
            call()
    entry.release()


# --- restarts and verification --------------------------------------------------------------------------------------


def test_after_a_restart_chunks_count_once_they_are_verified(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, A)
    store = restart(store, tmp_path)
    entry = store.lookup(A.key, lease=True)
    assert entry is not None and not entry.complete
    assert entry.missing() == entry.needs_verify() == [0, 1, 2, 3, 4]
    reader = Reader(entry)
    assert entry.verify_chunk(2) and reader.bits.has(2) and not reader.bits.has(1)
    entry.release()
    entry.lease()  # what was verified stays so while the store is open
    assert entry.missing() == [0, 1, 3, 4]
    assert all(entry.verify_chunk(i) for i in (0, 1, 2, 3, 4)) and entry.complete
    entry.release()
    assert store.lookup(A.key) is entry and entry.complete
    reader.close()
    store.close()


def test_a_partial_fill_goes_on_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = store.create(A.key, len(A.data), lease=True)
    entry.write_chunk(1, A.chunk(1))
    entry.write_chunk(4, A.chunk(4))
    store = restart(store, tmp_path)
    assert store.entries()[0].cached_bytes == len(A.chunk(1)) + len(A.chunk(4))
    again = store.lookup(A.key, lease=True)
    assert again is not None and again.needs_verify() == [1, 4] and again.missing() == [0, 1, 2, 3, 4]
    assert not again.verify_chunk(0)
    assert again.verify_chunk(1) and again.verify_chunk(4)
    for i in again.missing():
        again.write_chunk(i, A.chunk(i))
    assert again.complete and store.entries()[0].state == "published"
    reader = Reader(again)
    assert reader.map is not None and reader.map[:] == A.data
    reader.close()
    store.close()


def test_rot_in_a_partial_fill_is_found_and_fetched_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = store.create(A.key, len(A.data), lease=True)
    entry.write_chunk(1, A.chunk(1))
    store.close()
    flip_bit(files_of(tmp_path, entry)["data"], CHUNK + 5)
    store = open_store(tmp_path)
    again = store.lookup(A.key, lease=True)
    assert again is not None and again.needs_verify() == [1]
    assert not again.verify_chunk(1)
    assert not again.superseded and again.needs_verify() == []
    again.write_chunk(1, A.chunk(1))
    assert Reader(again).wrong(A) == []
    store.close()


@pytest.mark.parametrize("rotten", ["data", "digest"])
def test_rot_in_a_published_entry_heals_into_a_new_file(tmp_path: Path, rotten: str) -> None:
    store = open_store(tmp_path)
    fill(store, A)
    store = restart(store, tmp_path)
    old = store.lookup(A.key, lease=True)
    assert old is not None
    files = files_of(tmp_path, old)
    inode = files["data"].stat().st_ino
    header_bytes = files["meta"].stat().st_size - 8 * A.n_chunks
    flip_bit(files[rotten if rotten == "data" else "meta"], 3 * CHUNK + 1 if rotten == "data" else header_bytes + 25)
    reader = Reader(old)
    assert [old.verify_chunk(i) for i in range(5)] == [True, True, True, False, True]
    assert old.superseded and reader.bits.superseded and not reader.bits.has(3)
    assert reader.wrong(A) == []

    new = store.lookup(A.key, lease=True)
    assert new is not None and new is not old
    assert new.missing() == [0, 1, 2, 3, 4] and new.needs_verify() == [0, 1, 2, 4]
    assert all(new.verify_chunk(i) for i in new.needs_verify())
    assert new.missing() == [3]
    new.write_chunk(3, A.chunk(3))
    fresh = Reader(new)
    assert fresh.map is not None and fresh.map[:] == A.data
    assert files_of(tmp_path, new)["data"].stat().st_ino != inode
    assert next((tmp_path / TREE / "dying").iterdir()).stat().st_ino == inode
    assert store.usage().dying > 0  # the old reader still holds the old file
    reader.close()
    old.release()
    store.drop_dying()
    assert store.usage().dying == 0
    fresh.close()
    new.release()
    store.close()


def test_a_published_entry_without_a_digest_heals_as_well(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = fill(store, A)
    store.close()
    meta = files_of(tmp_path, entry)["meta"]
    raw = meta.read_bytes()
    meta.write_bytes(raw[:-16] + bytes(8) + raw[-8:])
    with open_store(tmp_path) as store:
        old = store.lookup(A.key, lease=True)
        assert old is not None and old.needs_verify() == [0, 1, 2, 4]
        with pytest.raises(CacheError, match="look it up again"):
            old.write_chunk(3, A.chunk(3))
        assert old.superseded
        new = store.lookup(A.key, lease=True)
        assert new is not None and new.needs_verify() == [0, 1, 2, 4]
        old.release()
        for i in new.missing():
            if not new.verify_chunk(i):
                new.write_chunk(i, A.chunk(i))
        assert new.complete and store.usage().dying > 0
        store.drop_dying()
        assert store.usage().dying == 0


def test_without_room_for_two_copies_the_bad_entry_just_goes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = fill(store, A)
    store.close()
    flip_bit(files_of(tmp_path, entry)["data"], 0)
    with open_store(tmp_path, len(A.data) + 40 * 4096) as store:
        old = store.lookup(A.key, lease=True)
        assert old is not None and not old.verify_chunk(0)
        assert old.superseded and store.lookup(A.key) is None
        old.release()
        fill(store, A)
        assert store.entries()[0].state == "published"


def test_a_published_entry_is_never_written_to(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, A)
    store = restart(store, tmp_path)
    entry = store.lookup(A.key, lease=True)
    assert entry is not None
    before = files_of(tmp_path, entry)["data"].stat().st_mtime_ns
    entry.write_chunk(0, A.chunk(0))  # turns into a verification
    assert 0 not in entry.missing()
    flip_bit(files_of(tmp_path, entry)["data"], CHUNK)
    with pytest.raises(CacheError, match="look it up again"):
        entry.write_chunk(1, A.chunk(1))
    assert entry.superseded
    assert next((tmp_path / TREE / "dying").iterdir()).stat().st_mtime_ns == before
    store.close()


def test_a_rotten_header_drops_the_entry(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = fill(store, A)
    store.close()
    flip_bit(files_of(tmp_path, entry)["meta"], 34)
    with open_store(tmp_path) as store:
        assert store.lookup(A.key) is None
        store.drop_dying()
        assert store.usage().entries == 0 and store.usage().dying == 0
        fill(store, A)
    assert files_of(tmp_path, entry)["data"].read_bytes() == A.data


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("left", [0, 20, 100, 10_000])
def test_a_sidecar_that_a_power_cut_left_behind_drops_the_entry(tmp_path: Path, left: int, full: bool) -> None:
    """Cut short, or of the right length and all zero: the file's blocks never reached the disk."""
    store = open_store(tmp_path)
    entry = store.create(A.key, len(A.data))
    if full:
        fill(store, A)
    store.close()
    meta = files_of(tmp_path, entry)["meta"]
    meta.write_bytes(meta.read_bytes()[:left] if left < 1000 else bytes(meta.stat().st_size))
    with open_store(tmp_path) as store:
        assert store.lookup(A.key) is None
        store.drop_dying()
        assert (store.usage().entries, store.usage().dying) == (0, 0)
        fill(store, A)


def test_data_that_a_power_cut_left_zero_is_never_served(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    entry = fill(store, A)
    store.close()
    data = files_of(tmp_path, entry)["data"]
    data.write_bytes(A.data[: 2 * CHUNK] + bytes(len(A.data) - 2 * CHUNK))
    with open_store(tmp_path) as store:
        for _ in range(2):
            found = store.lookup(A.key, lease=True)
            assert found is not None
            reader = Reader(found)
            for i in found.needs_verify():
                found.verify_chunk(i)
            assert reader.wrong(A) == []
            reader.close()
            found.release()
        assert found.missing() == [2, 3, 4]


@pytest.mark.parametrize("length", [0, 3 * CHUNK])
def test_a_data_file_of_the_wrong_length_drops_the_entry(tmp_path: Path, length: int) -> None:
    store = open_store(tmp_path)
    entry = fill(store, A)
    store.close()
    os.truncate(files_of(tmp_path, entry)["data"], length)
    with open_store(tmp_path) as store:
        assert store.lookup(A.key) is None


def test_a_file_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        for what, kind in ((A, "data"), (B, "meta")):
            entry = fill(store, what)
            files_of(tmp_path, entry)[kind].unlink()
        store.close()
    with open_store(tmp_path) as store:
        assert store.lookup(A.key) is None and store.lookup(B.key) is None
        fill(store, A)
        entry = store.lookup(A.key)
        assert entry is not None
        files_of(tmp_path, entry)["data"].unlink()
        entry.lease()
        with pytest.raises(CacheError, match="gone"):
            entry.reader_fds()
        assert store.fault is None
        entry.release()


# --- quota and eviction ---------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    clock = ManualClock()
    with open_store(tmp_path, 3 * (5 * CHUNK + 8 * 4096) + 100_000, clock=clock) as store:
        for what in (A, B, C):
            clock.advance(1)
            fill(store, what)
        clock.advance(1)
        assert store.lookup(A.key) is not None
        fill(store, D)
        assert [info.url[-1] for info in store.entries()] == ["c", "a", "d"]


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    quota = 3 * (5 * CHUNK + 8 * 4096) + 100_000
    clock = ManualClock()
    with open_store(tmp_path, quota, clock=clock) as store:
        for what in (A, B, C):
            fill(store, what)
        for what in (B, C, A):
            clock.advance(1)  # too soon to be written down at once; closing does
            store.lookup(what.key)
    with open_store(tmp_path, quota, clock=clock) as store:
        assert [info.url[-1] for info in store.entries()] == ["b", "c", "a"]
        fill(store, D)
        assert store.lookup(B.key) is None and store.lookup(A.key) is not None


def test_leased_entries_stay_and_nothing_is_evicted_in_vain(tmp_path: Path) -> None:
    with open_store(tmp_path, 2 * (5 * CHUNK + 8 * 4096) + 100_000) as store:
        a = fill(store, A)
        fill(store, B)
        a.lease()
        with pytest.raises(CacheError, match="in use by 1 readers"):
            store.evict(a.name)
        big = thing("big", 8 * CHUNK)
        with pytest.raises(CacheFull, match=r"s3://bucket/big: no room for its \d+ bytes: \d+ short"):
            store.create(big.key, len(big.data))
        assert {info.url[-1] for info in store.entries()} == {"a", "b"}
        fill(store, C)
        assert {info.url[-1] for info in store.entries()} == {"a", "c"}
        a.release()
        with pytest.raises(CacheError, match="more often than leased"):
            a.release()


@pytest.mark.parametrize("quota", [0, 4 * CHUNK, 5 * CHUNK])
def test_an_object_larger_than_the_quota_is_refused_at_once(tmp_path: Path, quota: int) -> None:
    with open_store(tmp_path, quota) as store:
        with pytest.raises(CacheFull, match=f"its {len(A.data)} bytes do not fit into the quota of {quota} bytes"):
            store.create(A.key, len(A.data))
        assert store.usage().entries == 0 and store.fault is None


def test_two_readers_that_pin_all_there_is(tmp_path: Path) -> None:
    with open_store(tmp_path, 7 * CHUNK) as store:
        a = store.create(A.key, len(A.data), lease=True)
        with pytest.raises(CacheFull, match="readers hold what could be evicted"):
            store.create(B.key, len(B.data), lease=True)
        for i in a.missing():
            a.write_chunk(i, A.chunk(i))
        a.release()
        fill(store, B)


def test_the_free_space_floor_is_kept(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    with (
        open_store(tmp_path, free_floor=free.f_bavail * free.f_frsize + (1 << 30)) as store,
        pytest.raises(CacheFull, match="free on disk"),
    ):
        store.create(A.key, len(A.data))


def test_usage_is_what_the_disk_says_and_within_the_quota(tmp_path: Path) -> None:
    quota = 40 * CHUNK
    with open_store(tmp_path, quota) as store:
        for n in range(40):
            what = thing(f"n{n}", (n % 7) * CHUNK + n)
            entry = store.create(what.key, len(what.data), lease=True)
            for i in entry.missing():
                usage = store.usage()
                assert disk_usage(tmp_path) <= usage.used <= quota
                entry.write_chunk(i, what.chunk(i))
            entry.release()
            usage = store.usage()
            assert disk_usage(tmp_path) <= usage.used <= quota
            assert usage.used - disk_usage(tmp_path) <= 2 * 4096  # published: exact but for small change
        assert usage.used + usage.free <= quota


def test_a_smaller_quota_after_a_restart_evicts(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for what in (A, B, C):
        fill(store, what)
    store = restart(store, tmp_path, quota=7 * CHUNK)
    usage = store.usage()
    assert usage.used <= 7 * CHUNK and usage.entries == 1 and disk_usage(tmp_path) <= usage.used
    store.close()


def test_space_is_credited_only_when_the_last_map_is_gone(tmp_path: Path) -> None:
    with open_store(tmp_path, 12 * CHUNK) as store:
        a = fill(store, A)
        a.lease()
        reader, second = Reader(a), Reader(a)
        a.release()
        before = store.usage().used
        assert store.evict(a.name) == 0
        assert store.lookup(A.key) is None and a.superseded
        usage = store.usage()
        assert usage.used >= before - 4096 and usage.dying >= len(A.data) and usage.entries == 0
        with pytest.raises(CacheFull):
            store.create(D.key, 8 * CHUNK)
        fill(store, B)  # another file: the mapped one is left alone
        assert reader.map is not None and reader.map[:] == A.data
        reader.close()
        store.drop_dying()
        assert store.usage().dying > 0 and second.map is not None and second.map[:] == A.data
        second.close()
        store.drop_dying()
        assert store.usage().dying == 0
        fill(store, C)


def test_an_inherited_map_counts_as_held(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("leases that tell are Linux's")
    with open_store(tmp_path) as store:
        a = fill(store, A)
        a.lease()
        data_fd, bits_fd = a.reader_fds()
        a.release()
        code = (
            "import mmap, os, sys\n"
            f"m = mmap.mmap({data_fd}, {len(A.data)}, flags=mmap.MAP_PRIVATE, prot=3)\n"
            f"os.close({data_fd})\n"
            "if os.fork() == 0:\n"
            "    print('mapped', flush=True)\n"
            "    sys.stdin.read()\n"
            "    os._exit(0)\n"
            "os._exit(0)\n"  # the child holds the map only by inheritance
        )
        child = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[data_fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        os.close(data_fd)
        os.close(bits_fd)
        assert child.stdin is not None and child.stdout is not None
        try:
            assert child.stdout.readline() == b"mapped\n"
            child.wait(10)
            assert store.evict(a.name) == 0
            assert store.usage().dying > 0
        finally:
            child.stdin.close()
        assert child.stdout.read() == b""  # the grandchild is gone
        child.stdout.close()
        store.drop_dying()
        assert store.usage().dying == 0


def test_maps_keep_reading_through_eviction_under_pressure(tmp_path: Path) -> None:
    with open_store(tmp_path, 20 * CHUNK) as store:
        a = fill(store, A)
        a.lease()
        reader = Reader(a)
        a.release()  # the map alone holds it now
        for n in range(12):
            fill(store, thing(f"p{n}", 5 * CHUNK))
            assert reader.map is not None and reader.map[:] == A.data
            assert disk_usage(tmp_path) <= store.usage().used <= 20 * CHUNK
        assert store.lookup(A.key) is a  # what somebody holds frees nothing, so it is not evicted for room
        reader.close()
        for n in range(12, 16):
            fill(store, thing(f"p{n}", 5 * CHUNK))
        assert store.lookup(A.key) is None


def test_what_a_dead_daemon_evicted_is_cleared_up_once_free(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    a = fill(store, A)
    a.lease()
    reader = Reader(a)
    a.release()
    store.evict(a.name)
    store = restart(store, tmp_path)
    assert store.usage().dying > 0 and store.lookup(A.key) is None
    assert reader.map is not None and reader.map[:] == A.data
    reader.close()
    store.drop_dying()
    assert store.usage().dying == 0 and list((tmp_path / TREE / "dying").iterdir()) == []
    store.close()


def test_an_evicted_entry_says_so(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        entry = fill(store, A)
        assert store.evict(entry.name) >= len(A.data)
        assert store.evict(entry.name) == 0
        for call in (entry.lease, lambda: entry.write_chunk(0, A.chunk(0)), lambda: entry.verify_chunk(0)):
            with pytest.raises(CacheError, match="gone"):
                call()
        with pytest.raises(CacheError, match="needs a lease"):
            entry.reader_fds()


# --- whose directory it is ------------------------------------------------------------------------------------------


def test_a_second_owner_is_told_who_the_first_is(tmp_path: Path) -> None:
    with open_store(tmp_path), pytest.raises(CacheBusy, match=f"held by pid {os.getpid()}"):
        open_store(tmp_path)
    open_store(tmp_path).close()


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"p" * 1000)
    folder = tmp_path / "cache"
    (folder / "orig").mkdir(parents=True)
    (folder / "orig" / "0.tar").write_bytes(b"mine" * 1000)
    (folder / "nearflash-v2").mkdir()
    (folder / "nearflash-v2" / "future").write_bytes(b"f")
    (folder / "link").symlink_to(elsewhere)
    open_store(folder).close()
    tree = folder / TREE
    for place in ("entries", "filling", "dying"):
        (tree / place / "notes.txt").write_bytes(b"note")
        (tree / place / "link").symlink_to(elsewhere / "precious")
        (tree / place / "folder").mkdir()
    (tree / "filling" / f"{'0' * 40}.data").symlink_to(elsewhere / "precious")
    (tree / "entries" / f"{'1' * 40}.meta").write_bytes(b"NFSIDECR" + (2).to_bytes(4, "little") + bytes(100))
    (tree / "entries" / f"{'2' * 40}.data").write_bytes(b"of another version")
    (tree / "entries" / f"{'2' * 40}.meta").write_bytes(b"NFSIDECR" + (9).to_bytes(4, "little") + bytes(100))

    def foreign() -> dict[str, bytes | None]:
        return {
            str(p): p.read_bytes() if p.is_file() else None
            for p in tmp_path.rglob("*")
            if not p.name.startswith(tuple(t.key.name for t in (A, B, C, D)))
        }

    before = foreign()
    with open_store(folder, 13 * CHUNK) as store:
        for what in (A, B, C, D):
            fill(store, what)
        assert store.entries() != []
        for info in store.entries():
            store.evict(info.name)
    assert foreign() == before


def test_foreign_files_among_ours_count_in_the_quota_from_the_start(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        used = store.usage().used
    meta = tmp_path / TREE / "entries" / f"{'1' * 40}.meta"
    meta.write_bytes(b"NFSIDECR" + (9).to_bytes(4, "little") + bytes(100_000))
    with open_store(tmp_path) as store:
        assert store.usage().used == used + meta.stat().st_blocks * 512
        assert store.usage().entries == 0
    meta.unlink()
    with open_store(tmp_path) as store:
        assert store.usage().used == used


def test_a_file_in_the_way_is_not_replaced(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    obstacles = [tmp_path / TREE / "entries" / f"{A.key.name}.meta", tmp_path / TREE / "filling" / f"{B.key.name}.data"]
    obstacles[0].write_bytes(b"NFSIDECR" + (2).to_bytes(4, "little") + bytes(100))
    obstacles[1].symlink_to("/nonexistent")
    with open_store(tmp_path) as store:
        for what in (A, B):
            with pytest.raises(CacheFull, match="in the way"):
                store.create(what.key, len(what.data))
        assert store.fault is None
        fill(store, C)
    assert obstacles[0].read_bytes().startswith(b"NFSIDECR") and obstacles[1].is_symlink()


def test_a_tree_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / TREE).mkdir()
    (tmp_path / TREE / "something").write_bytes(b"x")
    with pytest.raises(CacheError, match="holds no marker of this cache"):
        open_store(tmp_path)
    (tmp_path / TREE / "something").unlink()
    (tmp_path / TREE / "MARKER").write_bytes(b"not json")
    with pytest.raises(CacheError, match="holds no marker of this cache"):
        open_store(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / TREE).write_bytes(b"a file")
    with pytest.raises(CacheError, match="is not a directory of this cache"):
        open_store(other)


def test_a_lock_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"a lock of some other program")
    with pytest.raises(CacheError, match="not a lock file of this cache"):
        open_store(tmp_path)
    assert (tmp_path / "lock").read_bytes() == b"a lock of some other program"
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(CacheError, match="not a lock file of this cache"):
        open_store(tmp_path)
    assert not (tmp_path / "target").exists()


def test_a_file_as_cache_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    for path in (tmp_path / "f", tmp_path / "f" / "below"):
        with pytest.raises(CacheError, match=r"/f(/below)?: is not a directory \(set cache_dir"):
            open_store(path)


def test_a_folder_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "notes.txt").write_bytes(b"mine")
    with pytest.raises(
        CacheError, match=r"is no cache and holds other things \('notes.txt' \.\.\.\) .*NEARFLASH_CACHE_DIR"
    ):
        open_store(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "train"]
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)  # an empty file system
    open_store(tmp_path / "disk").close()
    (tmp_path / "disk" / "put beside it later").mkdir()
    open_store(tmp_path / "disk").close()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(CacheError, match="belongs to user 12345, not to user 0"):
        open_store(folder)


def test_the_cache_directory_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with open_store(tmp_path / "link") as store:
        fill(store, A)
        with pytest.raises(CacheBusy):
            open_store(tmp_path / "real")
    with open_store(tmp_path / "real") as store:
        verify_all(store, A)


def test_each_object_has_its_own_version(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        fill(store, A)
        newer = Thing(EntryKey(A.key.endpoint, A.key.url, "v2"), B.data)
        assert store.lookup(newer.key) is None
        fill(store, newer)
        assert {(info.url, info.version) for info in store.entries()} == {(A.key.url, "v1"), (A.key.url, "v2")}
