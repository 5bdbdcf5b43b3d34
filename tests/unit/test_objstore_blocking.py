"""The synchronous face: threads, forks, closing, errors; and which backend a URL gets."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs.config import Origin, Settings
from cachefs.errors import CacheError, ConfigError, NotFound, PreconditionFailed
from cachefs.metrics import Metrics
from cachefs.objstore import BlockingStore, open_store
from cachefs.objstore.backoff import RetryPolicy
from cachefs.objstore.limiter import Limiter
from cachefs.objstore.obstore_backend import ObstoreStore
from cachefs.objstore.open import open_backend
from cachefs.objstore.url import parse_url


@pytest.fixture
def store() -> Iterator[BlockingStore]:
    with BlockingStore(f"memory://{uuid.uuid4().hex}", Origin()) as opened:
        yield opened


def test_all_methods(store: BlockingStore) -> None:
    meta = store.put("a/k", b"0123456789")
    assert store.head("a/k").etag == meta.etag
    assert bytes(store.get_range("a/k", 2, 5, version=store.head("a/k"))) == b"234"
    assert [bytes(b) for b in store.get_ranges("a/k", [(0, 1), (9, 10)])] == [b"0", b"9"]
    found, data = store.get("a/k")
    assert (found.size, bytes(data)) == (10, b"0123456789")
    assert store.put_multipart("b", iter([b"x" * 10, b"y"])).size == 11
    assert [m.key for page in store.list("") for m in page.objects] == ["a/k", "b"]
    assert [p for page in store.list("", delimiter=True) for p in page.prefixes] == ["a/"]
    with pytest.raises(PreconditionFailed):
        store.put("b", b"1", if_none_match=True)
    store.delete(["b", "never"])
    with pytest.raises(NotFound):
        store.head("b")


def test_the_thread_starts_with_the_first_call_and_ends_with_close() -> None:
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "objstore"}

    before = threads()
    store = BlockingStore(f"memory://{uuid.uuid4().hex}", Origin())
    assert threads() == before
    store.put("k", b"1")
    assert len(threads() - before) == 1
    store.close()
    store.close()
    assert threads() == before
    with pytest.raises(CacheError, match="closed"):
        store.head("k")


def test_from_many_threads(store: BlockingStore) -> None:
    def work(i: int) -> bytes:
        store.put(f"k{i}", b"%d" % i)
        return bytes(store.get(f"k{i}")[1])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(64))) == [b"%d" % i for i in range(64)]


def test_a_source_of_parts_that_fails(store: BlockingStore) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x"
        raise LookupError("the source broke")

    with pytest.raises(LookupError, match="the source broke"):
        store.put_multipart("k", failing())
    with pytest.raises(NotFound):
        store.head("k")


def test_closing_ends_a_call_of_another_thread() -> None:
    store = BlockingStore("http://10.255.255.1:9", Origin())  # nobody answers there
    failed: list[BaseException] = []

    def call() -> None:
        try:
            store.head("k")
        except BaseException as e:  # noqa: BLE001 - whatever it is, it is looked at below
            failed.append(e)

    caller = threading.Thread(target=call)
    caller.start()
    until = time.monotonic() + 10
    while not any(thread.name == "objstore" for thread in threading.enumerate()):
        assert time.monotonic() < until
    store.close()
    caller.join(20)
    assert not caller.is_alive() and isinstance(failed[0], CacheError)


def test_settings_and_metrics_reach_the_policy() -> None:
    metrics = Metrics()
    settings = Settings.load({}, request_deadline=7, stall_timeout=3, origin_parallel=2)
    with BlockingStore(f"memory://{uuid.uuid4().hex}", Origin(), settings=settings, metrics=metrics) as store:
        store.put("k", b"12345")
        store.get_range("k", 1, 4)
    assert metrics.get("origin_puts") == 1
    assert metrics.get("origin_gets") == 1
    assert metrics.get("origin_get_bytes") == 3
    assert RetryPolicy.from_settings(settings) == RetryPolicy(deadline=7, stall=3, parallel=2)


@pytest.mark.parametrize(
    ("url", "origin", "says"),
    [
        ("s3://b", Origin(backend="quick"), "no backend 'quick'"),
        ("s3://b", Origin(preset="nimbus"), "no preset"),
        ("s3://b", Origin(preset="azure"), "az://"),
        ("s3://", Origin(), "no bucket"),
        ("ftp2://b", Origin(backend="obstore"), "obstore knows no ftp2://"),
    ],
)
def test_what_can_never_work_is_refused_when_opened(url: str, origin: Origin, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_store(url, origin)
    with pytest.raises(ConfigError, match=says):
        BlockingStore(url, origin)


def test_an_unknown_scheme_is_refused_at_the_first_call() -> None:
    with BlockingStore("nosuch://b", Origin()) as store, pytest.raises(ConfigError, match="nosuch"):
        store.head("k")


@pytest.mark.parametrize(
    ("url", "backend", "kind"),
    [
        ("s3://b", "auto", "RoutedStore"),
        ("s3://b", "fsspec", "S3fsStore"),
        ("memory://b", "auto", "RoutedStore"),
        ("memory://b", "fsspec", "FsspecStore"),
        ("https://host", "auto", "RoutedStore"),
        ("gs://b", "auto", "RoutedStore"),
        ("az://b", "obstore", "RoutedStore"),
        ("hf://b", "auto", "FsspecStore"),
    ],
)
def test_which_backend(url: str, backend: str, kind: str) -> None:
    made = open_backend(parse_url(url), Origin(backend=backend), RetryPolicy())
    assert type(made).__name__ == kind
    assert not isinstance(made, ObstoreStore), "odd keys must be caught in front of it"


def test_stores_of_one_bucket_can_share_a_limiter(tmp_path: Path) -> None:
    limiter = Limiter(3)
    first, second = (open_store(str(tmp_path), Origin(), limiter=limiter) for _ in range(2))
    assert first is not second
    assert vars(first)["_limiter"] is vars(second)["_limiter"] is limiter


def test_a_memory_store_is_the_same_for_the_same_name() -> None:
    name = uuid.uuid4().hex
    with BlockingStore(f"memory://{name}", Origin()) as one, BlockingStore(f"memory://{name}/key", Origin()) as two:
        one.put("k", b"1")
        assert bytes(two.get("k")[1]) == b"1"
    with BlockingStore(f"memory://{name}", Origin()) as again, BlockingStore("memory://", Origin()) as other:
        assert bytes(again.get("k")[1]) == b"1"
        with pytest.raises(NotFound):
            other.head("k")
