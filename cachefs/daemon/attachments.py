"""Attachments of entries on their way between clients and the disk. What goes wrong with one is no client's error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..attachments import MOST_BYTES, check_name
from ..errors import CacheError, NearflashError
from ..flash import Entry
from ..sealed import read_sealed, sealed_bytes
from .disk import Disk
from .log import Log
from .room import Room


class Attachments:
    """Reads and keeps them; ``room`` bounds the bytes that are in memory. Belongs to one event loop."""

    def __init__(self, disk: Disk, room: Room, log: Log) -> None:
        self._disk = disk
        self._room = room
        self._log = log

    @asynccontextmanager
    async def read(self, entry: Entry, name: str) -> AsyncIterator[bytes | None]:
        """An attachment's bytes for the block, or ``None`` if there is none, or none that can be read."""
        check_name(name, entry.key.url)
        size = await self._disk.attachment_bytes(entry, name)
        if size is None:
            yield None
            return
        async with self._room.take(size):
            try:
                data = await self._disk.attachment(entry, name)
            except NearflashError as e:
                self._log.record("attachment_not_read", url=entry.key.url, name=name, error=str(e))
                data = None
            yield data

    async def keep(self, entry: Entry, name: str, fd: int) -> bool:
        """Attach the bytes of a sealed file, which stays the caller's. False if the cache does not take them.

        Raises :class:`ConfigError` or :class:`CacheError` for what no client of ours sends.
        """
        check_name(name, entry.key.url)
        if fd < 0:
            raise CacheError("an attachment without its bytes", url=entry.key.url)
        size = sealed_bytes(fd, MOST_BYTES)
        async with self._room.take(size):
            try:
                return await self._disk.attach(entry, name, lambda: read_sealed(fd, size))
            except NearflashError as e:
                self._log.record("attachment_not_kept", url=entry.key.url, name=name, error=str(e))
                return False
