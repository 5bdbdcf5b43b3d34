"""A clock that stands still until it is told to move."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ManualClock:
    """A :class:`cachefs.clock.Clock` for tests: ``sleep`` moves the time on instead of waiting.

    ``time`` and ``monotonic`` run together, from different starts. Thread-safe.
    """

    def __init__(self, *, time: float = 1_700_000_000.0, monotonic: float = 1000.0) -> None:
        self._lock = threading.Lock()
        self._time = time
        self._monotonic = monotonic

    def monotonic(self) -> float:
        return self._monotonic

    def time(self) -> float:
        return self._time

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        with self._lock:
            self._time += seconds
            self._monotonic += seconds

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    async def asleep(self, seconds: float) -> None:
        self.advance(seconds)
        await asyncio.sleep(0)


class TimerClock(ManualClock):
    """For code that races waits against each other: ``asleep`` ends when the time has come, and not before.

    :meth:`drive` runs a coroutine and moves the time on, from one sleeper's hour to the next, whenever nothing else is
    left to do. Only for code whose waits are all on this clock or on other coroutines of the same loop.

    ``turns`` of the loop after which everything that can happen without time passing has happened.
    """

    def __init__(self, *, time: float = 1_700_000_000.0, monotonic: float = 1000.0, turns: int = 100) -> None:
        super().__init__(time=time, monotonic=monotonic)
        self._turns = turns
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    async def asleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.monotonic() + seconds, next(self._numbers), wake))
        await wake

    async def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. Raises ``AssertionError`` when it waits for something that is not time."""
        task = asyncio.ensure_future(work)
        try:
            while True:
                for _ in range(self._turns):
                    if task.done():
                        return task.result()
                    await asyncio.sleep(0)
                self._wake_next()
        finally:
            task.cancel()
            await asyncio.wait({task})

    def _wake_next(self) -> None:
        while self._sleepers:
            when, _, wake = heapq.heappop(self._sleepers)
            if not wake.done():
                self.advance(max(0.0, when - self.monotonic()))
                wake.set_result(None)
                return
        raise AssertionError("everybody waits, and nobody for the clock")
