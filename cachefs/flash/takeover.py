"""Taking over a directory from its last owner, however that one ended."""

from __future__ import annotations

from . import recovery
from .index import Slot, dead_slot, live_slot
from .layout import Place, parse_attached
from .lifecycle import Lifecycle
from .parts import Parts
from .quota import most_bytes
from .space import Space

_DEFAULT_SHARE = 0.8
"""The part of the disk's free space (own entries included) that is the quota where none is set."""


def take_over(parts: Parts, space: Space, lifecycle: Lifecycle, quota: int | None) -> None:
    """Fill the index with what is there, clear leftovers away, finish what was begun, and evict what is beyond the
    quota. Reads no data file. Before anybody else uses the store."""
    listing, foreign_bytes = recovery.list_tree(parts.layout, parts.ops)
    verdict = recovery.decide(listing)
    space.next_serial = recovery.next_serial(listing)
    index = parts.index
    index.ledger.charge(foreign_bytes)
    index.ledger.ignore(foreign_bytes)
    for kept in verdict.kept:
        slot = _slot_of(kept, parts)
        index.ledger.charge(slot.charge)
        index.add(slot)
    for left in verdict.leftovers:
        index.ledger.charge(left.file.disk_bytes)
        index.add_dying(dead_slot(left.name, left.place, left.file.name, left.file.disk_bytes))
    space.locked_weigh_directories()
    if quota is None:
        quota = int((index.ledger.used + parts.ops.free_bytes(parts.layout.tree_fd)) * _DEFAULT_SHARE)
    index.ledger.quota = quota
    parts.metrics.set("flash_quota_bytes", quota)
    space.drop_dying()
    for kept in verdict.kept:
        if kept.place is not kept.meta_place and parts.health.fault is None:
            lifecycle.publish(index.live[kept.name])
    if parts.health.fault is None:
        space.shrink()


def _slot_of(kept: recovery.Kept, parts: Parts) -> Slot:
    charge = kept.data.disk_bytes + kept.meta.disk_bytes
    if kept.place is Place.FILLING:
        # A table of 8 bytes per chunk: no more chunks than that.
        most = most_bytes(kept.data.size, kept.meta.size, kept.meta.size // 8, parts.layout.block_bytes)
        charge = max(charge, most)
    slot = live_slot(kept.name, kept.place, kept.meta_place, charge, kept.meta.mtime)
    for file in kept.attached:
        parsed = parse_attached(file.name)
        if parsed is not None and parsed[1] is not None:
            parts.index.attach(slot, parsed[1], file.disk_bytes)
    return slot
