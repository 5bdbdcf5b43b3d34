"""An entry's life: made, loaded from its sidecar, published, replaced when it turns out bad."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import CacheFull, DeadlineExceeded
from ..schedule import Incoming
from .chunkfile import ChunkFile, Donor, read_header
from .entry import Entry
from .health import FULL
from .index import Slot, live_slot
from .layout import Place, data_name, meta_name
from .parts import Parts
from .quota import extent_bytes, least_bytes, most_bytes
from .sidecar import Damaged, EntryKey, Foreign, Header, make_header
from .space import Space

_WAIT = 60.0
"""Seconds to wait for another thread that makes the same entry."""


class Lifecycle:
    """Makes entries and moves them along. Thread-safe; holds no lock while the disk is written."""

    def __init__(self, parts: Parts, space: Space, chunk_size: int) -> None:
        self._parts = parts
        self._space = space
        self._chunk_size = chunk_size
        self._block = parts.layout.block_bytes

    @contextmanager
    def sole_creator(self, key: EntryKey) -> Iterator[None]:
        """While this lasts no other thread makes an entry of this key."""
        index, name = self._parts.index, key.name
        with index.lock:
            if not index.changed.wait_for(lambda: name not in index.creating, _WAIT):
                raise DeadlineExceeded("another thread is still making this entry", url=key.url)
            index.require_open()
            index.creating.add(name)
        try:
            yield
        finally:
            with index.lock:
                index.creating.discard(name)
                index.changed.notify_all()

    def make(self, key: EntryKey, size: int, *, lease: bool, ahead: bool = False, donor: Donor | None = None) -> Entry:
        """A new entry, its space reserved and its files made. The caller is the sole creator; errors as those of
        :meth:`FlashStore.create`. Owns ``donor`` once it returns."""
        header, raw = make_header(key, size, self._chunk_size)
        need = most_bytes(size, header.file_bytes, header.n_chunks, self._block)
        index = self._parts.index
        self._require_free_name(key)
        self._space.reserve(need, size, key.url, Incoming(key.name, need, ahead))
        try:
            file = self._make_files(header, raw)
        except BaseException:
            with index.lock:
                index.ledger.allocated(need)
                index.ledger.credit(need)
            raise
        slot = live_slot(key.name, Place.FILLING, Place.FILLING, need, self._parts.clock.time())
        slot.pins = 1
        slot.leases = int(lease)
        slot.entry = entry = Entry(self._parts, self, slot, header, file, donor)
        with index.lock:
            index.ledger.allocated(need)
            index.add(slot)
        entry.files.let_go(pins=1)
        self._parts.metrics.add("flash_created")
        if entry.complete:
            self.publish(slot)
        return entry

    def load(self, slot: Slot) -> Entry | None:
        """The entry of a slot, its header read if need be; None, and the slot is gone, if its files are damaged or not
        ours. Raises :class:`DiskFault`."""
        if slot.entry is not None:
            return slot.entry
        parts = self._parts
        try:
            header = self._read_header(slot)
        except Foreign:
            with parts.index.lock:
                parts.index.block(slot)
            parts.metrics.add("flash_foreign_ignored")
            return None
        except (Damaged, FileNotFoundError):
            parts.require_present()
            with parts.index.lock:
                if parts.index.is_live(slot) and not slot.in_use:
                    self._space.locked_bury(slot)
                    parts.metrics.add("flash_bad_entries")
            return None
        except OSError as e:
            path = parts.layout.file(slot.meta_place, meta_name(slot.name))
            raise parts.health.note(e, path, "reading it") from e
        with parts.index.lock:
            if slot.entry is None:
                slot.entry = Entry(parts, self, slot, header)
            return slot.entry

    def publish(self, slot: Slot) -> None:
        """Move a complete entry from ``filling`` to ``entries``: the data, then the sidecar.

        A failure is remembered as the store's fault and not raised: the chunks can be read where they are, and the
        next look-up tries again.
        """
        ops, layout, index = self._parts.ops, self._parts.layout, self._parts.index
        source, target = layout.fd(Place.FILLING), layout.fd(Place.ENTRIES)
        meta = meta_name(slot.name)
        with index.lock:
            if slot.published or not index.is_live(slot):
                return
            try:
                if slot.place is Place.FILLING:
                    ops.rename(slot.file, slot.file, src_fd=source, dst_fd=target)
                    slot.place = Place.ENTRIES
                ops.rename(meta, meta, src_fd=source, dst_fd=target)
                slot.meta_place = Place.ENTRIES
                size = sum(ops.stat(file, dir_fd=target).st_blocks * 512 for file in (slot.file, meta))
                size += sum(slot.attached.values())
                if slot.entry is not None:
                    size += extent_bytes(slot.entry.n_chunks, self._block)
                index.ledger.charge(size - slot.charge)
                slot.charge = size
                self._space.locked_weigh_directories()
            except OSError as e:
                self._parts.health.note(e, layout.file(slot.place, slot.file), "publishing it")
                return
        self._parts.metrics.add("flash_published")

    def heal(self, entry: Entry, file: ChunkFile, bad: int) -> None:
        """Replace an entry with a bad chunk by a new one that takes over the good chunks.

        If there is no room for both, the old one is given up all the same, and making a new one is left to the next
        :meth:`FlashStore.create`.
        """
        with self.sole_creator(entry.key):
            try:
                donor = Donor(self._parts.ops, file, bad)
            except OSError as e:
                raise self._parts.health.note(e, self._parts.layout.path, "replacing a bad entry") from e
            try:
                with self._parts.index.lock:
                    slot = self._parts.index.live.get(entry.name)
                    if slot is None or slot.entry is not entry:
                        donor.close()
                        return
                    self._space.locked_bury(slot)
                self._parts.metrics.add("flash_healed")
                self.make(entry.key, entry.size, lease=False, donor=donor)
            except CacheFull:
                donor.close()
            except BaseException:
                donor.close()
                raise

    def _make_files(self, header: Header, raw: bytes) -> ChunkFile:
        parts, name = self._parts, header.key.name
        dir_fd = parts.layout.fd(Place.FILLING)
        try:
            try:
                return ChunkFile.create(parts.ops, dir_fd, name, header, raw)
            except OSError as e:
                # The disk may be fuller than it says (a user's disk quota, another program's writes).
                if e.errno not in FULL:
                    raise
                if not self._space.make_room(least_bytes(header.size, header.file_bytes, self._block)):
                    raise
                return ChunkFile.create(parts.ops, dir_fd, name, header, raw)
        except OSError as e:
            path = parts.layout.file(Place.FILLING, data_name(name))
            raise parts.health.note(e, path, f"making an entry of {header.size} bytes") from e

    def _require_free_name(self, key: EntryKey) -> None:
        """Clear leftovers of our own off the entry's names.

        Raises :class:`CacheFull` if somebody else's file is there, :class:`DiskFault` if the directory has vanished.
        """
        parts, name = self._parts, key.name
        parts.require_present()
        with parts.index.lock:
            self._space.locked_clear(name)
        for place in (Place.ENTRIES, Place.FILLING):
            for file in (data_name(name), meta_name(name)):
                path = parts.layout.file(place, file)
                try:
                    parts.ops.stat(file, dir_fd=parts.layout.fd(place))
                except FileNotFoundError:
                    continue
                except OSError as e:
                    raise parts.health.note(e, path, "looking at it") from e
                raise CacheFull(f"a file that is not ours is in the way: {path}", url=key.url, hint="move it away")

    def _read_header(self, slot: Slot) -> Header:
        ops, layout = self._parts.ops, self._parts.layout
        fd = ops.open(meta_name(slot.name), dir_fd=layout.fd(slot.meta_place))
        try:
            header = read_header(ops, fd)
        finally:
            ops.close(fd)
        if header.key.name != slot.name:
            raise Damaged("the sidecar names another entry")
        if ops.stat(slot.file, dir_fd=layout.fd(slot.place)).st_size != header.size:
            raise Damaged("the data file has another length")
        return header
