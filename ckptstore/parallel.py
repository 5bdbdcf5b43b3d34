"""Bounded parallel work: results in order, never more than a few items under way, whatever their number."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

WORKERS = 8


def run_bounded(function: Callable[[T], R], items: Iterable[T], *, workers: int = WORKERS) -> Iterator[R]:
    """``map`` over a few threads. Items are taken and results kept for at most ``workers`` of them at a time.

    The first error of ``function`` is raised at its place; nothing new is started then, and what runs is waited for.
    """
    source = iter(items)
    head = list(islice(source, 2))
    if len(head) < 2:
        yield from map(function, head)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="ckptstore") as pool:
        running: deque[Future[R]] = deque(pool.submit(function, item) for item in head)
        try:
            running.extend(pool.submit(function, item) for item in islice(source, workers - len(head)))
            while running:
                yield running.popleft().result()
                running.extend(pool.submit(function, item) for item in islice(source, 1))
        finally:
            for future in running:
                future.cancel()
