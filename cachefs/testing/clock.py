"""A clock that stands still until it is told to move."""

from __future__ import annotations

import asyncio
import threading


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
