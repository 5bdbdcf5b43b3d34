"""A pool that threads share; and shards that are read while they fill, when the cache goes on with another file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

from cachefs.errors import FormatError, Superseded
from cachefs.shard import FillingView, ObjectStat, Shard
from loader.buffers import IndexCache
from loader.counting import choose_format, count_parts
from loader.formats import Format, Jsonl, SampleIndex
from loader.formats.abc import Bytes, Mapped, Objects, Opened, Ready, all_there
from loader.layouts import Found
from loader.opening import open_mapped
from loader.sample import Sample
from loader.sharedpool import SharedPool

LINES = b"".join(b'{"n": %d}\n' % i for i in range(20))


class Node:
    """A client whose shards are given up once, in the middle of their first filling view."""

    def __init__(self, data: bytes = LINES, *, supersede: int = 1, delay: float = 0.0) -> None:
        self.data = data
        self.supersede = supersede
        self.delay = delay
        self.opened = 0
        self.open_now = 0
        self.lock = threading.Lock()

    def open(self, url: str, *, version: str | None = None, size: int | None = None) -> Shard:
        time.sleep(self.delay)
        with self.lock:
            self.opened += 1
            self.open_now += 1
        return Part(self, url)


class Part(Shard):
    def __init__(self, node: Node, url: str) -> None:
        self.node, self.url, self.size, self.version = node, url, len(node.data), "1"
        self.closed = False

    @property
    def cached(self) -> bool:
        return True

    def view(self) -> memoryview:
        return memoryview(bytearray(self.node.data))

    def filling(self) -> FillingView:
        def arrive(start: int, end: int) -> int:
            if self.closed:
                raise AssertionError("read after it was closed")
            with self.node.lock:
                given_up, self.node.supersede = self.node.supersede > 0, self.node.supersede - 1
            if given_up:
                raise Superseded("another file now", url=self.url)
            return self.size

        return FillingView(self.view(), self.url, arrive)

    def wait(self, start: int, end: int) -> None: ...

    def fileno(self) -> int:
        return 0

    def attachment(self, name: str) -> bytes | None:
        return None

    def attach(self, name: str, data: Any) -> None: ...

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.node.open_now -= 1


@dataclass(frozen=True)
class Lazy(Format):
    """Waits for bytes only when it reads them, as Parquet does."""

    name: ClassVar[str] = "lazy"
    stateful: ClassVar[bool] = True
    columnar: ClassVar[bool] = True

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        return Opened(objects.map(url), index or Ten())

    def parts(self, objects: Objects, url: str) -> list[int]:
        _, ready = objects.map(url)
        ready(0, 4)
        return [10]

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> SampleIndex:
        return Ten()

    def read(self, source: Mapped, index: Any, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        source.ready(i, i + 1)
        return Sample(byte=int(source.data[i]))

    def columns(self, source: Mapped, index: Any, rows: Any, url: str, fields: Any = None) -> dict[str, Any]:
        source.ready(0, 10)
        return {"byte": source.data[rows]}


class Ten(SampleIndex):
    def __len__(self) -> int:
        return 10

    @property
    def nbytes(self) -> int:
        return 8


def test_whoever_meets_another_file_maps_that_one() -> None:
    url = "s3://b/x"
    assert len(open_mapped(Node(), url).index) == 20  # type: ignore[arg-type]
    assert len(open_mapped(Node(), url, Jsonl()).index) == 20  # type: ignore[arg-type]
    stat = ObjectStat(url, len(LINES), "1")
    assert isinstance(choose_format(Found((stat,)), None, Node(), "raise"), Jsonl)  # type: ignore[arg-type]
    assert count_parts(Node(), stat, Lazy()) == [10]  # type: ignore[arg-type]


def test_it_may_happen_while_samples_are_read() -> None:
    node = Node()
    shard = open_mapped(node, "s3://b/x", Lazy())  # type: ignore[arg-type]
    assert shard.read(3) == {"byte": LINES[3]}
    assert node.opened == 2 and node.open_now == 1
    node = Node()
    shard = open_mapped(node, "s3://b/x", Lazy())  # type: ignore[arg-type]
    assert shard.columns(np.array([2, 5]))["byte"].tolist() == [LINES[2], LINES[5]]
    shard.close()
    assert node.open_now == 0


class Set:
    """What a pool knows of a data set of so many shards."""

    def __init__(self, format: Format, samples: int) -> None:
        self.format, self._samples = format, samples

    def stat(self, number: int) -> ObjectStat:
        return ObjectStat(f"s3://b/{number}", len(LINES), "1")

    def samples(self, number: int) -> int:
        return self._samples

    def unpacked(self, number: int) -> int | None:
        return None

    def part(self, number: int) -> int | None:
        return None


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def pool_of(node: Node, format: Format, samples: int, *, capacity: int = 4) -> SharedPool:
    return SharedPool(Set(format, samples), node, capacity=capacity, indexes=IndexCache())  # type: ignore[arg-type]


def test_a_shard_is_opened_once_for_all(threads: ThreadPoolExecutor) -> None:
    node = Node(supersede=0, delay=0.05)
    pool = pool_of(node, Jsonl(), 20)
    shards = list(threads.map(pool.get, [7] * 8))
    assert all(shard is shards[0] for shard in shards) and node.opened == 1
    pool.close()
    assert node.open_now == 0


def test_one_that_is_slow_to_open_keeps_nobody_else(threads: ThreadPoolExecutor) -> None:
    node = Node(supersede=0)
    pool = pool_of(node, Jsonl(), 20)
    pool.get(1)
    node.delay = 1.0
    slow = threads.submit(pool.get, 2)
    time.sleep(0.05)
    began = time.monotonic()
    for _ in range(100):
        pool.get(1)
    assert time.monotonic() - began < 0.5
    assert slow.result(10) is pool.get(2)
    pool.close()


def test_damage_is_the_same_error_for_all(threads: ThreadPoolExecutor) -> None:
    pool = pool_of(Node(supersede=0), Jsonl(), 21)

    def attempt(number: int) -> str:
        with pytest.raises(FormatError) as caught:
            pool.get(number)
        return str(caught.value)

    assert len(set(threads.map(attempt, [3] * 6))) == 1


def test_what_comes_too_late_is_closed(threads: ThreadPoolExecutor) -> None:
    node = Node(supersede=0, delay=0.2)
    pool = pool_of(node, Jsonl(), 20)
    late = threads.submit(pool.get, 1)
    time.sleep(0.05)
    pool.close()
    assert late.result(10).read(0) == {"n": 0}
    assert node.open_now == 0 and len(pool) == 0


def test_many_threads_and_few_places(threads: ThreadPoolExecutor) -> None:
    for make in (Jsonl, Lazy):
        node = Node(supersede=5)
        pool = pool_of(node, make(), 20 if make is Jsonl else 10, capacity=2)

        def work(seed: int, pool: SharedPool = pool) -> None:
            rng = np.random.default_rng(seed)
            for number in rng.integers(0, 9, 200).tolist():
                shard = pool.get(number)
                i = int(rng.integers(10))
                assert shard.read(i) == ({"n": i} if isinstance(shard.format, Jsonl) else {"byte": LINES[i]})

        jobs: list[Callable[[], None]] = [lambda s=s: work(s) for s in range(6)]  # type: ignore[misc]
        for done in [threads.submit(job) for job in jobs]:
            done.result(60)
        assert len(pool) <= 2
        pool.close()
