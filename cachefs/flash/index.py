"""What the store holds, in memory: one slot per entry, least recently used first, and the account of their space.

Everything here is guarded by :attr:`Index.lock`, which is held for look-ups, renames and removals of small files, never
for reading, writing or hashing data.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import CacheError
from .eviction import Ranking
from .layout import Place, data_name
from .quota import Ledger

if TYPE_CHECKING:
    from .entry import Entry


@dataclass(slots=True, eq=False)
class Slot:
    """One entry's files, or one file to be removed.

    ``file`` is the data file's name in ``place``, ``meta_place`` where the sidecar is, ``charge`` the bytes it is
    accounted for, of which ``attached`` has its attachments' part, by name, oldest first. ``leases`` are readers'
    rights, ``pins`` operations under way in this process; with either it is not evicted. ``last_use`` and ``stamped``
    (what the disk knows of it) in seconds since the epoch.
    """

    name: str
    place: Place
    file: str
    meta_place: Place
    charge: int
    last_use: float
    stamped: float
    leases: int = 0
    pins: int = 0
    dropping: bool = False
    entry: Entry | None = None
    attached: dict[str, int] = field(default_factory=dict)

    @property
    def in_use(self) -> bool:
        return self.leases > 0 or self.pins > 0

    @property
    def published(self) -> bool:
        return self.place is Place.ENTRIES and self.meta_place is Place.ENTRIES


def live_slot(name: str, place: Place, meta_place: Place, charge: int, last_use: float) -> Slot:
    return Slot(name, place, data_name(name), meta_place, charge, last_use, stamped=last_use)


def dead_slot(name: str, place: Place, file: str, charge: int) -> Slot:
    """A slot for a leftover file."""
    return Slot(name, place, file, place, charge, 0.0, 0.0)


class Index:
    """The slots by name (``live``, in order of last use) and those on their way out (``dying``, by file name)."""

    def __init__(self, ledger: Ledger) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.ledger = ledger
        self.live: OrderedDict[str, Slot] = OrderedDict()
        self.dying: dict[tuple[Place, str], Slot] = {}
        self.creating: set[str] = set()
        self.closed = False
        self.ranking: Ranking | None = None

    def require_open(self) -> None:
        if self.closed:
            raise CacheError("the flash store is closed")

    def is_live(self, slot: Slot) -> bool:
        return self.live.get(slot.name) is slot

    def busy(self, slots: list[Slot]) -> bool:
        """Whether an operation is under way, on one of ``slots`` or to make a new one."""
        return bool(self.creating) or any(slot.pins or slot.dropping for slot in slots)

    def rank_by(self, ranking: Ranking) -> None:
        """From now on ``ranking`` says what goes first."""
        with self.lock:
            ranking.begin({name: slot.charge for name, slot in self.live.items()}, self.ledger.quota)
            self.ranking = ranking

    def add(self, slot: Slot) -> None:
        self.live[slot.name] = slot
        if self.ranking is not None:
            self.ranking.added(slot.name, slot.charge)

    def add_dying(self, slot: Slot) -> None:
        """The slot is no longer visible; its file is removed once nobody holds it."""
        if self.is_live(slot):
            self._remove(slot)
        self.dying[slot.place, slot.file] = slot

    def touch(self, slot: Slot, now: float, *, opened: bool) -> None:
        slot.last_use = now
        self.live.move_to_end(slot.name)
        if opened and self.ranking is not None:
            self.ranking.used(slot.name)

    def attach(self, slot: Slot, name: str, charge: int) -> None:
        """An attachment is there. The ledger has its space already, or gets it from the caller."""
        slot.attached[name] = charge
        slot.charge += charge

    def forget(self, slot: Slot) -> None:
        """The slot's files are gone: credit its space."""
        self.dying.pop((slot.place, slot.file), None)
        self.ledger.credit(slot.charge)
        slot.charge = 0
        self.changed.notify_all()

    def block(self, slot: Slot) -> None:
        """The slot's files turned out not to be ours: leave them alone, but count their space."""
        if self.is_live(slot):
            self._remove(slot)
            self.ledger.ignore(slot.charge)

    def pin(self, slot: Slot) -> None:
        """Keep a slot's files for one operation. Raises :class:`CacheError` if it was evicted meanwhile."""
        with self.lock:
            self.require_open()
            if not self.is_live(slot) and not slot.leases:
                raise evicted(slot)
            slot.pins += 1

    def _remove(self, slot: Slot) -> None:
        del self.live[slot.name]
        if self.ranking is not None:
            self.ranking.removed(slot.name)


def evicted(slot: Slot) -> CacheError:
    return CacheError("this cache entry is gone", url=slot.file, hint="look it up again, and lease it while using it")
