"""What the daemon does, without sockets: open, wait, read past the cache, list, evict. Tests drive it directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..clock import Clock
from ..config import Settings
from ..errors import CacheError, CacheFull, Changed, ConfigError, DiskFault
from ..flash import Entry, EntryInfo, EntryKey
from ..metrics import Metrics
from ..objstore.abc import ObjectMeta
from ..objstore.url import ObjectUrl, parse_url
from ..shard import ObjectStat
from .attachments import Attachments
from .chunkqueue import Tier
from .disk import Disk
from .fetch import Fetcher, Superseded
from .holdings import Holding, Holdings
from .log import Log
from .origins import Access, Opener, Origins, Source
from .plans import Plans
from .room import Room
from .transfers import Transfers

if TYPE_CHECKING:
    from typing_extensions import Buffer

MOST_FETCH = 64 << 20
"""Bytes that one read past the cache may ask for."""


@dataclass(frozen=True)
class Opening:
    """An object that was opened: from the cache (``holding``), or past it for ``reason``."""

    source: Source
    holding: Holding | None = None
    reason: CacheFull | DiskFault | None = None


@dataclass(frozen=True)
class Progress:
    """Of a wait: whether the chunks are there, how many of the entry are, and whether to open the object again."""

    done: bool
    present: int
    superseded: bool = False


@dataclass(frozen=True)
class EvictResult:
    """Entries dropped, the bytes that came free at once, and entries that stay because they are in use."""

    entries: int = 0
    freed: int = 0
    busy: int = 0


class Engine:
    """One node's cache at work. Belongs to one event loop."""

    def __init__(
        self,
        settings: Settings,
        disk: Disk,
        opener: Opener,
        plans: Plans,
        *,
        metrics: Metrics,
        clock: Clock,
        log: Log,
    ) -> None:
        self._settings = settings
        self._disk = disk
        self._metrics = metrics
        self._log = log
        self._transfers = Transfers(settings.transfer_bytes, metrics)
        self._origins = Origins(opener, self._transfers, settings.origin_parallel, clock)
        self.fetcher = Fetcher(disk, self._transfers, metrics, log, clock, settings.request_deadline)
        self.plans = plans
        self._holdings = Holdings(disk, clock)
        self._unsent = Room(settings.transfer_bytes)
        self.attachments = Attachments(disk, self._unsent, log)
        self._bypassing: type[CacheError] | None = None

    @property
    def busy(self) -> bool:
        """Whether anything is being fetched."""
        return self._transfers.busy or self.fetcher.busy

    @property
    def piece(self) -> int:
        """Bytes in which objects are read that the cache cannot take."""
        return min(self._settings.chunk_size, MOST_FETCH)

    async def open(
        self, url: str, access: Access, version: str | None, size: int | None, *, tier: Tier = Tier.OPENED
    ) -> Opening:
        """Open one object and start filling its entry. The caller gives the opening back by :meth:`release`.

        Raises the origin's errors, among them ``Changed`` for a ``version`` that is no more.
        """
        target = _remote(url)
        with self._origins.bucket(target, access) as bucket:
            meta = await bucket.bind(target, version, size)
            source = Source(bucket, target, meta)
            try:
                holding = await self._hold(entry_key(target, access, meta), meta.size, ahead=tier is Tier.AHEAD)
                if holding.entry.size != meta.size:
                    holding = await self._hold_instead(holding, source)
            except (CacheFull, DiskFault) as e:
                if tier is Tier.AHEAD and self.plans.any:
                    return Opening(source, reason=e)  # a plan waits for its turn
                return self._bypass(source, e)
            self.fetcher.ensure(holding.entry, source, tier)
            bucket.users += 1
        self._healed()
        return Opening(source, holding)

    def release(self, opening: Opening) -> None:
        """Give an opening back. Once for each."""
        if opening.holding is not None:
            opening.source.bucket.users -= 1
            self._holdings.give_back(opening.holding)

    async def wait(self, entry: Entry, source: Source, first: int, stop: int, seconds: float) -> Progress:
        """Wait up to ``seconds`` for chunks ``[first, stop)`` of a leased entry. Raises the error of its fill."""
        if not 0 <= first <= stop <= entry.n_chunks:
            raise ConfigError(f"no chunks {first} to {stop}, it has {entry.n_chunks}", url=entry.key.url)
        try:
            async with asyncio.timeout(seconds) as limit:
                await self.fetcher.wait(entry, source, first, stop)
        except Superseded:
            return Progress(False, 0, superseded=True)
        except TimeoutError:
            if not limit.expired():
                raise
            return Progress(False, entry.n_chunks - self.fetcher.left(entry))
        return Progress(True, entry.n_chunks - self.fetcher.left(entry))

    @asynccontextmanager
    async def read(
        self, url: str, access: Access, version: str, size: int, start: int, end: int
    ) -> AsyncIterator[Buffer]:
        """Bytes ``[start, end)`` of one version past the cache.

        They count until the block ends, but not as a transfer: a client that reads its reply slowly holds up no bucket.
        """
        if not 0 <= start <= end <= size or end - start > MOST_FETCH:
            raise ConfigError(f"bytes {start} to {end} cannot be read at once", url=url)
        target = _remote(url)
        async with self._unsent.take(end - start):
            with self._origins.bucket(target, access) as bucket:
                meta = await bucket.bind(target, version, size)
                async with self._transfers.turn(bucket.lane, end - start):
                    data = await bucket.get_range(target, meta, start, end)
            self._metrics.add("pass_through_bytes", end - start)
            yield data

    async def stat(self, url: str, access: Access) -> ObjectStat:
        """One object as the origin has it now."""
        target = _remote(url)
        with self._origins.bucket(target, access) as bucket:
            meta = await bucket.head(target, fresh=True)
        cached = await self._disk.cached_bytes(entry_key(target, access, meta))
        return ObjectStat(str(target), meta.size, meta.version, cached)

    async def list_folder(
        self, url: str, access: Access, *, delimiter: bool, cached: bool
    ) -> AsyncGenerator[list[ObjectStat], None]:
        """Pages of a folder's objects; folder markers are left out, prefixes come with a delimiter only."""
        target = _remote(url)
        held: dict[tuple[str, str], int] = {}
        if cached:
            held = {
                (e.url, e.version): e.cached_bytes for e in await self._disk.entries() if e.endpoint == access.endpoint
            }
        with self._origins.bucket(target, access) as bucket:
            async for page in bucket.list(target, delimiter=delimiter):
                found = [_listed(target, meta, held) for meta in page.objects if not meta.key.endswith("/")]
                yield [*found, *(ObjectStat(str(target.with_key(p)), 0, "") for p in page.prefixes)]

    async def entries(self) -> list[EntryInfo]:
        return await self._disk.entries()

    async def evict(self, urls: Iterable[str], *, everything: bool) -> EvictResult:
        """Drop every version of these URLs, from whatever endpoint, that nobody uses."""
        wanted = {str(_remote(url)) for url in urls}
        await self._holdings.drop_idle()
        gone, freed, busy = 0, 0, 0
        for info in await self._disk.entries():
            if everything or info.url in wanted:
                try:
                    freed += await self._disk.evict(info.name)
                    gone += 1
                except (CacheFull, DiskFault):
                    raise
                except CacheError:  # leased, or being filled
                    busy += 1
        return EvictResult(gone, freed, busy)

    async def stats(self) -> dict[str, float | int | str | None]:
        """Counters, gauges and the use of the disk in bytes."""
        values: dict[str, float | int | str | None] = {**self._metrics.snapshot()}
        values["fills_running"] = len(self.fetcher)
        values["idle_timeout_seconds"] = self._settings.idle_timeout
        usage = await self._disk.usage()
        if usage is not None:
            values.update(
                quota_bytes=usage.quota,
                used_bytes=usage.used,
                free_bytes=usage.free,
                dying_bytes=usage.dying,
                entries=usage.entries,
            )
        values.update(self.plans.stats())
        fault = self._disk.fault
        values["disk_fault"] = None if fault is None else str(fault)
        return values

    async def tidy(self) -> None:
        """Housekeeping, to be called every second or two."""
        await self._holdings.trim()
        await self._origins.close_idle()
        await self._disk.tidy()

    async def close(self) -> None:
        """Stop all transfers, then close origins and disk. Idempotent."""
        await self._transfers.close()
        await self._origins.close()
        await self._holdings.close()
        await self._disk.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _hold(self, key: EntryKey, size: int, *, ahead: bool = False) -> Holding:
        holding = self._holdings.hit(key) or await self._holdings.find(key)
        if not ahead:
            self._metrics.add("open_misses" if holding is None else "open_hits")
        if holding is None:
            if self.plans.any:
                await self._holdings.drop_idle()  # they may be what is to go first
            return await self._holdings.obtain(key, size, ahead=ahead)
        if not holding.entry.complete:
            try:
                await self._disk.check_fillable(holding.entry)
            except BaseException:
                self._holdings.give_back(holding)
                raise
        return holding

    async def _hold_instead(self, misfit: Holding, source: Source) -> Holding:
        """An entry of the size that is asked for, in the place of ``misfit``, if the origin says that it is right.

        An ETag with a size is taken at its word until bytes arrive, so somebody may have claimed a wrong one. Raises
        ``Changed`` if it was this caller, ``CacheFull`` while a reader with the wrong size has the entry open.
        """
        try:
            truth = await source.bucket.head(source.target, fresh=True)
            if (truth.version, truth.size) != (source.meta.version, source.meta.size):
                raise Changed("is no longer what was listed", url=str(source.target), hint="list it again")
        except BaseException:
            self._holdings.give_back(misfit)
            raise
        await self._holdings.discard(misfit)
        try:
            await self._disk.evict(misfit.key.name)
            holding = await self._hold(misfit.key, source.meta.size)
        except (CacheFull, DiskFault):
            raise
        except CacheError as e:
            raise CacheFull("opened with a wrong size by somebody else", url=str(source.target)) from e
        if holding.entry.size != source.meta.size:
            self._holdings.give_back(holding)
            raise CacheFull("opened with a wrong size by somebody else", url=str(source.target))
        return holding

    def _bypass(self, source: Source, reason: CacheFull | DiskFault) -> Opening:
        """The cache cannot take it: counted each time, logged when it begins."""
        self._metrics.add("open_bypasses")
        if self._bypassing is not type(reason):
            self._bypassing = type(reason)
            self._log.record("bypass_begins", url=str(source.target), error=str(reason))
        return Opening(source, reason=reason)

    def _healed(self) -> None:
        if self._bypassing is not None and self._disk.fault is None:
            self._bypassing = None
            self._log.record("bypass_ends")


def entry_key(target: ObjectUrl, access: Access, meta: ObjectMeta) -> EntryKey:
    """Under which name an object is kept on disk."""
    return EntryKey(access.endpoint, str(target), meta.version)


def _listed(target: ObjectUrl, meta: ObjectMeta, held: dict[tuple[str, str], int]) -> ObjectStat:
    url = str(target.with_key(meta.key))
    return ObjectStat(url, meta.size, meta.version, held.get((url, meta.version), 0))


def _remote(url: str) -> ObjectUrl:
    target = parse_url(url)
    if target.is_local:
        raise ConfigError("a local path needs no cache", url=url, hint="open it through the client")
    return target
