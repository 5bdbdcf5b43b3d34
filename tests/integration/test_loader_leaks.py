"""What a long run leaves behind: no descriptor, thread, lease, map or shared memory, and memory that does not grow."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import loader
from cachefs.client import Client
from cachefs.objstore.blocking import BlockingStore
from cachefs.testing.node import Node, node
from cachefs.testing.seaweed import SeaweedServer
from loader import ShardDataset
from loader.formats import Tokens
from loader.testing import write_tars, write_tokens

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc/self"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def eventually(what: Callable[[], bool], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def left(cache: Path, *workers: int) -> tuple[int, int, int, list[str]]:
    """Descriptors, threads, maps of cached shards, and segments of shared memory of this process and those workers."""
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    maps = Path("/proc/self/maps").read_text().count(str(cache))
    pids = (os.getpid(), *workers)
    segments = sorted(name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids))
    return files, threading.active_count(), maps, segments


@pytest.fixture
def cached(tmp_path: Path, seaweed: SeaweedServer, s3_bucket: str) -> Iterator[tuple[str, Node]]:
    """The URL of 30 samples in five tars, and a node that caches them."""
    write_tars(tmp_path / "data", [7, 5, 6, 3, 9])
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        for path in sorted((tmp_path / "data").iterdir()):
            store.put(f"data/{path.name}", path.read_bytes())
    with node(tmp_path / "node", replace(seaweed.origin)) as here:
        yield f"s3://{s3_bucket}/data", here


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def make(url: str, client: Client, **options: Any) -> ShardDataset:
    return ShardDataset(url, client=client, **{"batch_size": 4, "ids": True, "seed": 1, **options})


class Breaking:
    """Breaks off passes: of samples, of batches, of threads and, now and then, of DataLoader workers."""

    def __init__(self, url: str, here: Node) -> None:
        self.samples = make(url, here.client())
        self.threaded = loader.Loader(make(url, here.client()), threads=2)
        self.plain = DataLoader(make(url, here.client()), 4, collate_fn=loader.collate, num_workers=1)
        self.workers: set[int] = set()
        for number in range(26):  # what stays open from pass to pass is there
            self.break_off(number)

    def break_off(self, number: int) -> None:
        kinds: tuple[Iterable[Any], ...] = (self.samples, self.samples.batched(), self.threaded)
        for sample in islice(kinds[number % 3], 1 + number % 5):
            assert len(sample["bin"])
        if number % 25 == 0:
            iterator = iter(self.plain)
            next(iterator)
            self.workers.update(process.pid for process in multiprocessing.active_children() if process.pid)
            del iterator


def break_off_often(url: str, here: Node, count: int) -> None:
    cache, breaking = here.settings.cache_dir, Breaking(url, here)
    # the latest passes' maps and workers may be on their way out
    assert eventually(lambda: left(cache, *breaking.workers)[2:] == (0, [])), left(cache, *breaking.workers)
    before = left(cache, *breaking.workers)
    for number in range(count):
        breaking.break_off(number)

    def nothing_more() -> bool:
        """A thread that gives leases back may be on its way now, or have been before."""
        now = left(cache, *breaking.workers)
        return all(a <= b for a, b in zip(now[:3], before[:3], strict=True)) and now[3] == []

    assert eventually(nothing_more), (before, left(cache, *breaking.workers))
    assert len(breaking.workers) >= 1 + count // 25


@pytest.mark.s3
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_early_breaks_leave_nothing(cached: tuple[str, Node], count: int) -> None:
    url, here = cached
    break_off_often(url, here, count)
    with here.client() as watching:
        reading = make(url, here.client())
        begun = iter(reading)
        next(begun)
        assert watching.stats()["leases"] != 0
        del begun, reading
        gc.collect()
        # what a client gives back goes to the daemon in a thread of its own
        assert eventually(lambda: watching.stats()["leases"] == 0), watching.stats()


@pytest.mark.s3
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
)
def test_workers_read_after_the_parent_has_used_the_client(cached: tuple[str, Node], method: str) -> None:
    """By samples, batches and threads, which leave open shards, connections and helpers in the parent."""
    url, here = cached
    client = here.client()
    wanted = []
    for epoch in range(3):
        ds = make(url, client)
        ds.set_epoch(epoch)
        wanted.append(ids(ds.batched()))
    ds = make(url, client)
    begun = iter(make(url, client))
    held = next(begun)  # a pass that is under way, with its maps
    assert ids(loader.Loader(ds, threads=2)) == wanted[0]
    batches = DataLoader(ds, 4, collate_fn=loader.collate, num_workers=2, multiprocessing_context=method)
    assert [ids(batches), ids(batches)] == wanted[1:]
    assert [held["__id__"], *(sample["__id__"] for sample in begun)] == [i for batch in wanted[0] for i in batch]
    ds.set_epoch(0)
    assert ids(ds.batched()) == wanted[0]


def anonymous() -> int:
    """Bytes of this process's memory that are no file's."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def passes(ds: Any, samples: int) -> Iterator[int]:
    """Read so many samples; how many were read after each pass."""
    seen = 0
    while seen < samples:
        for batch in ds.batched():
            seen += len(batch["__id__"])
        yield seen


KINDS = ("tars", "tokens", "threads")
RUNS = [
    ("tars", 30_000),
    ("threads", 25_000),
    *(pytest.param(kind, 1_000_000, marks=pytest.mark.slow) for kind in KINDS),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "samples"), RUNS)
def test_memory_does_not_grow_with_the_samples_that_were_read(tmp_path: Path, kind: str, samples: int) -> None:
    options: dict[str, Any] = {"batch_size": 50, "ids": True, "seed": 1}
    if kind == "tars":
        write_tars(tmp_path, [250] * 4)
    else:
        write_tokens(tmp_path / "t.bin", 1000 * 16)
        options["format"] = Tokens(length=16)
    ds = ShardDataset(tmp_path, **options)
    source: Any = loader.Loader(ds, threads=2) if kind == "threads" else ds
    taken = []
    for seen in passes(source, samples):
        if seen >= samples // 4:  # by then whatever is kept from pass to pass is there
            taken.append(anonymous())
    # the least of the first third and of the last: what is free in between is the allocator's affair
    third = len(taken) // 3
    assert third >= 5
    assert min(taken[-third:]) - min(taken[:third]) < 2 << 20
