"""``kill -9`` of a real process that fills the store, at random moments."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cachefs.testing.flashkit import CHUNK, Reader, disk_usage, fill, open_store, thing

QUOTA = 40 * CHUNK
NAMES = [f"k{n}" for n in range(12)]
SIZES = {name: (n % 5 + 1) * CHUNK + n * 37 for n, name in enumerate(NAMES)}
WRITER = """
import random, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from cachefs.errors import CacheError
from cachefs.testing.flashkit import open_store, thing

folder, quota, seed, sizes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
store = open_store(folder, quota)
things = {name: thing(name, size) for name, size in sizes.items()}
print("ready", flush=True)


def work(seed):
    rng = random.Random(seed)
    while True:
        what = things[rng.choice(list(things))]
        try:
            entry = store.lookup(what.key, lease=True) or store.create(what.key, len(what.data), lease=True)
            todo = entry.missing()
            rng.shuffle(todo)
            for i in todo:
                if not entry.verify_chunk(i):
                    entry.write_chunk(i, what.chunk(i))
            entry.release()
            if rng.random() < 0.3:
                store.evict(entry.name)
        except CacheError:
            pass  # no room just now, or the other thread evicted it


with ThreadPoolExecutor(2) as pool:
    list(pool.map(work, [seed, seed + 1]))
"""


def kill_once(folder: Path, seed: int, after: float) -> None:
    """Let a writer work for ``after`` seconds, kill it, and check what it left."""
    command = [sys.executable, "-c", WRITER, str(folder), str(QUOTA), str(seed), repr(SIZES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            time.sleep(after)  # the moment of the kill is the input of this test
            assert writer.poll() is None
        finally:
            writer.kill()
    with open_store(folder, QUOTA) as store:
        usage = store.usage()
        assert disk_usage(folder) <= usage.used <= QUOTA
        assert usage.dying == 0
        for name in NAMES:
            what = thing(name, SIZES[name])
            entry = store.lookup(what.key, lease=True)
            if entry is None:
                continue
            reader = Reader(entry)
            assert all(entry.verify_chunk(i) for i in entry.needs_verify())
            assert reader.wrong(what) == []
            reader.close()
            entry.release()
        assert disk_usage(folder) <= store.usage().used <= QUOTA


@pytest.mark.chaos
def test_a_killed_writer_leaves_a_good_store(tmp_path: Path) -> None:
    rng = random.Random(20)
    for n in range(10):
        kill_once(tmp_path, n, rng.uniform(0.0, 0.15))
    with open_store(tmp_path, QUOTA) as store:
        for name in NAMES:
            fill(store, thing(name, SIZES[name]))
        assert store.fault is None


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(10))
def test_a_writer_killed_many_times(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for n in range(20):
        kill_once(tmp_path, 1000 * seed + n, rng.uniform(0.0, 0.5))
