"""Filling entries from the origin: one fill per entry, however many readers want it.

A fill first checks what a former daemon left on disk, then fetches what is missing, chunk by chunk, each request
bound to the version that was opened. Readers wait for chunks; what they wait for comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from ..clock import Clock
from ..errors import CacheError, NearflashError, Unavailable
from ..flash import Entry
from ..metrics import Metrics
from .chunkqueue import Tier
from .disk import Disk
from .log import Log
from .origins import Source
from .transfers import Lane, Transfers

_DISK_JOBS = 2
_MARGIN = 30.0
"""Seconds beyond the request deadline after which a chunk's request counts as lost."""


class Superseded(Exception):
    """The entry was replaced or evicted while it was filled; its readers open the object again."""


@dataclass(frozen=True)
class Tools:
    """What a fill works with."""

    disk: Disk
    transfers: Transfers
    disk_lane: Lane
    metrics: Metrics
    log: Log
    clock: Clock
    request_deadline: float


class _Waiter:
    def __init__(self, chunks: set[int]) -> None:
        self.chunks = chunks
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Fill:
    """One entry on its way to be complete. Holds a lease and its bucket for as long as a job of it runs."""

    def __init__(self, entry: Entry, source: Source, tier: Tier, tools: Tools, on_end: Callable[[Fill], None]) -> None:
        self.entry = entry
        self.source = source
        self.error: Exception | None = None
        self._tier = tier
        self._tools = tools
        self._on_end = on_end
        self._left: set[int] = set()
        self._unverified: set[int] = set()
        self._demanded: set[int] = set()
        self._waiters: set[_Waiter] = set()
        self._active = 0
        self._leased = False
        self._ended = False
        self._began = tools.clock.monotonic()
        self._fetched = 0
        source.bucket.users += 1
        self._ready = asyncio.ensure_future(self._guard(self._prepare()))

    @property
    def left(self) -> int:
        """Chunks not yet readable."""
        return len(self._left)

    def promote(self) -> None:
        """A reader opened what was fetched ahead of time."""
        if self._tier is Tier.AHEAD:
            self._tier = Tier.OPENED
            for lane in self._lanes():
                lane.queue.promote(self)

    async def wait(self, first: int, stop: int) -> None:
        """Return once chunks ``[first, stop)`` can be read. Raises what ended the fill, or :class:`Superseded`."""
        await asyncio.shield(self._ready)
        await self._arrival(self._left.intersection(range(first, stop)), urgent=True)

    async def finished(self) -> None:
        """As :meth:`wait` for all chunks, without making them more urgent."""
        await asyncio.shield(self._ready)
        await self._arrival(set(self._left), urgent=False)

    async def _arrival(self, chunks: set[int], *, urgent: bool) -> None:
        if self.error is not None:
            raise self.error
        if not chunks:
            return
        waiter = _Waiter(chunks)
        self._waiters.add(waiter)
        try:
            if urgent:
                self._demand(chunks)
            await waiter.future
        finally:
            self._waiters.discard(waiter)

    # --- jobs, run by the transfers' pump ---------------------------------------------------------------------------

    def chunk_bytes(self, chunk: int) -> int:
        return min(self.entry.chunk_size, self.entry.size - chunk * self.entry.chunk_size)

    async def run(self, chunk: int) -> None:
        """Verify or fetch one chunk; an error ends the whole fill."""
        if self.error is None:
            await self._guard(self._verify(chunk) if chunk in self._unverified else self._fetch(chunk))

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Do a part of the fill; whatever goes wrong ends the fill and reaches its readers."""
        self._active += 1
        try:
            await work
        except NearflashError as e:
            self._fail(Superseded() if type(e) is CacheError and self.entry.superseded else e)
        except Superseded as e:
            self._fail(e)
        except Exception as e:  # noqa: BLE001 - a defect must reach the readers as an error, not leave them waiting
            self._tools.log.record("defect", where="fill", url=self._url, error=f"{type(e).__name__}: {e}")
            self._fail(CacheError(f"the daemon failed: {type(e).__name__}: {e}", url=self._url))
        finally:
            self._active -= 1
            self._end_if_done()

    async def _verify(self, chunk: int) -> None:
        good = await self._tools.disk.bulk(self.entry.verify_chunk, chunk)
        self._unverified.discard(chunk)
        if good:
            self._arrived(chunk)
        elif self.entry.superseded:
            raise Superseded
        else:
            self._queue(self.source.bucket.lane, [chunk])

    async def _fetch(self, chunk: int) -> None:
        start = chunk * self.entry.chunk_size
        end = start + self.chunk_bytes(chunk)
        source = self.source
        try:
            async with asyncio.timeout(self._tools.request_deadline + _MARGIN):
                data = await source.bucket.get_range(source.target, source.meta, start, end)
        except TimeoutError as e:
            if isinstance(e, NearflashError):
                raise
            what = f"no answer within {self._tools.request_deadline:.0f} s"
            raise Unavailable(what, url=self._url, offset=start) from e
        await self._tools.disk.bulk(self.entry.write_chunk, chunk, data)
        self._fetched += end - start
        self._tools.metrics.add("fill_bytes", end - start)
        self._arrived(chunk)

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        missing, unverified = await self._tools.disk.short(_look, self.entry)
        self._leased = True
        self._left = set(missing)
        self._unverified = unverified
        self._queue(self._tools.disk_lane, [i for i in missing if i in unverified])
        self._queue(self.source.bucket.lane, [i for i in missing if i not in unverified])

    def _queue(self, lane: Lane, chunks: list[int]) -> None:
        lane.queue.add(self, chunks, self._tier)
        lane.queue.demand(self, self._demanded.intersection(chunks))
        self._tools.transfers.pump()

    def _demand(self, chunks: set[int]) -> None:
        self._demanded |= chunks
        ordered = sorted(chunks)
        for lane in self._lanes():
            lane.queue.demand(self, ordered)
        self._tools.transfers.pump()

    def _arrived(self, chunk: int) -> None:
        self._left.discard(chunk)
        self._demanded.discard(chunk)
        for waiter in self._waiters:
            waiter.chunks.discard(chunk)
            if not waiter.chunks and not waiter.future.done():
                waiter.future.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self.error is not None:
            return
        self.error = error
        for lane in self._lanes():
            lane.queue.drop(self)
        for waiter in self._waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)
        if not isinstance(error, Superseded):
            self._tools.metrics.add("fill_failures")
            self._tools.log.record("fill_failed", url=self._url, error=str(error))
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._ended or self._active or (self._left and self.error is None):
            return
        self._ended = True
        self.source.bucket.users -= 1
        if self._leased:
            self.entry.release()
        if self.error is None:
            seconds = round(self._tools.clock.monotonic() - self._began, 3)
            self._tools.metrics.add("fills")
            self._tools.log.record(
                "filled", url=self._url, size=self.entry.size, fetched=self._fetched, seconds=seconds
            )
        self._on_end(self)

    def _lanes(self) -> tuple[Lane, Lane]:
        return self._tools.disk_lane, self.source.bucket.lane

    @property
    def _url(self) -> str:
        return self.entry.key.url


class Fetcher:
    """All fills of a daemon. Belongs to one event loop."""

    def __init__(
        self, disk: Disk, transfers: Transfers, metrics: Metrics, log: Log, clock: Clock, request_deadline: float
    ) -> None:
        lane = transfers.lane(_DISK_JOBS)
        self._tools = Tools(disk, transfers, lane, metrics, log, clock, request_deadline)
        self._fills: dict[Entry, Fill] = {}

    @property
    def busy(self) -> bool:
        return bool(self._fills)

    def __len__(self) -> int:
        return len(self._fills)

    def left(self, entry: Entry) -> int:
        """Chunks of an entry that are still on their way."""
        fill = self._fills.get(entry)
        return 0 if fill is None else fill.left

    async def finish(self, entry: Entry) -> None:
        """Return once the fill under way has ended well; raises what ended it otherwise."""
        fill = self._fills.get(entry)
        if fill is not None:
            await fill.finished()

    def ensure(self, entry: Entry, source: Source, tier: Tier) -> Fill | None:
        """The fill of this entry, started if there is none; ``None`` if the entry is complete.

        The caller holds a lease until the fill is ready, that is until a wait on it returns or it ends.
        """
        fill = self._fills.get(entry)
        if fill is None or fill.error is not None:
            if entry.complete:
                return None
            fill = self._fills[entry] = Fill(entry, source, tier, self._tools, self._ended)
        elif tier is Tier.OPENED:
            fill.promote()
        return fill

    async def wait(self, entry: Entry, source: Source, first: int, stop: int) -> None:
        """Return once chunks ``[first, stop)`` of an entry can be read.

        An error that another user's credentials or an earlier attempt ran into is not this reader's: it tries once
        with its own. Raises the origin's error, ``CacheFull``, ``DiskFault`` or :class:`Superseded`.
        """
        while (fill := self.ensure(entry, source, Tier.OPENED)) is not None:
            try:
                await fill.wait(first, stop)
                return
            except NearflashError:
                if fill.source.bucket is source.bucket:
                    raise

    def _ended(self, fill: Fill) -> None:
        if self._fills.get(fill.entry) is fill:
            del self._fills[fill.entry]


def _look(entry: Entry) -> tuple[list[int], set[int]]:
    """What is missing, and which of it is on disk unchecked; with a lease, so that it stays true."""
    entry.lease()
    try:
        return entry.missing(), set(entry.needs_verify())
    except BaseException:
        entry.release()
        raise
