"""What a listing says about an entry."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import CacheError
from .entry import Entry
from .index import Slot


@dataclass(frozen=True)
class EntryInfo:
    """One entry in a listing. ``disk_bytes`` is what it is accounted for, ``cached_bytes`` what of ``size`` is on disk;
    ``state`` is ``"filling"`` or ``"published"``; ``last_use`` in seconds since the epoch."""

    name: str
    endpoint: str
    url: str
    version: str
    size: int
    disk_bytes: int
    cached_bytes: int
    state: str
    leases: int
    last_use: float


def describe(slot: Slot, entry: Entry) -> EntryInfo | None:
    """The entry's line; None if it was evicted meanwhile."""
    try:
        cached = entry.size if slot.published else entry.cached_bytes()
    except CacheError:
        if entry.superseded:
            return None
        raise
    return EntryInfo(
        name=slot.name,
        endpoint=entry.key.endpoint,
        url=entry.key.url,
        version=entry.key.version,
        size=entry.size,
        disk_bytes=slot.charge,
        cached_bytes=cached,
        state="published" if slot.published else "filling",
        leases=slot.leases,
        last_use=slot.last_use,
    )
