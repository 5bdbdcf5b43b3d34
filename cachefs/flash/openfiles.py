"""An entry's files are open while somebody has a lease on it or works on it, and closed otherwise."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CacheError
from .chunkfile import ChunkFile
from .index import Slot, evicted
from .layout import Place, meta_name
from .parts import Parts
from .sidecar import Damaged, Header

_RENAMES = 3
"""An entry's files are renamed at most twice while somebody opens them (data, then sidecar)."""


class OpenFiles:
    """Opens one entry's files at the first need and closes them with the last lease or pin. Thread-safe.

    The chunk bits are remembered in between, so that a chunk is verified once as long as the store is open.
    """

    def __init__(self, parts: Parts, slot: Slot, header: Header, file: ChunkFile | None) -> None:
        self._parts = parts
        self._slot = slot
        self._header = header
        self._file = file
        self._saved: bytes | None = None
        self._opening = threading.Lock()

    def lease(self) -> None:
        """One more lease. Raises :class:`CacheError` if the entry is gone."""
        index = self._parts.index
        with index.lock:
            index.require_open()
            if not index.is_live(self._slot):
                raise evicted(self._slot)
            self._slot.leases += 1

    def let_go(self, *, leases: int = 0, pins: int = 0) -> None:
        """Give leases and pins back; with the last of them the files are closed."""
        index, slot = self._parts.index, self._slot
        file = None
        with index.lock:
            if slot.leases < leases:
                raise CacheError("released more often than leased", url=self._header.key.url)
            slot.leases -= leases
            slot.pins -= pins
            if not slot.in_use:
                file = self.detach()
            if not slot.pins:
                index.changed.notify_all()  # a closing store waits for operations, whether or not leases are left
        if file is not None:
            file.close()

    @contextmanager
    def pinned(self) -> Iterator[ChunkFile]:
        """The open files, for one operation. Raises :class:`CacheError` if the entry is gone, :class:`DiskFault`."""
        self._parts.index.pin(self._slot)
        try:
            with self._opening:
                if self._file is None:
                    self._file = self._open()
                file = self._file
            yield file
        finally:
            self.let_go(pins=1)

    def detach(self) -> ChunkFile | None:
        """Take the open files away, remembering the chunk bits; the caller closes what it gets.

        Called under the index lock while the entry is not in use.
        """
        file, self._file = self._file, None
        if file is not None:
            self._saved = file.bits.snapshot()
        return file

    def mark_superseded(self) -> None:
        """Tell readers to open the object again. Called under the index lock."""
        if self._file is not None:
            self._file.bits.mark_superseded()

    def open_for_reader(self, file: ChunkFile) -> int:
        """A new read-only descriptor of the data file, which the caller has pinned."""
        ops, slot = self._parts.ops, self._slot
        for _ in range(_RENAMES):
            try:
                fd = ops.open_for_reader(slot.file, dir_fd=self._parts.layout.fd(slot.place))
            except FileNotFoundError:
                continue
            except OSError as e:
                raise self._parts.health.note(e, self.path(), "opening it") from e
            if os.path.samestat(ops.fstat(fd), ops.fstat(file.data_fd)):
                return fd
            ops.close(fd)
        self._parts.require_present()
        raise evicted(slot)

    def path(self) -> str:
        """Where the data file is, for messages."""
        return self._parts.layout.file(self._slot.place, self._slot.file)

    def _open(self) -> ChunkFile:
        slot, layout = self._slot, self._parts.layout
        for _ in range(_RENAMES):
            place, meta_place = slot.place, slot.meta_place
            if place is Place.DYING:
                break
            data = slot.file, layout.fd(place)
            meta = meta_name(slot.name), layout.fd(meta_place)
            try:
                return ChunkFile.open(
                    self._parts.ops, self._header, data, meta, write=place is Place.FILLING, bits=self._saved
                )
            except FileNotFoundError:
                continue
            except Damaged:
                break
            except OSError as e:
                raise self._parts.health.note(e, self.path(), "opening it") from e
        self._parts.require_present()
        raise evicted(slot)
