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
from .layout import Place
from .openfiles import OpenFiles
from .parts import Parts
from .sidecar import EntryKey, Header

if TYPE_CHECKING:
    from typing_extensions import Buffer

_CLAIM_DEADLINE = 120.0
"""Seconds one thread waits for another that works on the same chunk."""


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
        self._files = OpenFiles(parts, slot, header, file)
        self._donor = donor
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
        self._files.lease()

    def release(self) -> None:
        """Give one lease back."""
        self._files.let_go(leases=1)

    def reader_fds(self) -> tuple[int, int]:
        """(data, bitmap): a new read-only descriptor of the data file and one of the chunk bitmap.

        Both belong to the caller, who hands them to a reader and closes them. Needs a lease, which must last as long
        as the reader waits for chunks: without one the bitmap is no longer written to.
        """
        if not self._slot.leases:
            raise CacheError("reader_fds needs a lease", url=self.key.url)
        with self._files.pinned() as file:
            data_fd = self._files.open_for_reader(file)
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
        with self._files.pinned() as file:
            return file.bits.missing()

    def needs_verify(self) -> list[int]:
        """The chunks that lie on disk with a recorded digest and were not checked since the store was opened.

        Try :meth:`verify_chunk` on them before fetching.
        """
        if self._complete:
            return []
        with self._files.pinned() as file:
            donor = self._donor
            return [i for i in file.bits.missing() if file.digests[i] or (donor and donor.offers(i))]

    def cached_bytes(self) -> int:
        """How many bytes of the object are on disk, verified or still to be verified."""
        if self._complete:
            return self.size
        with self._files.pinned() as file:
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
        with self._files.pinned() as file:
            with self._claim(chunk):
                if file.bits.has(chunk):
                    return True
                filling = self._slot.place is Place.FILLING
                if filling and not file.digests[chunk]:
                    return self._take_from_donor(file, chunk)
                if self._fits(file, chunk):
                    self._parts.metrics.add("flash_verified_chunks")
                    self._set(file, chunk)
                    return True
                self._parts.metrics.add("flash_bad_chunks")
                if filling:
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
        with self._files.pinned() as file, self._claim(chunk):
            if file.bits.has(chunk):
                return
            self._change(lambda: file.write(chunk, view), chunk, "writing")
            self._parts.metrics.add("flash_written_bytes", expected)
            self._set(file, chunk)

    # --- for the store ----------------------------------------------------------------------------------------------

    @property
    def files(self) -> OpenFiles:
        """Its descriptors, leases and pins."""
        return self._files

    def abandon(self) -> None:
        """The entry is no longer visible: tell its readers to open the object again. Called under the index lock."""
        self._files.mark_superseded()
        self._drop_donor()

    # --- inside -----------------------------------------------------------------------------------------------------

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
            self._parts.health.confirm(e, self._files.path(), f"reading chunk {chunk}")
            return False

    def _take_from_donor(self, file: ChunkFile, chunk: int) -> bool:
        donor = self._donor
        if donor is None or not donor.offers(chunk):
            return False
        try:
            data = donor.take(chunk)
        except OSError as e:
            self._parts.health.confirm(e, self._files.path(), f"reading chunk {chunk} of the entry it replaces")
            donor.refuse(chunk)
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
            raise self._parts.health.note(e, self._files.path(), f"{doing} chunk {chunk}") from e

    def _require_chunk(self, chunk: int) -> None:
        if not 0 <= chunk < self.n_chunks:
            raise CacheError(f"no chunk {chunk}, it has {self.n_chunks}", url=self.key.url)
