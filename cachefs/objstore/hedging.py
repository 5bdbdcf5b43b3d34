"""A second request for a read that is late. Decisions are in :mod:`.latency` and :mod:`.limiter`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..clock import Clock
from ..errors import Corrupt, Throttled, Unavailable
from ..metrics import Metrics
from .latency import Allowance, LatencyBook
from .limiter import Limiter
from .tasks import cancel_all

T = TypeVar("T")

_MAY_DIFFER = (Unavailable, Throttled, Corrupt)
"""Failures of one try, which tell nothing about another."""


class Hedger:
    """Runs reads of one bucket; late ones twice. ``share``: most extra requests, as a part of all reads."""

    def __init__(self, share: float, *, limiter: Limiter, metrics: Metrics, clock: Clock) -> None:
        self._allowance = Allowance(share)
        self._book = LatencyBook()
        self._limiter = limiter
        self._metrics = metrics
        self._clock = clock

    async def run(self, size: int, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of ``once()``, a read of ``size`` bytes for which the caller holds a slot of the limiter.

        If it is late, a second one is started in a slot of its own, if one is free. The first good answer wins and the
        other is cancelled, so what is returned is always one reply. Raises the first one's error when both fail.
        """
        if self._allowance.none:
            return await once()
        self._allowance.earn()
        began = self._clock.monotonic()
        delay = self._book.delay(size)
        result = await (once() if delay is None else self._watched(delay, once))
        self._book.add(size, self._clock.monotonic() - began)
        return result

    async def _watched(self, delay: float, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        first = asyncio.ensure_future(once())
        timer = asyncio.ensure_future(self._clock.asleep(delay))
        running = [first, timer]
        try:
            await asyncio.wait({first, timer}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() or not self._may_hedge():
                return await first
            second = asyncio.ensure_future(self._in_own_slot(once))
            running.append(second)
            self._metrics.add("origin_hedges")
            return await self._better(first, second)
        finally:
            await cancel_all(running)

    async def _better(self, first: asyncio.Task[T], second: asyncio.Task[T]) -> T:
        waiting = {first, second}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in (first, second):
                if task in done and task.exception() is None:
                    self._metrics.add("origin_hedges_won", task is second)
                    return task.result()
            if first in done and not isinstance(first.exception(), _MAY_DIFFER):
                break
        return first.result()

    def _may_hedge(self) -> bool:
        """Not while the store asks for fewer requests, and not in place of another read."""
        return self._limiter.at_ease and self._allowance.take()

    async def _in_own_slot(self, once: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with self._limiter.slot():
            return await once()
