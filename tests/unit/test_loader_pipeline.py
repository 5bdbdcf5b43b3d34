"""The threads under Loader: results in order, memory bounded, errors where they belong, and an end that is one."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from loader.pipeline import Pipeline, Window


def make(source: Iterator[int], work: object = None, **options: object) -> Pipeline[int, int]:
    settings: dict[str, object] = {"threads": 3, "window": Window(8, 1 << 20), "cost": lambda _: 1, **options}
    return Pipeline(source, work or (lambda i: i * i), **settings)  # type: ignore[arg-type]


def alive(pipeline: Pipeline[int, int]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader-test")]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("items", [0, 1, 7, 300])
def test_results_come_in_order(threads: int, items: int) -> None:
    def work(i: int) -> int:
        time.sleep(0.0001 * (i % 3))  # some are quicker than those before them
        return i * i

    pipeline = make(iter(range(items)), work, threads=threads)
    assert list(pipeline) == [i * i for i in range(items)]
    assert list(pipeline) == []
    pipeline.close()


def test_the_window_bounds_what_is_ahead() -> None:
    ahead, given, most = 0, 0, 0
    lock = threading.Lock()

    def source() -> Iterator[int]:
        nonlocal ahead, most
        for i in range(200):
            with lock:
                ahead += 1
                most = max(most, ahead - given)
            yield i

    pipeline = make(source(), window=Window(5, 1 << 20))
    for _ in pipeline:
        with lock:
            given += 1
    assert most <= 5 + 1  # one is with the consumer, who has not counted it yet


def test_bytes_bound_it_too() -> None:
    begun = 0

    def source() -> Iterator[int]:
        nonlocal begun
        for i in range(50):
            begun += 1
            yield i

    pipeline = make(source(), window=Window(1000, 10), cost=lambda _: 4, threads=1)
    assert next(pipeline) == 0
    deadline = time.monotonic() + 10
    while begun < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert begun == 3  # two of 4 bytes are ready behind the first; a third would make 12
    assert list(pipeline) == [i * i for i in range(1, 50)]


def test_something_larger_than_the_window_still_passes() -> None:
    assert list(make(iter(range(5)), window=Window(100, 10), cost=lambda _: 1000)) == [0, 1, 4, 9, 16]


def test_an_error_comes_where_its_result_would_have() -> None:
    def work(i: int) -> int:
        if i == 4:
            raise KeyError("four")
        return i

    pipeline = make(iter(range(100)), work, name="loader-test")
    assert [next(pipeline) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(KeyError, match="four") as caught:
        next(pipeline)
    assert caught.value.__notes__ == ["in the loader's reading stage"]
    with pytest.raises(StopIteration):
        next(pipeline)
    assert alive(pipeline) == []


def test_so_does_one_of_the_source() -> None:
    def source() -> Iterator[int]:
        yield from (1, 2)
        raise OSError("gone")

    pipeline = make(source(), name="loader-test")
    assert [next(pipeline), next(pipeline)] == [1, 4]
    with pytest.raises(OSError, match="gone") as caught:
        next(pipeline)
    assert caught.value.__notes__ == ["in the loader's planning stage"]
    assert alive(pipeline) == []


def test_closing_stops_the_threads_and_may_be_repeated() -> None:
    pipeline = make(iter(range(10**9)), name="loader-test", window=Window(4, 1 << 20))
    assert next(pipeline) == 0 and alive(pipeline)
    pipeline.close()
    assert alive(pipeline) == []
    pipeline.close()
    with pytest.raises(StopIteration):
        next(pipeline)


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.pipeline.STOP_SECONDS", 0.05)
    go = threading.Event()
    begun = threading.Event()

    def work(i: int) -> int:
        begun.set()
        go.wait(30)
        return i

    pipeline = make(iter(range(3)), work, threads=1, name="loader-test")
    consumer = threading.Thread(target=lambda: list(pipeline))
    consumer.start()
    assert begun.wait(10)
    started = time.monotonic()
    pipeline.close()
    assert time.monotonic() - started < 5
    consumer.join(10)
    assert not consumer.is_alive()  # whoever waits for a result of a closed pipeline is let go
    go.set()


def test_times_add_up() -> None:
    pipeline = make(iter(range(20)), lambda i: time.sleep(0.002) or i, threads=1)
    list(pipeline)
    assert pipeline.times.working >= 0.03
    assert pipeline.times.empty > 0


def test_never_started_never_runs() -> None:
    pipeline = make(iter(range(3)))
    pipeline.close()
    assert list(pipeline) == []
