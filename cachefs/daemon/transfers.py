"""Runs chunk jobs under one budget of bytes in flight and a limit of parallel jobs per lane.

A lane is one bucket, or the local disk. Lanes with work take turns, so a slow bucket cannot starve another. The
budget covers a job from its start to its end: bytes received but not yet written count, which bounds the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from ..metrics import Metrics
from .chunkqueue import ChunkQueue, Tier


class Owner(Protocol):
    """Whoever queues chunks. Compared by identity."""

    def chunk_bytes(self, chunk: int) -> int:
        """What the job takes of the budget."""
        ...

    async def run(self, chunk: int) -> None:
        """Do the job. Deals with its own errors; only cancellation leaves it."""
        ...


class Lane:
    """One bucket's queue and how many of its jobs run."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0
        self.queue: ChunkQueue[Owner] = ChunkQueue()

    @property
    def idle(self) -> bool:
        return not self.active and not len(self.queue)


class Transfers:
    """The pump. Belongs to one event loop. ``budget`` in bytes; one job larger than it runs alone."""

    def __init__(self, budget: int, metrics: Metrics) -> None:
        self._budget = budget
        self._metrics = metrics
        self._in_flight = 0
        self._lanes: list[Lane] = []
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Bytes of running jobs."""
        return self._in_flight

    @property
    def busy(self) -> bool:
        return bool(self._tasks) or any(not lane.idle for lane in self._lanes)

    def lane(self, limit: int) -> Lane:
        """A new lane; :meth:`remove` it when its bucket is no longer used."""
        lane = Lane(limit)
        self._lanes.append(lane)
        return lane

    def remove(self, lane: Lane) -> None:
        self._lanes.remove(lane)

    def pump(self) -> None:
        """Start what may start. To be called after anything was queued."""
        while not self._closed and (lane := self._next_lane()) is not None:
            item = lane.queue.take()
            assert item is not None, "a lane is chosen for its next chunk"
            owner, chunk = item
            size = owner.chunk_bytes(chunk)
            lane.active += 1
            self._in_flight += size
            self._metrics.set("transfer_in_flight_bytes", self._in_flight)
            task = asyncio.create_task(self._run(lane, owner, chunk, size))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @asynccontextmanager
    async def turn(self, lane: Lane, size: int) -> AsyncIterator[None]:
        """Hold ``size`` bytes of the budget and one job of the lane, as urgently as a reader's demand."""
        turn = _Turn(size)
        lane.queue.add(turn, (0,), Tier.OPENED)
        lane.queue.demand(turn, (0,))
        self.pump()
        try:
            await turn.granted.wait()
            yield
        finally:
            lane.queue.drop(turn)
            turn.over.set()

    async def close(self) -> None:
        """Cancel all jobs and wait for them. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _next_lane(self) -> Lane | None:
        """The next lane in turn whose most urgent chunk fits into the budget."""
        for step in range(len(self._lanes)):
            index = (self._turn + step) % len(self._lanes)
            lane = self._lanes[index]
            item = lane.queue.peek() if lane.active < lane.limit else None
            if item is not None:
                owner, chunk = item
                if self._in_flight and self._in_flight + owner.chunk_bytes(chunk) > self._budget:
                    return None  # the first in turn waits for room; smaller ones must not starve it
                self._turn = index + 1
                return lane
        return None

    async def _run(self, lane: Lane, owner: Owner, chunk: int, size: int) -> None:
        try:
            await owner.run(chunk)
        finally:
            lane.active -= 1
            self._in_flight -= size
            self._metrics.set("transfer_in_flight_bytes", self._in_flight)
            self.pump()


class _Turn:
    def __init__(self, size: int) -> None:
        self._size = size
        self.granted = asyncio.Event()
        self.over = asyncio.Event()

    def chunk_bytes(self, chunk: int) -> int:
        return self._size

    async def run(self, chunk: int) -> None:
        self.granted.set()
        await self.over.wait()
