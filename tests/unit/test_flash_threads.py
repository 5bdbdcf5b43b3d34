"""The flash store under several threads at once, with too little room for all they want."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cachefs.errors import CacheError, CacheFull
from cachefs.flash import FlashStore
from cachefs.testing.flashkit import CHUNK, Reader, Thing, disk_usage, files_of, fill, flip_bit, open_store, thing

QUOTA = 24 * CHUNK
THINGS = [thing(f"t{n}", (n % 4 + 1) * CHUNK - n) for n in range(12)]


def use(store: FlashStore, what: Thing, rng: random.Random) -> bool:
    """What a daemon does for one reader; False if there was no room."""
    for _ in range(5):
        try:
            entry = store.lookup(what.key, lease=True) or store.create(what.key, len(what.data), lease=True)
        except CacheFull:
            return False
        try:
            reader = Reader(entry)
            todo = entry.missing()
            rng.shuffle(todo)
            for i in todo:
                if not entry.verify_chunk(i) and not entry.superseded:
                    entry.write_chunk(i, what.chunk(i))
            assert reader.wrong(what) == []
            assert reader.bits.all_set or entry.superseded
            reader.close()
        except CacheError:
            assert entry.superseded  # evicted by hand, or replaced
        finally:
            entry.release()
        if not entry.superseded:
            return True
    return True


def test_many_threads_want_more_than_fits(tmp_path: Path) -> None:
    with open_store(tmp_path, QUOTA) as store:
        stop = threading.Event()

        def watch() -> int:
            looks = 0
            while not stop.is_set():
                usage = store.usage()
                assert usage.used <= QUOTA
                # a walk is no snapshot: it may count an entry that goes and, later on its way, what took its place
                assert min(disk_usage(tmp_path) for _ in range(3)) <= QUOTA
                store.drop_dying()
                looks += 1
            return looks

        def work(seed: int) -> int:
            rng = random.Random(seed)
            served = 0
            for _ in range(40):
                what = rng.choice(THINGS)
                served += use(store, what, rng)
                if rng.random() < 0.1:
                    try:
                        store.evict(rng.choice(THINGS).key.name)
                    except CacheError as e:
                        assert "in use" in str(e)
            return served

        with ThreadPoolExecutor(6) as pool:
            watcher = pool.submit(watch)
            try:
                served = sum(pool.map(work, range(5), timeout=100))
            finally:
                stop.set()
            assert watcher.result(10) > 0
        assert served > 100
        assert store.usage().dying == 0 and store.fault is None
        assert disk_usage(tmp_path) <= QUOTA  # nothing moves now
        assert all(info.leases == 0 for info in store.entries())


def test_many_threads_meet_a_bad_chunk(tmp_path: Path) -> None:
    what = thing("bad", 12 * CHUNK)
    for round_ in range(3):
        folder = tmp_path / str(round_)
        with open_store(folder) as store:
            entry = fill(store, what)
        flip_bit(files_of(folder, entry)["data"], (3 * round_ + 2) * CHUNK)
        with open_store(folder) as store, ThreadPoolExecutor(6) as pool:
            start = threading.Barrier(6)

            def work(seed: int, store: FlashStore = store, start: threading.Barrier = start) -> bool:
                start.wait(10)
                return use(store, what, random.Random(seed))

            assert all(pool.map(work, range(6), timeout=100))
            found = store.lookup(what.key)
            assert found is not None and found.complete
            store.drop_dying()
            assert store.usage().dying == 0


def test_closing_waits_for_what_is_under_way(tmp_path: Path) -> None:
    what = thing("slow", 4 * CHUNK)
    store = open_store(tmp_path)
    entry = store.create(what.key, len(what.data), lease=True)
    errors: list[CacheError] = []
    started = threading.Event()

    def write() -> None:
        try:
            for _ in range(1000):
                for i in range(4):
                    entry.write_chunk(i, what.chunk(i))
                started.set()
        except CacheError as e:
            errors.append(e)

    thread = threading.Thread(target=write)
    thread.start()
    assert started.wait(20)
    store.close()
    thread.join(20)
    assert not thread.is_alive()
    assert errors == [] or "closed" in str(errors[0])
    with open_store(tmp_path) as store:
        found = store.lookup(what.key, lease=True)
        assert found is not None and all(found.verify_chunk(i) for i in range(4))
