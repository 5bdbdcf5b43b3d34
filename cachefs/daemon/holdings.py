"""Entries that clients have open: one lease and one pair of descriptors each, however many openings there are.

An entry that nobody has open any more is kept for a moment: it is likely to be opened again (the next epoch, the next
worker), and then costs no look at the disk. Such an idle one is dropped at once when its space is wanted.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial

from ..clock import Clock
from ..errors import CacheFull
from ..flash import Entry, EntryKey
from .disk import Disk, Held
from .singleflight import SingleFlight

IDLE_SECONDS = 2.0
MOST_IDLE = 64


class Holding:
    """One entry with a lease. ``users`` counts openings; at 0 it is idle."""

    def __init__(self, key: EntryKey, held: Held) -> None:
        self.key = key
        self.entry: Entry = held.entry
        self.users = 0
        self.idle_since = 0.0
        self.held = held

    def open_files(self) -> tuple[int, int]:
        """New descriptors of data and bitmap for one reader, who owns them.

        The data file is opened anew, so that readers in several processes do not share a file position. It is opened
        through this process's descriptor: no path is looked up, and no disk is waited for. Where the system cannot do
        that, the store opens it.
        """
        data, bitmap = self.held.fds
        try:
            fresh = os.open(f"/proc/self/fd/{data}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return self.entry.reader_fds()
        try:
            return fresh, os.dup(bitmap)
        except BaseException:
            os.close(fresh)
            raise


class Holdings:
    """All holdings of a daemon, by key. Belongs to one event loop."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._by_key: dict[EntryKey, Holding] = {}
        self._idle: OrderedDict[Holding, None] = OrderedDict()
        self._retiring: set[asyncio.Future[None]] = set()
        self._making: SingleFlight[Holding | None] = SingleFlight()

    def hit(self, key: EntryKey) -> Holding | None:
        """The holding of a key that is open or was a moment ago, with one more user."""
        holding = self._by_key.get(key)
        if holding is None:
            return None
        if holding.entry.superseded:
            self._forget(holding)
            if not holding.users:
                self._drop([holding])
            return None
        holding.users += 1
        self._idle.pop(holding, None)
        return holding

    async def find(self, key: EntryKey) -> Holding | None:
        """The entry of a key if the cache has it, with one more user. Raises :class:`DiskFault`."""
        while (holding := self.hit(key)) is None:
            if await self._making.do(("find", key), lambda: self._find(key)) is None:
                return None
        return holding

    async def obtain(self, key: EntryKey, size: int, *, ahead: bool = False) -> Holding:
        """The entry of a key, made if need be, with one more user. Raises :class:`CacheFull`, :class:`DiskFault`.

        ``ahead``: nobody waits for it yet, so it may be refused a place that a reader would get.
        """
        while (holding := self.hit(key)) is None:
            await self._making.do(("obtain", key, size, ahead), lambda: self._obtain(key, size, ahead))
        return holding

    def give_back(self, holding: Holding) -> None:
        """One user less."""
        holding.users -= 1
        if holding.users:
            return
        if self._by_key.get(holding.key) is holding:
            holding.idle_since = self._clock.monotonic()
            self._idle[holding] = None
        else:
            self._drop([holding])

    async def discard(self, holding: Holding) -> None:
        """One user less, and nobody gets this holding any more; returns once it is given up if that was the last."""
        self._forget(holding)
        holding.users -= 1
        if not holding.users:
            await self._drop([holding])

    async def trim(self) -> None:
        """Drop what has been idle for long, or is too much."""
        now = self._clock.monotonic()
        surplus = len(self._idle) - MOST_IDLE
        await self._drop([h for i, h in enumerate(self._idle) if i < surplus or now - h.idle_since >= IDLE_SECONDS])

    async def drop_idle(self) -> bool:
        """Drop everything idle, and return once that and what others just dropped is free to go; False if there was
        nothing."""
        if self._idle:
            self._drop(list(self._idle))
        retiring = list(self._retiring)
        if retiring:
            await asyncio.wait(retiring)
        return bool(retiring)

    async def close(self) -> None:
        """Drop everything. Idempotent."""
        await self._drop(list(self._by_key.values()))

    async def _find(self, key: EntryKey) -> Holding | None:
        held = await self._disk.find(key)
        return None if held is None else self._keep(key, held)

    async def _obtain(self, key: EntryKey, size: int, ahead: bool) -> Holding:
        try:
            held = await self._disk.obtain(key, size, ahead=ahead)
        except CacheFull:
            if not await self.drop_idle():
                raise
            held = await self._disk.obtain(key, size, ahead=ahead)
        return self._keep(key, held)

    def _keep(self, key: EntryKey, held: Held) -> Holding:
        known = self._by_key.get(key)
        if known is not None and known.entry is held.entry:
            self._retire(held.discard)  # somebody else was a moment faster
            return known
        if known is not None:
            self._forget(known)
        holding = self._by_key[key] = Holding(key, held)
        holding.idle_since = self._clock.monotonic()
        self._idle[holding] = None
        return holding

    def _forget(self, holding: Holding) -> None:
        if self._by_key.get(holding.key) is holding:
            del self._by_key[holding.key]
        self._idle.pop(holding, None)

    def _drop(self, holdings: list[Holding]) -> Awaitable[None]:
        """Give back leases and descriptors in a thread; need not be awaited."""
        for holding in holdings:
            self._forget(holding)
        return self._retire(*(partial(self._disk.retire, h.key, h.held) for h in holdings))

    def _retire(self, *calls: Callable[[], None]) -> Awaitable[None]:
        retired = self._disk.later(*calls)
        if calls:
            self._retiring.add(retired)
            retired.add_done_callback(self._retiring.discard)
        return retired
