"""One object's presence on flash, as the daemon handles it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from ..errors import CacheError, DeadlineExceeded
from .chunkfile import ChunkFile, Donor
from .index import Slot, evicted
from .layout import Place, meta_name
from .parts import Parts
from .sidecar import Damaged, EntryKey, Header

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CLAIM_DEADLINE = 120.0
"""Seconds one thread waits for another that works on the same chunk."""
_RENAMES = 3
"""An entry's files are renamed at most twice while somebody opens them (data, then sidecar)."""


class Keeper(Protocol):
    """What an entry tells its store."""

    def publish(self, slot: Slot) -> None:
        """Every chunk can be read: make the entry a published one."""

    def heal(self, entry: Entry, file: ChunkFile, bad: int) -> None:
        """A chunk of a published entry is bad: replace the entry by a new one."""


class Entry:
    """One object at one version on flash. Made by the store only; thread-safe.

    ``size`` and ``chunk_size`` in bytes; every chunk has ``chunk_size`` bytes but the last. The entry's files are open
    while it has a lease or an operation is under way. Hold a lease around any sequence of calls: an entry without one
    may be evicted between two of them, and then raises :class:`CacheError`.
    """

    def __init__(
        self,
        parts: Parts,
        keeper: Keeper,
        slot: Slot,
        header: Header,
        file: ChunkFile | None = None,
        donor: Donor | None = None,
    ) -> None:
        self.key: EntryKey = header.key
        self.size = header.size
        self.chunk_size = header.chunk_size
        self.n_chunks = header.n_chunks
        self._parts = parts
        self._keeper = keeper
        self._slot = slot
        self._header = header
        self._file = file
        self._donor = donor
        self._saved: bytes | None = None
        self._changed = threading.Condition()
        self._claimed: set[int] = set()
        self._complete = header.n_chunks == 0

    @property
    def name(self) -> str:
        """The stem of its file names; what :meth:`FlashStore.evict` takes."""
        return self._slot.name

    @property
    def complete(self) -> bool:
        """Whether every chunk can be read. After a restart this begins as False: chunks count once verified."""
        return self._complete

    @property
    def superseded(self) -> bool:
        """Whether the store has given this entry up (evicted, or replaced because of a bad chunk): look it up again."""
        return not self._parts.index.is_live(self._slot)

    # --- leases -----------------------------------------------------------------------------------------------------

    def lease(self) -> None:
        """Keep the entry: it is not evicted until :meth:`release`. Raises :class:`CacheError` if it is gone already."""
        index = self._parts.index
        with index.lock:
            index.require_open()
            if not index.is_live(self._slot):
                raise evicted(self._slot)
            self._slot.leases += 1

    def release(self) -> None:
        """Give one lease back."""
        self.let_go(leases=1)

    def reader_fds(self) -> tuple[int, int]:
        """(data, bitmap): a new read-only descriptor of the data file and one of the chunk bitmap.

        Both belong to the caller, who hands them to a reader and closes them. Needs a lease, which must last as long
        as the reader waits for chunks: without one the bitmap is no longer written to.
        """
        if not self._slot.leases:
            raise CacheError("reader_fds needs a lease", url=self.key.url)
        with self._pinned() as file:
            data_fd = self._open_again(file)
            try:
                return data_fd, os.dup(file.bits.fd)
            except BaseException:
                self._parts.ops.close(data_fd)
                raise

    # --- chunks -----------------------------------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """The chunks that cannot be read yet, ascending (those of :meth:`needs_verify` included)."""
        if self._complete:
            return []
        with self._pinned() as file:
            return file.bits.missing()

    def needs_verify(self) -> list[int]:
        """The chunks that lie on disk with a recorded digest and were not checked since the store was opened.

        Try :meth:`verify_chunk` on them before fetching.
        """
        if self._complete:
            return []
        with self._pinned() as file:
            donor = self._donor
            return [i for i in file.bits.missing() if file.digests[i] or (donor and donor.offers(i))]

    def cached_bytes(self) -> int:
        """How many bytes of the object are on disk, verified or still to be verified."""
        if self._complete:
            return self.size
        with self._pinned() as file:
            absent = [i for i in file.bits.missing() if not file.digests[i]]
        return self.size - sum(map(self._header.chunk_bytes, absent))

    def verify_chunk(self, chunk: int) -> bool:
        """Check a chunk on disk against its digest; True, and readable from now on, if it fits.

        False if there is nothing to check or it does not fit: fetch it. A bad chunk of a published entry also makes
        the entry :attr:`superseded`: the file is never modified, a new one takes its place; look the key up again (the
        good chunks come along: they are among the new entry's :meth:`needs_verify`). Raises :class:`DiskFault` if the
        disk cannot be read.
        """
        self._require_chunk(chunk)
        with self._pinned() as file:
            with self._claim(chunk):
                if file.bits.has(chunk):
                    return True
                if not file.digests[chunk]:
                    return self._take_from_donor(file, chunk)
                if self._fits(file, chunk):
                    self._parts.metrics.add("flash_verified_chunks")
                    self._set(file, chunk)
                    return True
                self._parts.metrics.add("flash_bad_chunks")
                if self._slot.place is Place.FILLING:
                    self._change(lambda: file.forget(chunk), chunk, "forgetting")
                    return False
            self._keeper.heal(self, file, chunk)
            return False

    def write_chunk(self, chunk: int, data: Buffer) -> None:
        """Store one chunk: its bytes, then its digest, then its bit. The last one publishes the entry.

        ``data`` is exactly the chunk's bytes; no reference to it is kept. A chunk that can be read already is left
        alone. Raises :class:`CacheFull` or :class:`DiskFault` if the disk refuses; the chunk stays missing then.
        """
        self._require_chunk(chunk)
        view = memoryview(data).cast("B")
        expected = self._header.chunk_bytes(chunk)
        if len(view) != expected:
            raise CacheError(
                f"chunk {chunk} has {len(view)} bytes instead of {expected}",
                url=self.key.url,
                offset=chunk * self.chunk_size,
            )
        self._parts.health.check()
        if self._slot.place is not Place.FILLING:
            # Readers may have the file mapped, so it is never written to: what is there is good, or replaced.
            if not self.verify_chunk(chunk):
                raise evicted(self._slot)
            return
        with self._pinned() as file, self._claim(chunk):
            if file.bits.has(chunk):
                return
            self._change(lambda: file.write(chunk, view), chunk, "writing")
            self._parts.metrics.add("flash_written_bytes", expected)
            self._set(file, chunk)

    # --- for the store ----------------------------------------------------------------------------------------------

    def detach(self) -> ChunkFile | None:
        """Take the open files away, remembering the chunk bits; the caller closes what it gets.

        Called under the index lock while the entry is not in use.
        """
        file, self._file = self._file, None
        if file is not None:
            self._saved = file.bits.snapshot()
        return file

    def abandon(self) -> None:
        """The entry is no longer visible: tell its readers to open the object again."""
        if self._file is not None:
            self._file.bits.mark_superseded()
        self._drop_donor()

    def let_go(self, leases: int = 0, pins: int = 0) -> None:
        """Give leases and pins back; with the last of them the files are closed."""
        index, slot = self._parts.index, self._slot
        file = None
        with index.lock:
            if slot.leases < leases:
                raise CacheError("released more often than leased", url=self.key.url)
            slot.leases -= leases
            slot.pins -= pins
            if not slot.in_use:
                file = self.detach()
            if not slot.pins:
                index.changed.notify_all()  # closing the store waits for operations, not for leases
        if file is not None:
            file.close()

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _pinned(self) -> Iterator[ChunkFile]:
        self._parts.index.pin(self._slot)
        try:
            with self._changed:
                if self._file is None:
                    self._file = self._open()
                file = self._file
            yield file
        finally:
            self.let_go(pins=1)

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
                raise self._parts.health.note(e, self._path(), "opening it") from e
        self._parts.require_present()
        raise evicted(slot)

    def _open_again(self, file: ChunkFile) -> int:
        ops, slot = self._parts.ops, self._slot
        for _ in range(_RENAMES):
            try:
                fd = ops.open_for_reader(slot.file, dir_fd=self._parts.layout.fd(slot.place))
            except FileNotFoundError:
                continue
            except OSError as e:
                raise self._parts.health.note(e, self._path(), "opening it") from e
            if os.path.samestat(ops.fstat(fd), ops.fstat(file.data_fd)):
                return fd
            ops.close(fd)
        self._parts.require_present()
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

    def _fits(self, file: ChunkFile, chunk: int) -> bool:
        try:
            return file.check(chunk)
        except OSError as e:
            # One unreadable spot on a disk that works otherwise is a bad chunk; a failing disk is not.
            self._parts.health.confirm(e, self._path(), f"reading chunk {chunk}")
            return False

    def _take_from_donor(self, file: ChunkFile, chunk: int) -> bool:
        donor = self._donor
        if donor is None or not donor.offers(chunk):
            return False
        try:
            data = donor.take(chunk)
        except OSError as e:
            self._parts.health.confirm(e, self._path(), f"reading chunk {chunk} of the entry it replaces")
            data = None
        if data is None:
            self._parts.metrics.add("flash_bad_chunks")
            return False
        self._change(lambda: file.write(chunk, data), chunk, "writing")
        self._set(file, chunk)
        return True

    def _set(self, file: ChunkFile, chunk: int) -> None:
        with self._changed:
            file.bits.set(chunk)
            finished = file.bits.all_set and not self._complete
            if finished:
                self._complete = True
        if finished:
            self._drop_donor()
            self._keeper.publish(self._slot)

    def _drop_donor(self) -> None:
        donor, self._donor = self._donor, None
        if donor is not None:
            donor.close()

    def _change(self, call: Callable[[], None], chunk: int, doing: str) -> None:
        try:
            call()
        except OSError as e:
            raise self._parts.health.note(e, self._path(), f"{doing} chunk {chunk}") from e

    def _require_chunk(self, chunk: int) -> None:
        if not 0 <= chunk < self.n_chunks:
            raise CacheError(f"no chunk {chunk}, it has {self.n_chunks}", url=self.key.url)

    def _path(self) -> str:
        return self._parts.layout.file(self._slot.place, self._slot.file)
