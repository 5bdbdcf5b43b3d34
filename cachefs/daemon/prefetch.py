"""Objects brought in ahead of time, a few at once: what plans need next, then a bounded queue of what was asked for."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import NearflashError
from ..metrics import Metrics
from ..schedule import Wanted
from .chunkqueue import Tier
from .engine import Engine
from .fetch import Superseded
from .log import Log
from .origins import Access

PARALLEL = 4
"""Objects on their way at once; their chunks queue behind those of opened objects."""
MOST_QUEUED_BYTES = 256 << 20
_WISH_BYTES = 250
"""What a wish takes beside its text."""


@dataclass(frozen=True)
class Wish:
    """One object to bring in."""

    url: str
    version: str | None
    size: int | None
    access: Access

    @property
    def memory(self) -> int:
        """Bytes that it takes, roughly."""
        return _WISH_BYTES + len(self.url) + len(self.version or "")


class Prefetcher:
    """Works through wishes until cancelled. A wish that fails is counted and logged: a later open meets the error."""

    def __init__(self, engine: Engine, metrics: Metrics, log: Log, *, most_bytes: int = MOST_QUEUED_BYTES) -> None:
        self._engine = engine
        self._metrics = metrics
        self._log = log
        self._most_bytes = most_bytes
        self._queued_bytes = 0
        self._queue: OrderedDict[tuple[str, str | None, str], Wish] = OrderedDict()
        self._arrived = asyncio.Condition()
        self._active = 0
        self._looking: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        return bool(self._queue) or self._active > 0 or self._engine.plans.wants

    async def add(self, wishes: Iterable[Wish]) -> None:
        """Queue wishes behind those already there; one that is queued already keeps its place."""
        dropped = 0
        for wish in wishes:
            key = (wish.url, wish.version, wish.access.identity)
            if key in self._queue:
                continue
            if self._queued_bytes + wish.memory <= self._most_bytes:
                self._queue[key] = wish
                self._queued_bytes += wish.memory
            else:
                dropped += 1
        if dropped:
            self._metrics.add("prefetch_dropped", dropped)
            self._log.record("prefetch_dropped", objects=dropped, queued=len(self._queue))
        self._metrics.set("prefetch_queued", len(self._queue))
        await self.look()

    async def look(self) -> None:
        """There may be something to bring in."""
        if self._queue or self._engine.plans.following.wants:
            async with self._arrived:
                self._arrived.notify_all()

    def _look_soon(self) -> None:
        task = asyncio.ensure_future(self.look())
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def run(self) -> None:
        """Work until cancelled."""
        plans, loop = self._engine.plans, asyncio.get_running_loop()
        plans.on_ready, plans.following.on_room = self._look_soon, lambda: loop.call_soon_threadsafe(self._look_soon)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(PARALLEL):
                    group.create_task(self._work())
        finally:
            plans.on_ready = plans.following.on_room = lambda: None

    async def _work(self) -> None:
        while True:
            async with self._arrived:
                while (found := self._next()) is None:
                    await self._arrived.wait()
            wanted, wish = found
            self._active += 1
            try:
                if not await self._bring(wish) and wanted is not None:
                    self._engine.plans.following.defer(wanted)
            except NearflashError as e:
                self._metrics.add("prefetch_failures")
                self._log.record("prefetch_failed", url=wish.url, error=str(e))
            except Exception as e:  # noqa: BLE001 - a defect met by one wish must not end all prefetching
                self._log.record("defect", where="prefetch", url=wish.url, error=f"{type(e).__name__}: {e}")
            finally:
                self._active -= 1

    def _next(self) -> tuple[Wanted | None, Wish] | None:
        planned = self._engine.plans.following.next_wanted()
        if planned is not None:
            wanted, item, access = planned
            return wanted, Wish(item.url, item.version, item.size, access)
        if not self._queue:
            return None
        _, wish = self._queue.popitem(last=False)
        self._queued_bytes -= wish.memory
        self._metrics.set("prefetch_queued", len(self._queue))
        return None, wish

    async def _bring(self, wish: Wish) -> bool:
        """False if there is no room for it."""
        opening = await self._engine.open(wish.url, wish.access, wish.version, wish.size, tier=Tier.AHEAD)
        if opening.holding is None:
            self._metrics.add("prefetch_bypassed")
            return False
        try:
            await self._engine.fetcher.finish(opening.holding.entry)
        except Superseded:
            self._metrics.add("prefetch_failures")  # evicted on purpose meanwhile
        finally:
            self._engine.release(opening)
        return True
