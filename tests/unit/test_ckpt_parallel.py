"""Bounded parallel work keeps order, bounds what is under way, and passes errors on."""

from __future__ import annotations

import threading

import pytest

from ckptstore.parallel import run_bounded


def test_results_come_in_the_order_of_the_items() -> None:
    assert list(run_bounded(lambda x: x * x, range(100), workers=4)) == [x * x for x in range(100)]


@pytest.mark.parametrize("count", [0, 1])
def test_little_work_starts_no_thread(count: int) -> None:
    names = list(run_bounded(lambda _: threading.current_thread().name, range(count)))
    assert names == [threading.current_thread().name] * count


def test_only_a_few_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> object:
        for x in range(1000):
            taken.append(x)
            yield x

    results = run_bounded(lambda x: x, items(), workers=4)  # type: ignore[arg-type,var-annotated]
    for x in range(10):
        assert next(results) == x
    assert len(taken) <= 10 + 4
    results.close()  # type: ignore[attr-defined]


def test_an_error_is_raised_in_its_place_and_nothing_new_is_started() -> None:
    started: list[int] = []

    def work(x: int) -> int:
        started.append(x)
        if x == 5:
            raise ValueError("five")
        return x

    results = run_bounded(work, range(1000), workers=2)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="five"):
        next(results)
    assert max(started) < 5 + 3
