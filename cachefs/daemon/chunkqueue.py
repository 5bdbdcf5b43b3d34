"""Which chunk to fetch next from one bucket: a pure decision.

Chunks that a reader waits for come first, in the order in which they were asked for; then those of opened objects,
object by object in file order; then those of objects asked for ahead of time.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable
from typing import Generic, TypeVar


class Tier(enum.IntEnum):
    """How urgent an owner's chunks are while nobody waits for them."""

    OPENED = 0
    AHEAD = 1


Owner = TypeVar("Owner")


class ChunkQueue(Generic[Owner]):
    """Chunks to do, by owner. Every chunk added is taken exactly once, unless its owner is dropped first."""

    def __init__(self) -> None:
        self._todo: dict[Owner, OrderedDict[int, None]] = {}
        self._demanded: OrderedDict[tuple[Owner, int], None] = OrderedDict()
        self._tiers: dict[Tier, OrderedDict[Owner, None]] = {tier: OrderedDict() for tier in Tier}

    def __len__(self) -> int:
        """Chunks not yet taken."""
        return sum(map(len, self._todo.values()))

    def add(self, owner: Owner, chunks: Iterable[int], tier: Tier) -> None:
        """Chunks to do when nothing more urgent is left, in the order given; an owner's later chunks come last."""
        todo = self._todo.setdefault(owner, OrderedDict())
        todo.update(dict.fromkeys(chunks))
        if not todo:
            del self._todo[owner]
        elif not any(owner in owners for owners in self._tiers.values()):
            self._tiers[tier][owner] = None

    def promote(self, owner: Owner) -> None:
        """Somebody opened what was asked for ahead of time."""
        if owner in self._tiers[Tier.AHEAD]:
            del self._tiers[Tier.AHEAD][owner]
            self._tiers[Tier.OPENED][owner] = None

    def demand(self, owner: Owner, chunks: Iterable[int]) -> None:
        """A reader waits for these; those that are not queued (taken already, never added) are left alone."""
        todo = self._todo.get(owner)
        if todo:
            self._demanded.update(((owner, chunk), None) for chunk in chunks if chunk in todo)

    def peek(self) -> tuple[Owner, int] | None:
        """What :meth:`take` would give."""
        for item in self._demanded:
            return item
        for owners in self._tiers.values():
            for owner in owners:
                return owner, next(iter(self._todo[owner]))
        return None

    def take(self) -> tuple[Owner, int] | None:
        """The most urgent chunk, removed from the queue."""
        item = self.peek()
        if item is not None:
            owner, chunk = item
            self._demanded.pop(item, None)
            todo = self._todo[owner]
            del todo[chunk]
            if not todo:
                self._forget(owner)
        return item

    def drop(self, owner: Owner) -> None:
        """Forget all chunks of an owner."""
        for chunk in self._todo.get(owner, ()):
            self._demanded.pop((owner, chunk), None)
        self._forget(owner)

    def _forget(self, owner: Owner) -> None:
        self._todo.pop(owner, None)
        for owners in self._tiers.values():
            owners.pop(owner, None)
