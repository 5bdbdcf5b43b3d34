"""What the store holds, in memory: one slot per entry, least recently used first, and the account of their space.

Everything here is guarded by :attr:`Index.lock`, which is held for look-ups and renames, never for reading, writing or
hashing data.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CacheError
from .layout import Place, data_name
from .quota import Ledger

if TYPE_CHECKING:
    from .entry import Entry


@dataclass(slots=True, eq=False)
class Slot:
    """One entry's files. ``file`` is the data file's name in ``place``; ``charge`` the bytes it is accounted for.

    ``leases`` are readers' rights, ``pins`` operations under way in this process; with either it is not evicted.
    """

    name: str
    place: Place
    file: str
    charge: int
    last_use: float
    stamped: float = 0.0
    leases: int = 0
    pins: int = 0
    dropping: bool = False
    entry: Entry | None = None

    @property
    def in_use(self) -> bool:
        return self.leases > 0 or self.pins > 0


class Index:
    """The slots by name (``live``, in order of last use) and those on their way out (``dying``)."""

    def __init__(self, ledger: Ledger) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.ledger = ledger
        self.live: OrderedDict[str, Slot] = OrderedDict()
        self.dying: dict[str, Slot] = {}
        self.creating: set[str] = set()
        self.blocked: set[str] = set()
        """Names whose files on disk are of an unknown format: neither used nor overwritten."""
        self.closed = False

    def add(self, slot: Slot) -> None:
        self.live[slot.name] = slot

    def touch(self, slot: Slot, now: float) -> None:
        slot.last_use = now
        self.live.move_to_end(slot.name)

    def bury(self, slot: Slot) -> None:
        """Move a slot from live to dying; its file may be renamed before or after."""
        if self.live.get(slot.name) is slot:
            del self.live[slot.name]
        self.dying[slot.file] = slot

    def forget(self, slot: Slot) -> None:
        """The slot's files are gone: credit its space."""
        if self.live.get(slot.name) is slot:
            del self.live[slot.name]
        self.dying.pop(slot.file, None)
        self.ledger.credit(slot.charge)
        slot.charge = 0
        self.changed.notify_all()

    def require_open(self) -> None:
        if self.closed:
            raise CacheError("the flash store is closed")

    def is_live(self, slot: Slot) -> bool:
        return self.live.get(slot.name) is slot

    def pin(self, slot: Slot) -> None:
        """Keep a slot's files for one operation. Raises :class:`CacheError` if it was evicted meanwhile."""
        with self.lock:
            self.require_open()
            if not self.is_live(slot) and not slot.leases:
                raise evicted(slot)
            slot.pins += 1

    def dying_bytes(self) -> int:
        return sum(slot.charge for slot in self.dying.values())


def evicted(slot: Slot) -> CacheError:
    return CacheError(
        "the cache entry was evicted", url=slot.file, hint="hold a lease while using it, or look it up again"
    )


def live_slot(name: str, place: Place, charge: int, last_use: float) -> Slot:
    return Slot(name, place, data_name(name), charge, last_use, stamped=last_use)
