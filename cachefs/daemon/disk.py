"""The flash store behind threads: its calls may wait for the disk, the event loop may not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ..clock import Clock
from ..errors import CacheFull, DiskFault, NearflashError
from ..flash import Entry, EntryInfo, EntryKey, FlashStore, Usage
from .log import Log

REOPEN_INTERVAL = 5.0
"""Seconds between attempts to open a store whose directory could not be used."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Held:
    """An entry with one lease, and descriptors of its data and bitmap, both owned by the receiver."""

    entry: Entry
    fds: tuple[int, int]

    def close_files(self) -> None:
        """Close the descriptors, once; the lease stays."""
        for fd in self.fds:
            os.close(fd)

    def discard(self) -> None:
        """Close the descriptors and give back the lease."""
        self.close_files()
        self.entry.release()


class Disk:
    """The node's flash store, or none while its directory cannot be used: then everything is a miss.

    Short calls and bulk calls (a chunk's bytes) have threads of their own, so that openings do not queue behind
    writes.
    """

    def __init__(self, opener: Callable[[], FlashStore], clock: Clock, log: Log) -> None:
        self._opener = opener
        self._clock = clock
        self._log = log
        self._store: FlashStore | None = None
        self._fault: DiskFault | CacheFull | None = None
        self._retry_at = 0.0
        self._opening = asyncio.Lock()
        self._pending: set[asyncio.Task[None]] = set()
        self._short = ThreadPoolExecutor(4, thread_name_prefix="cachefs-disk")
        self._bulk = ThreadPoolExecutor(4, thread_name_prefix="cachefs-bulk")

    async def open(self) -> None:
        """Open the store. A failing disk is noted and tried again later; other errors (another owner) are raised."""
        self._retry_at = self._clock.monotonic() + REOPEN_INTERVAL
        try:
            self._store = await self.short(self._opener)
        except (DiskFault, CacheFull) as e:
            self._fault = e
            self._log.record("disk_unusable", error=str(e))
        else:
            self._fault = None

    async def short(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a short call in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._short, lambda: call(*args, **kwargs))

    async def bulk(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that moves a chunk's bytes in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._bulk, lambda: call(*args, **kwargs))

    async def find(self, key: EntryKey) -> Held | None:
        """The entry if it is there, leased. Raises :class:`DiskFault`."""
        store = self._store
        return None if store is None else await self._hold(lambda: _find(store, key))

    async def obtain(self, key: EntryKey, size: int, *, ahead: bool = False) -> Held:
        """The entry, made if need be, leased. Raises :class:`CacheFull` or :class:`DiskFault`: pass through."""
        store = self._store or await self._reopen()
        held = await self._hold(lambda: _with_files(store.create(key, size, lease=True, ahead=ahead)))
        assert held is not None, "creation gives an entry or raises"
        return held

    async def check_fillable(self, entry: Entry) -> None:
        """Raise the disk's fault if the entry cannot be completed because of it; looks at the disk anew if it is time.

        What only needs to be read from disk can be completed on a disk that refuses writes.
        """
        if self._store is not None and self._store.fault is not None:
            await self.short(_check_fillable, self._store, entry)

    def retire(self, key: EntryKey, held: Held) -> None:
        """In a thread: give up what was held; the entry counts as used now, not when it was first opened."""
        try:
            if self._store is not None:
                self._store.lookup(key)
        finally:
            held.discard()

    def later(self, *calls: Callable[[], None]) -> asyncio.Future[None]:
        """Run calls in a thread, one after the other, whether the result is awaited or not; errors are logged."""
        if not calls:
            nothing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            nothing.set_result(None)
            return nothing
        task = asyncio.ensure_future(self._all(calls))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
        return task

    async def cached_bytes(self, key: EntryKey) -> int:
        """How many bytes of one object are on this disk."""
        store = self._store
        return 0 if store is None else await self.short(_cached_bytes, store, key)

    async def attachment_bytes(self, entry: Entry, name: str) -> int | None:
        """About how large an attachment is; ``None`` if there is none."""
        store = self._store
        return None if store is None else await self.short(store.attachments.size, entry, name)

    async def attachment(self, entry: Entry, name: str) -> bytes | None:
        store = self._store
        return None if store is None else await self.bulk(store.attachments.read, entry, name)

    async def attach(self, entry: Entry, name: str, data: Callable[[], bytes]) -> bool:
        """Attach what ``data`` gives, called in a thread. Raises :class:`CacheFull` or :class:`DiskFault`."""
        store = self._store
        return False if store is None else await self.bulk(lambda: store.attachments.keep(entry, name, data()))

    async def entries(self) -> list[EntryInfo]:
        store = self._store
        return [] if store is None else await self.short(store.entries)

    async def evict(self, name: str) -> int:
        store = self._store
        return 0 if store is None else await self.short(store.evict, name)

    async def usage(self) -> Usage | None:
        store = self._store
        return None if store is None else await self.short(store.usage)

    async def tidy(self) -> None:
        """Credit the space of evicted files that nobody holds any more; look at a store that could not be opened."""
        try:
            store = self._store or await self._reopen()
            await self.short(store.drop_dying)
        except NearflashError as e:
            self._log.record("tidy_failed", error=str(e))

    @property
    def fault(self) -> DiskFault | CacheFull | None:
        """Why nothing can be written now, or ``None``."""
        return self._fault if self._store is None else self._store.fault

    async def _all(self, calls: tuple[Callable[[], None], ...]) -> None:
        for call in calls:
            try:
                await self.short(call)
            except NearflashError as e:
                self._log.record("disk_call_failed", error=str(e))

    async def close(self) -> None:
        """Close the store, giving up its directory. Idempotent."""
        await asyncio.gather(*self._pending, return_exceptions=True)
        store, self._store = self._store, None
        if store is not None:
            await self.short(store.close)
        self._short.shutdown(wait=False)
        self._bulk.shutdown(wait=False)

    async def _hold(self, call: Callable[[], Held | None]) -> Held | None:
        """Run ``call`` in a thread; what it holds is given back if the caller was cancelled meanwhile."""
        future = asyncio.get_running_loop().run_in_executor(self._short, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_discard)
            raise

    async def _reopen(self) -> FlashStore:
        async with self._opening:
            if self._store is None and self._clock.monotonic() >= self._retry_at:
                await self.open()
        if self._store is None:
            fault = self._fault
            what = fault.what if fault else "the cache is closed"
            raise DiskFault(what, url=fault.url if fault else None, hint=fault.hint if fault else None)
        return self._store


def _find(store: FlashStore, key: EntryKey) -> Held | None:
    entry = store.lookup(key, lease=True)
    return None if entry is None else _with_files(entry)


def _discard(future: asyncio.Future[Held | None]) -> None:
    if not future.cancelled() and future.exception() is None and (held := future.result()) is not None:
        held.discard()


def _with_files(entry: Entry) -> Held:
    try:
        return Held(entry, entry.reader_fds())
    except BaseException:
        entry.release()
        raise


def _check_fillable(store: FlashStore, entry: Entry) -> None:
    if set(entry.missing()) - set(entry.needs_verify()):
        store.create(entry.key, entry.size)  # there already: this only makes the store look at its disk


def _cached_bytes(store: FlashStore, key: EntryKey) -> int:
    entry = store.lookup(key)
    if entry is None or entry.complete:
        return 0 if entry is None else entry.size
    absent = set(entry.missing()) - set(entry.needs_verify())
    return entry.size - sum(min(entry.chunk_size, entry.size - i * entry.chunk_size) for i in absent)
