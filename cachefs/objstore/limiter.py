"""How many requests a bucket gets at a time: fewer when it says that it is too much, slowly more again.

Additive increase, multiplicative decrease, as in TCP's congestion control (RFC 5681).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_NEAR = 0.75
_CAREFUL = 8.0


class Window:
    """The allowed number of concurrent requests; pure. Starts at its ceiling, halves when throttled, never below 1.

    Where it was too much the last time, it grows an eighth as fast, so that a store that takes less than the ceiling
    has to refuse little; beyond that it is as fast again (as in CUBIC, RFC 9438, 4.1).
    """

    def __init__(self, ceiling: int) -> None:
        if ceiling < 1:
            raise ValueError(f"a limiter for {ceiling} requests")
        self._ceiling = ceiling
        self._size = float(ceiling)
        self._lowered_at = float("-inf")
        self._too_much = float("inf")

    @property
    def size(self) -> int:
        return int(self._size)

    @property
    def lowered(self) -> bool:
        """Whether the bucket gets fewer requests at a time than it might."""
        return self.size < self._ceiling

    def succeeded(self) -> None:
        """A request went through: one more at a time after a full window of them."""
        near = _NEAR * self._too_much <= self._size <= self._too_much + 1.0
        step = 1.0 / self._size
        self._size = min(float(self._ceiling), self._size + (step / _CAREFUL if near else step))

    def throttled(self, started: float, now: float) -> None:
        """A request that ``started`` at that time was refused. Requests that were under way together count once."""
        if started > self._lowered_at:
            self._too_much = self._size
            self._size = max(1.0, self._size / 2.0)
            self._lowered_at = now


class Limiter:
    """Hands out slots, first come, first served. Belongs to one event loop."""

    def __init__(self, ceiling: int) -> None:
        self.window = Window(ceiling)
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def busy(self) -> int:
        """Slots in use."""
        return self._busy

    @property
    def at_ease(self) -> bool:
        """A slot is free, nobody waits for one, and there is no sign that the bucket gets too many requests."""
        return not self.window.lowered and not self._waiting and self._busy < self.window.size

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it; cancelling while waiting gives up the place in line."""
        await self._acquire()
        try:
            yield
        finally:
            self._busy -= 1
            self._wake()

    async def _acquire(self) -> None:
        if self._busy < self.window.size and not self._waiting:
            self._busy += 1
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._waiting.remove(place)
            else:  # the slot came at the same moment
                self._busy -= 1
                self._wake()
            raise

    def _wake(self) -> None:
        while self._waiting and self._busy < self.window.size:
            place = self._waiting.popleft()
            if not place.done():
                self._busy += 1
                place.set_result(None)
