"""Room for new entries: reserving it, evicting for it, and getting back what evicted files took.

Space is credited only when a file is gone *and* nobody holds it: removing a file that a reader still has mapped frees
nothing on disk. So an evicted file is first renamed into ``dying``, where it survives even a crash of this process,
and stays accounted for until the system says that no other process has it open or mapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext

from ..errors import CacheFull
from ..schedule import Incoming
from .chunkfile import read_header
from .eviction import Candidate, choose_victims
from .index import Slot, dead_slot
from .layout import Place, attached_name, dying_name, meta_name
from .parts import Parts
from .quota import Usage
from .sidecar import Damaged, Foreign

_WAIT = 60.0
"""Seconds to wait for another thread that is removing a file."""


class Space:
    """Evicts and removes; keeps the ledger true. Thread-safe through the index's lock.

    Methods whose name begins with ``locked_`` are called with that lock held.
    """

    def __init__(self, parts: Parts) -> None:
        self._ops = parts.ops
        self._layout = parts.layout
        self._index = parts.index
        self._health = parts.health
        self._metrics = parts.metrics
        self.next_serial = 0

    def usage(self) -> Usage:
        """The space taken now. Raises :class:`DiskFault`."""
        available = self._free_bytes()
        with self._index.lock:
            self.locked_weigh_directories()
            ledger = self._index.ledger
            dying = sum(slot.charge for slot in self._index.dying.values())
            free = max(0, -ledger.short_of(0, available))
            return Usage(ledger.quota, ledger.used, free, dying, len(self._index.live))

    def reserve(self, need: int, size: int, url: str, incoming: Incoming | None = None) -> None:
        """Reserve ``need`` bytes for an object of ``size`` bytes, evicting as little as will do.

        ``incoming`` is the entry that they are for, if it is one that the ranking may refuse a place.

        Raises :class:`CacheFull` (having evicted nothing in vain) if quota, disk and what readers hold leave no room.
        """
        ledger = self._index.ledger
        if ledger.never_fits(need):
            raise CacheFull(
                f"its {size} bytes do not fit into the quota of {ledger.quota} bytes", url=url, hint="raise the quota"
            )
        while True:
            self.drop_dying()
            available = self._free_bytes()
            with self._index.lock:
                self._index.require_open()
                self.locked_weigh_directories()
                short = ledger.short_of(need, available)
                if short <= 0:
                    ledger.reserve(need)
                    return
                # What another thread is removing just now may be enough.
                removing = any(slot.dropping for slot in self._index.dying.values())
                if (removing and self._index.changed.wait(_WAIT)) or self.locked_evict(short, incoming=incoming):
                    continue
                raise CacheFull(
                    f"no room for its {size} bytes: {short} short, with {ledger.used} of the quota of {ledger.quota} "
                    f"in use and {available} free on disk, and readers hold what could be evicted or need it sooner",
                    url=url,
                    hint="raise the quota or free disk space",
                )

    def make_room(self, size: int) -> bool:
        """Evict ``size`` bytes whatever the ledger says (the disk refused); False if that much cannot be evicted."""
        with self._index.lock:
            if not self.locked_evict(size):
                return False
        self.drop_dying()
        return True

    def shrink(self) -> None:
        """Evict what the quota leaves no room for, as far as nobody holds it."""
        with self._index.lock:
            dying = sum(slot.charge for slot in self._index.dying.values())
            over = self._index.ledger.used - dying - self._index.ledger.quota
            if over > 0 and not self.locked_evict(over):
                self.locked_evict(over, partly=True)
        self.drop_dying()

    def drop_dying(self) -> None:
        """Remove the files on their way out that nobody holds any more, and credit their space."""
        with self._index.lock:
            self._index.require_open()
            slots = list(self._index.dying.values())
        for slot in slots:
            self._drop(slot)

    def locked_weigh_directories(self) -> None:
        """Bring the directories' part of the account up to date. Raises :class:`DiskFault`."""
        ledger = self._index.ledger
        try:
            ledger.directories = self._layout.directory_bytes()
        except OSError as e:
            raise self._health.note(e, self._layout.path, "looking at its directories") from e
        self._metrics.set("flash_used_bytes", ledger.used)

    def locked_evict(self, size: int, *, partly: bool = False, incoming: Incoming | None = None) -> bool:
        """Bury entries of at least ``size`` bytes together, in the order of the ranking; False, burying none, if there
        are not enough that may go and nobody uses or holds (with ``partly``: burying those)."""
        foreign: list[Slot] = []
        ranking = self._index.ranking
        order = None if ranking is None else ranking.order(incoming)
        try:
            with nullcontext(self._index.live) if order is None else closing(order) as names:
                victims = choose_victims(self._candidates(names, foreign), size, partly=partly)
        except OSError as e:
            raise self._health.note(e, self._layout.path, "looking for what to evict") from e
        for slot in foreign:
            self._index.block(slot)
            self._metrics.add("flash_foreign_ignored")
        for victim in victims:
            self.locked_bury(self._index.live[victim.name])
            self._metrics.add("flash_evicted")
            self._metrics.add("flash_evicted_bytes", victim.disk_bytes)
        return bool(victims)

    def locked_bury(self, slot: Slot) -> None:
        """Make an entry invisible (its sidecar goes first), give up its attachments and move its data to ``dying``.

        Raises :class:`DiskFault`; if the sidecar could not be removed the entry stays as it was.
        """
        try:
            self._gone_is_fine(lambda: self._ops.unlink(meta_name(slot.name), dir_fd=self._layout.fd(slot.meta_place)))
        except OSError as e:
            raise self._health.note(e, self._layout.file(slot.meta_place, slot.file), "evicting it") from e
        if slot.entry is not None:
            slot.entry.abandon()
        for name in list(slot.attached):
            self.locked_shed(slot, name)
        self._index.add_dying(slot)
        self.locked_move_to_dying(slot)

    def locked_shed(self, slot: Slot, name: str) -> None:
        """An attachment, if the slot has it, is no longer the slot's: its file is removed like that of an entry."""
        charge = slot.attached.pop(name, None)
        if charge is not None:
            slot.charge -= charge
            self._index.add_dying(dead_slot(slot.name, Place.ATTACHED, attached_name(slot.name, name), charge))

    def locked_move_to_dying(self, slot: Slot) -> None:
        """Rename a dying slot's file out of the way of a new entry of that name. Raises :class:`DiskFault`."""
        source, target = self._layout.fd(slot.place), dying_name(slot.name, self.next_serial)
        self.next_serial += 1
        try:
            self._gone_is_fine(
                lambda: self._ops.rename(slot.file, target, src_fd=source, dst_fd=self._layout.fd(Place.DYING))
            )
        except OSError as e:
            raise self._health.note(e, self._layout.file(slot.place, slot.file), "evicting it") from e
        del self._index.dying[slot.place, slot.file]
        slot.place, slot.file = Place.DYING, target
        self._index.add_dying(slot)

    def locked_clear(self, name: str) -> None:
        """Move dying files out of the way of a new entry ``name``, where an earlier attempt failed."""
        for slot in [s for s in self._index.dying.values() if s.name == name and s.place is not Place.DYING]:
            if not slot.dropping:
                self.locked_move_to_dying(slot)

    def _free_bytes(self) -> int:
        try:
            return self._ops.free_bytes(self._layout.tree_fd)
        except OSError as e:
            raise self._health.note(e, self._layout.path, "looking at its free space") from e

    def _candidates(self, names: Iterable[str], foreign: list[Slot]) -> Iterator[Candidate]:
        """Those entries that nobody uses or holds, in this order; looks at their files one by one and puts those that
        are not ours into ``foreign``."""
        for name in names:
            slot = self._index.live.get(name)
            if slot is None or slot.in_use:
                continue
            if not self._is_ours(slot):
                foreign.append(slot)
            elif not self._is_held(slot):
                yield Candidate(slot.name, slot.charge, slot.last_use)

    def _is_ours(self, slot: Slot) -> bool:
        """Whether an entry never looked at has a sidecar of a known format; it is left alone otherwise."""
        if slot.entry is not None:
            return True
        try:
            fd = self._ops.open(meta_name(slot.name), dir_fd=self._layout.fd(slot.meta_place))
        except FileNotFoundError:
            return True
        try:
            read_header(self._ops, fd)
        except Foreign:
            return False
        except Damaged:
            return True
        finally:
            self._ops.close(fd)
        return True

    def _is_held(self, slot: Slot) -> bool:
        """Whether another process has the file open or mapped.

        Where the system cannot tell, the leases alone decide: the space of a reader that keeps a map after giving its
        lease back is then credited too early.
        """
        try:
            fd = self._ops.open(slot.file, dir_fd=self._layout.fd(slot.place))
        except FileNotFoundError:
            return False
        try:
            return bool(self._ops.is_held(fd))
        finally:
            self._ops.close(fd)

    def _drop(self, slot: Slot) -> None:
        with self._index.lock:
            if slot.in_use or slot.dropping or self._index.dying.get((slot.place, slot.file)) is not slot:
                return
            slot.dropping = True
        gone = False
        try:
            if not self._is_held(slot):
                dir_fd = self._layout.fd(slot.place)
                self._gone_is_fine(lambda: self._ops.unlink(slot.file, dir_fd=dir_fd))
                gone = True
        except OSError as e:
            # Remembered as the store's fault; the file stays accounted for and is tried again.
            self._health.note(e, self._layout.file(slot.place, slot.file), "removing it")
        finally:
            with self._index.lock:
                slot.dropping = False
                if gone:
                    self._index.forget(slot)
                self._index.changed.notify_all()

    def _gone_is_fine(self, call: Callable[[], None]) -> None:
        try:
            call()
        except FileNotFoundError:
            self._layout.check_present()
