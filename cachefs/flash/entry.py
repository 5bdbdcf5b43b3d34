"""One object's presence on flash, as the daemon handles it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..errors import CacheError, DeadlineExceeded
from ..metrics import Metrics
from .chunkfile import ChunkFile
from .fileops import FileOps
from .health import Health
from .index import Index, Slot, evicted
from .layout import Layout, Place, meta_name
from .sidecar import EntryKey, Header

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CLAIM_DEADLINE = 120.0
"""Seconds one thread waits for another that works on the same chunk."""


class Host(Protocol):
    """What an entry needs of its store."""

    ops: FileOps
    layout: Layout
    index: Index
    health: Health
    metrics: Metrics

    def publish(self, entry: Entry) -> None:
        """Every chunk can be read: make the entry a published one."""

    def heal(self, entry: Entry, chunk: int) -> None:
        """A chunk of a published entry is bad: replace the entry by a new one."""


class Entry:
    """One object at one version on flash. Made by the store only; thread-safe.

    ``size`` and ``chunk_size`` in bytes; every chunk has ``chunk_size`` bytes but the last. The entry's files are open
    while it has a lease or an operation is under way. Hold a lease around any sequence of calls: an entry without one
    may be evicted between two of them, and then raises :class:`CacheError`.
    """

    def __init__(self, host: Host, slot: Slot, header: Header, file: ChunkFile | None = None) -> None:
        self.key: EntryKey = header.key
        self.size = header.size
        self.chunk_size = header.chunk_size
        self.n_chunks = header.n_chunks
        self._host = host
        self._slot = slot
        self._header = header
        self._file = file
        self._saved: bytes | None = None
        self._changed = threading.Condition()
        self._claimed: set[int] = set()
        self._complete = header.n_chunks == 0

    @property
    def name(self) -> str:
        return self._slot.name

    @property
    def slot(self) -> Slot:
        """The store's book-keeping of this entry (for the store)."""
        return self._slot

    @property
    def complete(self) -> bool:
        """Whether every chunk can be read. After a restart this begins as False: chunks count once verified."""
        return self._complete

    @property
    def superseded(self) -> bool:
        """Whether the store has given this entry up (evicted, or replaced because of a bad chunk): look it up again."""
        return not self._host.index.is_live(self._slot)

    # --- leases -----------------------------------------------------------------------------------------------------

    def lease(self) -> None:
        """Keep the entry: it is not evicted until :meth:`release`. Raises :class:`CacheError` if it is gone already."""
        index = self._host.index
        with index.lock:
            index.require_open()
            if not index.is_live(self._slot):
                raise evicted(self._slot)
            self._slot.leases += 1

    def release(self) -> None:
        """Give one lease back."""
        self._let_go(leases=1)

    def reader_fds(self) -> tuple[int, int]:
        """(data, bitmap): a new read-only descriptor of the data file and one of the chunk bitmap.

        Both belong to the caller, who hands them to a reader and closes them. Needs a lease that lasts as long as the
        reader waits for chunks: without one the bitmap is no longer written to.
        """
        if not self._slot.leases:
            raise CacheError("reader_fds needs a lease", url=self.key.url)
        with self._pinned() as file:
            data_fd = self._open_again(file)
            try:
                return data_fd, os.dup(file.bits.fd)
            except BaseException:
                self._host.ops.close(data_fd)
                raise

    # --- chunks -----------------------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """The chunks that cannot be read yet, ascending (those of :meth:`needs_verify` included)."""
        if self._complete:
            return []
        with self._pinned() as file:
            return file.bits.missing()

    def needs_verify(self) -> list[int]:
        """The chunks that lie on disk with a recorded digest and were not checked since the store was opened."""
        if self._complete:
            return []
        with self._pinned() as file:
            return [i for i in file.bits.missing() if file.digests[i]]

    def verify_chunk(self, chunk: int) -> bool:
        """Check a chunk on disk against its digest; True and readable from now on if it fits.

        False if there is nothing to check or it does not fit: fetch it. A bad chunk of a published entry also makes
        the entry :attr:`superseded`: the file is never modified, a new one takes its place, look the key up again.
        Raises :class:`DiskFault` if the disk cannot be read.
        """
        self._require_chunk(chunk)
        with self._pinned() as file:
            with self._claim(chunk):
                if file.bits.has(chunk):
                    return True
                if not file.digests[chunk]:
                    return False
                try:
                    good = file.check(chunk)
                except OSError as e:
                    raise self._host.health.note(e, self._path(), f"reading chunk {chunk}") from e
                if good:
                    self._host.metrics.add("flash_verified_chunks")
                    self._set(file, chunk)
                    return True
                self._host.metrics.add("flash_bad_chunks")
                if self._slot.place is Place.FILLING:
                    self._change(file.forget, chunk, "forgetting")
                    return False
            self._host.heal(self, chunk)
            return False

    def write_chunk(self, chunk: int, data: Buffer) -> None:
        """Store one chunk: its bytes, then its digest, then its bit. The last one publishes the entry.

        ``data`` is exactly the chunk's bytes, not kept. A chunk that can be read already is left alone. Raises
        :class:`CacheFull` or :class:`DiskFault` if the disk refuses; the chunk stays missing then.
        """
        self._require_chunk(chunk)
        view = memoryview(data).cast("B")
        expected = min(self.chunk_size, self.size - chunk * self.chunk_size)
        if len(view) != expected:
            raise CacheError(
                f"chunk {chunk} has {len(view)} bytes instead of {expected}",
                url=self.key.url,
                offset=chunk * self.chunk_size,
            )
        self._host.health.check()
        if self._slot.place is not Place.FILLING:
            if not self.verify_chunk(chunk):
                raise evicted(self._slot)
            return
        with self._pinned() as file, self._claim(chunk):
            if file.bits.has(chunk):
                return
            self._change(lambda i: file.write(i, view), chunk, "writing")
            self._host.metrics.add("flash_written_bytes", expected)
            self._set(file, chunk)

    # --- inside -----------------------------------------------------------------------------------------------------

    def detach(self) -> ChunkFile | None:
        """Take the open files away, remembering the chunk bits. Called under the index lock while nothing is in use;
        the caller closes what it gets."""
        file, self._file = self._file, None
        if file is not None:
            self._saved = file.bits.snapshot()
        return file

    def mark_superseded(self) -> None:
        """Tell readers to open the object again."""
        if self._file is not None:
            self._file.bits.mark_superseded()

    def unpin(self) -> None:
        """End the operation that made the entry (for the store)."""
        self._let_go(pins=1)

    @contextmanager
    def _pinned(self) -> Iterator[ChunkFile]:
        self._host.index.pin(self._slot)
        try:
            with self._changed:
                if self._file is None:
                    self._file = self._open()
                file = self._file
            yield file
        finally:
            self._let_go(pins=1)

    def _let_go(self, leases: int = 0, pins: int = 0) -> None:
        index = self._host.index
        file = None
        with index.lock:
            if self._slot.leases < leases:
                raise CacheError("released more often than leased", url=self.key.url)
            self._slot.leases -= leases
            self._slot.pins -= pins
            if not self._slot.in_use:
                file = self.detach()
                index.changed.notify_all()
        if file is not None:
            file.close()

    def _open(self) -> ChunkFile:
        slot = self._slot
        if slot.place is Place.DYING:
            raise evicted(slot)
        try:
            return ChunkFile.open(
                self._host.ops,
                self._header,
                self._host.layout.fd(slot.place),
                slot.file,
                meta_name(slot.name),
                write=slot.place is Place.FILLING,
                bits=self._saved,
            )
        except OSError as e:
            raise self._host.health.note(e, self._path(), "opening it") from e

    def _open_again(self, file: ChunkFile) -> int:
        ops, slot = self._host.ops, self._slot
        for _ in range(3):  # a publish may rename it between looking and opening
            try:
                fd = ops.open(slot.file, dir_fd=self._host.layout.fd(slot.place))
            except FileNotFoundError:
                continue
            except OSError as e:
                raise self._host.health.note(e, self._path(), "opening it") from e
            if os.path.samestat(os.fstat(fd), os.fstat(file.data_fd)):
                return fd
            ops.close(fd)
        self._host.layout.check_present()
        raise evicted(slot)

    @contextmanager
    def _claim(self, chunk: int) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: chunk not in self._claimed, _CLAIM_DEADLINE):
                raise DeadlineExceeded(f"chunk {chunk} is busy for {_CLAIM_DEADLINE:.0f} s", url=self.key.url)
            self._claimed.add(chunk)
        try:
            yield
        finally:
            with self._changed:
                self._claimed.discard(chunk)
                self._changed.notify_all()

    def _set(self, file: ChunkFile, chunk: int) -> None:
        with self._changed:
            file.bits.set(chunk)
            finished = file.bits.all_set and not self._complete
            if finished:
                self._complete = True
        if finished:
            self._host.publish(self)

    def _change(self, call: Callable[[int], None], chunk: int, doing: str) -> None:
        try:
            call(chunk)
        except OSError as e:
            raise self._host.health.note(e, self._path(), f"{doing} chunk {chunk}") from e

    def _require_chunk(self, chunk: int) -> None:
        if not 0 <= chunk < self.n_chunks:
            raise CacheError(f"no chunk {chunk}, it has {self.n_chunks}", url=self.key.url)

    def _path(self) -> str:
        return str(self._host.layout.file(self._slot.place, self._slot.file))
