"""A bound on bytes that are held for a while: replies that wait for their readers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """``budget`` bytes, taken in the order of asking; more than that is taken alone. Belongs to one event loop."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._taken = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def take(self, size: int) -> AsyncIterator[None]:
        """Hold ``size`` bytes, waiting for them if need be."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if not granted.cancelled():
                self._taken -= size
            self._grant()

    def _grant(self) -> None:
        while self._queue:
            size, granted = self._queue[0]
            if granted.cancelled():
                self._queue.popleft()
                continue
            if self._taken and self._taken + size > self._budget:
                return
            self._queue.popleft()
            self._taken += size
            granted.set_result(None)
