"""The process dies at every single change it makes to the disk; what the next one finds must be right."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.flash import FlashStore
from cachefs.testing.diskops import Crash, CrashingOps
from cachefs.testing.flashkit import CHUNK, Reader, Thing, disk_usage, files_of, fill, flip_bit, open_store, thing

A, B, C = (thing(name, 2 * CHUNK + 5) for name in "abc")
QUOTA = 2 * (3 * CHUNK) + 30 * 4096
"""Room for two of the three."""
NAMES = ("x", "y")
FOREIGN = {"orig.tar": b"o" * 5000, "nearflash-v1/entries/notes": b"n", f"nearflash-v1/filling/{'9' * 39}.data": b"x"}


def derived(what: Thing, name: str) -> bytes:
    """What is attached to an object under a name."""
    return f"{what.key.url} {name} ".encode() * 300


def check(folder: Path, store: FlashStore) -> None:
    """The invariants that hold after any crash."""
    assert disk_usage(folder) - sum(4096 * -(-len(v) // 4096) for v in FOREIGN.values()) <= store.usage().used <= QUOTA
    for what in (A, B, C):
        entry = store.lookup(what.key, lease=True)
        if entry is None:
            continue
        reader = Reader(entry)
        for i in entry.needs_verify():
            # A digest that was cut in two makes its chunk count as missing; published ones are whole.
            assert entry.verify_chunk(i) or not entry.superseded
        assert reader.wrong(what) == []
        for name in NAMES:
            assert store.attachments.read(entry, name) in (None, derived(what, name))
        reader.close()
        entry.release()
    assert {name: (folder / name).read_bytes() for name in FOREIGN} == FOREIGN


def check_use(folder: Path) -> None:
    """Open, check, use everything again, and check once more: nothing is stuck."""
    with open_store(folder, QUOTA) as store:
        check(folder, store)
        for what in (A, B, C):
            entry = fill(store, what)
            for name in NAMES:
                assert store.attachments.keep(entry, name, derived(what, name))
                assert store.attachments.read(entry, name) == derived(what, name)
            check(folder, store)
        assert store.usage().dying == 0 and store.fault is None
    tree = folder / "nearflash-v1"
    left = [p.name for place in ("filling", "dying") for p in (tree / place).iterdir()]
    assert left == [f"{'9' * 39}.data"]
    live = {path.name[:40] for path in (tree / "entries").glob("*.meta")}
    attached = {path.name for path in (tree / "attached").iterdir()}
    assert attached == {f"{entry}.{name}.att" for entry in live for name in NAMES}


def life(folder: Path, ops: CrashingOps) -> None:
    """A bit of everything: open, fill, publish, evict by pressure and by hand, close."""
    with open_store(folder, QUOTA, ops=ops) as store:
        store.attachments.keep(fill(store, A), "x", derived(A, "x"))
        entry = store.create(B.key, len(B.data), lease=True)
        entry.write_chunk(1, B.chunk(1))
        store.attachments.keep(entry, "x", derived(B, "x"))
        store.attachments.keep(entry, "y", derived(B, "y"))
        entry.release()
        fill(store, C)
        fill(store, B)
        store.evict(C.key.name)


def heal(folder: Path, ops: CrashingOps) -> None:
    """A published entry with a bad chunk, healed."""
    with open_store(folder, QUOTA, ops=ops) as store:
        entry = store.lookup(A.key, lease=True)
        if entry is not None:
            for i in entry.needs_verify():
                entry.verify_chunk(i)
            entry.release()
        fill_verified(store, A)


def fill_verified(store: FlashStore, what: Thing) -> None:
    entry = store.create(what.key, len(what.data), lease=True)
    for i in entry.missing():
        if not entry.verify_chunk(i):
            entry.write_chunk(i, what.chunk(i))
    entry.release()


def new_folder(folder: Path) -> Path:
    open_store(folder).close()
    for name, content in FOREIGN.items():
        (folder / name).write_bytes(content)
    return folder


def run_to(n: int, folder: Path, script: Callable[[Path, CrashingOps], None]) -> bool:
    """Run the script to its n-th change of the disk; True if it died there, False if it ended before."""
    ops = CrashingOps()
    ops.arm(n)
    try:
        script(folder, ops)
    except Crash:
        return True
    finally:
        ops.release()
    return False


def test_dying_at_every_change_of_a_normal_life(tmp_path: Path) -> None:
    n = 0
    crashed = True
    while crashed:
        n += 1
        folder = new_folder(tmp_path / str(n))
        crashed = run_to(n, folder, life)
        check_use(folder)
        shutil.rmtree(folder)
    assert n > 40  # the life is long enough to mean something


def test_dying_while_the_directory_is_made(tmp_path: Path) -> None:
    n = 0
    crashed = True
    while crashed:
        n += 1
        folder = tmp_path / str(n)
        crashed = run_to(n, folder, lambda folder, ops: open_store(folder, QUOTA, ops=ops).close())
        with open_store(folder, QUOTA) as store:
            fill(store, A)
    assert n > 6


def test_dying_at_every_change_of_healing(tmp_path: Path) -> None:
    n = 0
    crashed = True
    while crashed:
        n += 1
        folder = new_folder(tmp_path / str(n))
        with open_store(folder, QUOTA) as store:
            entry = fill(store, A)
        flip_bit(files_of(folder, entry)["data"], CHUNK)
        crashed = run_to(n, folder, heal)
        with open_store(folder, QUOTA) as store:
            found = store.lookup(A.key, lease=True)
            if found is not None:
                reader = Reader(found)
                for i in found.needs_verify():
                    found.verify_chunk(i)
                assert reader.wrong(A) == []
                reader.close()
                found.release()
            fill_verified(store, A)
            found = store.lookup(A.key)
            assert found is not None and found.complete
            check(folder, store)
        shutil.rmtree(folder)
    assert n > 10


@pytest.mark.parametrize("first", range(1, 60, 3))
def test_dying_again_while_recovering(tmp_path: Path, first: int) -> None:
    """The heir of a crash dies as well, at each of its own changes."""
    n = 0
    crashed = True
    while crashed:
        n += 1
        folder = new_folder(tmp_path / str(n))
        run_to(first, folder, life)
        crashed = run_to(n, folder, lambda folder, ops: open_store(folder, QUOTA, ops=ops).close())
        check_use(folder)
        shutil.rmtree(folder)


def test_a_reader_of_before_the_crash_goes_on(tmp_path: Path) -> None:
    """Maps made before the daemon died stay right, whatever its heir evicts."""
    folder = new_folder(tmp_path / "cache")
    ops = CrashingOps()
    store = open_store(folder, QUOTA, ops=ops)
    entry = fill(store, A)
    entry.lease()
    reader = Reader(entry)
    ops.release()
    with open_store(folder, QUOTA) as store:
        for what in (B, C, B, C):
            fill(store, what)
            assert reader.map is not None and reader.map[:] == A.data
            assert store.usage().used <= QUOTA
        assert store.lookup(A.key) is not None  # it is held, so it is not what was evicted
        assert store.evict(A.key.name) == 0
        assert reader.map is not None and reader.map[:] == A.data
        reader.close()
        store.drop_dying()
        assert store.usage().dying == 0
