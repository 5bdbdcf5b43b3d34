"""Attachments: small files made from an entry's bytes (an index of its samples), which live and die with the entry.

One file each, in a directory of their own, under the entry's name and theirs (little-endian)::

    0   8  magic b"NFATTACH"
    8   8  u64 number of bytes that follow the header
    16  8  u64 xxh3 of those bytes
    24  -  the bytes

A file is written under another name, and renamed when whole; it is never changed after that, and nobody outside the
daemon opens it. Nothing is synced: what a power cut leaves does not fit its length or digest, and counts as absent.
An attachment does not follow its entry from ``filling`` to ``entries``, so publishing costs nothing more. When the
entry goes, its attachments are on their way out like its data (see :mod:`.space`); what a crash leaves of one without
its entry is cleared away by the next owner (:mod:`.recovery`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..attachments import MOST_PER_ENTRY
from ..errors import CacheError, DeadlineExceeded
from ..hashing import chunk_digest
from .entry import Entry
from .index import Slot, dead_slot
from .layout import Place, attached_name, attaching_name
from .parts import Parts
from .quota import attached_bytes
from .sidecar import Damaged
from .space import Space

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"NFATTACH"
_HEADER = struct.Struct("<8sQQ")
_WAIT = 60.0
"""Seconds to wait for another thread that is busy with an attachment of the same entry."""


class Attachments:
    """The attachments of a store's entries, whether published or filling. Thread-safe.

    One operation at a time on each entry; what it holds it pins. All raise :class:`CacheError` for an entry that is
    gone.
    """

    def __init__(self, parts: Parts, space: Space) -> None:
        self._parts = parts
        self._space = space
        self._busy: set[str] = set()

    def size(self, entry: Entry, name: str) -> int | None:
        """About how many bytes an attachment takes; None if there is none. Touches no disk."""
        index = self._parts.index
        with index.lock:
            slot = index.live.get(entry.name)
            return None if slot is None else slot.attached.get(name)

    def read(self, entry: Entry, name: str) -> bytes | None:
        """An attachment's bytes, or None. A damaged one is removed. Raises :class:`DiskFault`."""
        with self._turn(entry) as slot:
            if name not in slot.attached:
                return None
            file = attached_name(slot.name, name)
            try:
                return self._load(file)
            except (Damaged, FileNotFoundError):
                self._parts.require_present()
            except OSError as e:
                # One unreadable spot on a disk that works otherwise is damage; a failing disk is not.
                self._parts.health.confirm(e, self._path(file), "reading an attachment")
            self._parts.metrics.add("flash_bad_attachments")
            self._remove(slot, name)
            return None

    def keep(self, entry: Entry, name: str, data: Buffer) -> bool:
        """Attach bytes; the first ones of a name stay. False if a file that is not ours is in the way.

        Room is made as for an entry. Raises :class:`CacheFull` or :class:`DiskFault` if there is none, or the disk
        refuses; nothing is left behind then.
        """
        view = memoryview(data).cast("B")
        self._parts.health.check()
        with self._turn(entry) as slot:
            if name in slot.attached:
                return True
            if self._in_the_way(slot, name):
                return False
            while len(slot.attached) >= MOST_PER_ENTRY:
                self._remove(slot, next(iter(slot.attached)))
            need = attached_bytes(_HEADER.size + len(view), self._parts.layout.block_bytes)
            self._space.reserve(need, len(view), entry.key.url)
            return self._make(slot, name, view, need)

    # --- inside -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _turn(self, entry: Entry) -> Iterator[Slot]:
        """The entry's slot, pinned, and no other thread at its attachments."""
        index, name = self._parts.index, entry.name
        with index.lock:
            index.require_open()
            slot = index.live.get(name)
            if slot is None or slot.entry is not entry:
                raise CacheError("this cache entry is gone", url=entry.key.url)
            slot.pins += 1
        try:
            with index.lock:
                if not index.changed.wait_for(lambda: name not in self._busy, _WAIT):
                    raise DeadlineExceeded("another thread is still busy with its attachments", url=entry.key.url)
                self._busy.add(name)
            try:
                yield slot
            finally:
                with index.lock:
                    self._busy.discard(name)
                    index.changed.notify_all()
        finally:
            entry.files.let_go(pins=1)

    def _load(self, file: str) -> bytes:
        ops = self._parts.ops
        fd = ops.open(file, dir_fd=self._parts.layout.fd(Place.ATTACHED))
        try:
            head = ops.read(fd, _HEADER.size, 0)
            if len(head) < _HEADER.size:
                raise Damaged("the attachment is cut short")
            magic, length, digest = _HEADER.unpack(head)
            if magic != MAGIC or ops.fstat(fd).st_size != _HEADER.size + length:
                raise Damaged("the attachment has the wrong length")
            data = ops.read(fd, length, _HEADER.size)
        finally:
            ops.close(fd)
        if len(data) != length or chunk_digest(data) != digest:
            raise Damaged("the attachment does not fit its digest")
        return data

    def _in_the_way(self, slot: Slot, name: str) -> bool:
        """Whether its file name is taken: by an old one that could not be removed yet, or by somebody else's."""
        file = attached_name(slot.name, name)
        with self._parts.index.lock:
            if (Place.ATTACHED, file) in self._parts.index.dying:
                return True
        try:
            self._parts.ops.stat(file, dir_fd=self._parts.layout.fd(Place.ATTACHED))
        except FileNotFoundError:
            self._parts.require_present()
            return False
        except OSError as e:
            raise self._parts.health.note(e, self._path(file), "looking at it") from e
        return True

    def _make(self, slot: Slot, name: str, view: memoryview, need: int) -> bool:
        """Write and publish it, in the space that was reserved."""
        parts, index = self._parts, self._parts.index
        ops, dir_fd = parts.ops, parts.layout.fd(Place.ATTACHED)
        file, fresh = attached_name(slot.name, name), attaching_name(slot.name, name)
        made = kept = False
        try:
            fd = ops.create(fresh, dir_fd=dir_fd)
            made = True
            try:
                ops.allocate(fd, _HEADER.size + len(view))
                ops.write(fd, _HEADER.pack(MAGIC, len(view), chunk_digest(view)), 0)
                ops.write(fd, view, _HEADER.size)
                charge = ops.disk_bytes(fd) + parts.layout.block_bytes
            finally:
                ops.close(fd)
            with index.lock:
                if index.is_live(slot):  # not healed meanwhile
                    ops.rename(fresh, file, src_fd=dir_fd, dst_fd=dir_fd)
                    kept = True
                    index.attach(slot, name, charge)
                    index.ledger.charge(charge)
        except FileExistsError:
            pass  # somebody else's file has the name
        except OSError as e:
            raise parts.health.note(e, self._path(file), "attaching it") from e
        finally:
            with index.lock:
                index.ledger.allocated(need)
                if made and not kept:
                    index.add_dying(dead_slot(slot.name, Place.ATTACHED, fresh, need))
                else:
                    index.ledger.credit(need)
            if made and not kept:
                self._space.drop_dying()
        parts.metrics.add("flash_attached", int(kept))
        return kept

    def _remove(self, slot: Slot, name: str) -> None:
        with self._parts.index.lock:
            self._space.locked_shed(slot, name)
        self._space.drop_dying()

    def _path(self, file: str) -> str:
        return self._parts.layout.file(Place.ATTACHED, file)
