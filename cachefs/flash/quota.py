"""Space accounting in real blocks: what entries take, what may be taken, and what a new one will take at most."""

from __future__ import annotations

from dataclasses import dataclass

_EXTENTS_PER_BLOCK = 128
"""Fewer extent records than any known file system keeps in one metadata block."""
_DIRECTORY_BLOCKS = 4
"""What one new name can add to the directories it passes through (a leaf and its index, twice)."""
HEADROOM_BLOCKS = 8
"""Kept free under the quota for directories that grow when entries are moved out."""


@dataclass(frozen=True)
class Usage:
    """The store's space in bytes: ``used`` of ``quota`` (everything below the store's tree that counts: entries,
    sidecars, directories, reservations, and ``dying`` files that somebody still holds), ``free`` what the quota and the
    disk still allow, and the number of entries."""

    quota: int
    used: int
    free: int
    dying: int
    entries: int


def round_up(size: int, block: int) -> int:
    """``size`` in whole blocks."""
    return -(-size // block) * block


def extent_bytes(n_chunks: int, block: int) -> int:
    """What the metadata of a preallocated file can grow by while its chunks are written in the worst order and the
    system flushes them as it likes: each chunk splits an extent in two."""
    return 2 * n_chunks // _EXTENTS_PER_BLOCK * block


def most_bytes(size: int, sidecar: int, n_chunks: int, block: int) -> int:
    """The most disk space that an entry of ``size`` bytes can take while it is filled, and its names in directories."""
    return least_bytes(size, sidecar, block) + extent_bytes(n_chunks, block) + (3 + _DIRECTORY_BLOCKS) * block


def attached_bytes(size: int, block: int) -> int:
    """The most disk space that an attachment's file of ``size`` bytes can take, and its names in a directory."""
    return round_up(size, block) + _DIRECTORY_BLOCKS * block


def least_bytes(size: int, sidecar: int, block: int) -> int:
    """The disk space that an entry of ``size`` bytes takes at least."""
    return round_up(size, block) + round_up(sidecar, block)


def shortfall(need: int, *, used: int, quota: int, available: int, pending: int, floor: int) -> int:
    """How many bytes must come free before ``need`` more may be taken; 0 or less if they may now.

    ``available`` is the disk's own free space, of which ``pending`` is promised to entries that have not allocated
    theirs yet and ``floor`` is to stay free.
    """
    return max(used + need - quota, need + pending + floor - available)


class Ledger:
    """The running account of one store. Not thread-safe: the index's lock guards it.

    ``used`` counts a reservation from the moment it is made; ``pending`` is the part of it not yet allocated on disk.
    ``ignored`` are files in our directories that are not ours to remove; ``reserved`` is what the store's owner may
    write beside it.
    """

    def __init__(self, quota: int, floor: int, headroom: int, reserved: int = 0) -> None:
        self.quota = quota
        self.floor = floor
        self.headroom = headroom
        self.reserved = reserved
        self.entries = 0
        self.directories = 0
        self.ignored = 0
        self.pending = 0

    @property
    def used(self) -> int:
        return self.entries + self.directories + self.ignored + self.reserved

    def short_of(self, need: int, available: int) -> int:
        """How many bytes are lacking for ``need`` more, the disk having ``available``; see :func:`shortfall`."""
        return shortfall(
            need + self.headroom,
            used=self.used,
            quota=self.quota,
            available=available,
            pending=self.pending,
            floor=self.floor,
        )

    def never_fits(self, need: int) -> bool:
        """Whether ``need`` bytes exceed the quota even with no entry left."""
        return need + self.headroom + self.directories + self.ignored + self.reserved > self.quota

    def reserve(self, need: int) -> None:
        self.entries += need
        self.pending += need

    def allocated(self, need: int) -> None:
        """A reservation's space is now taken on disk (or given up: then :meth:`credit` follows)."""
        self.pending -= need

    def charge(self, size: int) -> None:
        self.entries += size

    def credit(self, size: int) -> None:
        self.entries -= size

    def ignore(self, size: int) -> None:
        self.entries -= size
        self.ignored += size
