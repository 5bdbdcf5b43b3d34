"""What a pass tells the node's cache: which shards this epoch and the next one need when, and how far reading is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from .passes import Prefetch

if TYPE_CHECKING:
    from cachefs.client import Client

    from .manifest import Manifest
    from .order import EpochOrder
    from .permute import Int64s

_NEVER: Final = 2**62
_MANY: Final = 5000
"""Shards that it takes a moment to tell of."""


class PlanNames:
    """Names for the plans of one data set in this process: passes that follow one another use the same one, so that
    each takes the place of the one before it, and nothing that it needs is given up in between."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def take(self) -> int:
        number = min(set(range(len(self._taken) + 1)) - self._taken)
        self._taken.add(number)
        return number

    def give_back(self, number: int) -> None:
        self._taken.discard(number)

    def of(self, number: int) -> str:
        return f"{id(self):x}/{number}"

    def __reduce__(self) -> tuple[object, ...]:
        return PlanNames, ()


class PlanAhead:
    """Declares a plan to the client's daemon and goes by it; asks for a window ahead where the daemon takes none.

    ``after`` gives the next epoch's order. ``lanes``: those of the node, if it is not to have all. The daemon is told
    of the position before the last one reached, whose samples may still be on their way.
    """

    def __init__(
        self,
        client: Client,
        manifest: Manifest,
        order: EpochOrder,
        position: int,
        *,
        after: Callable[[], EpochOrder],
        names: PlanNames,
        ahead: int,
        lanes: Int64s | None = None,
    ) -> None:
        self._client = client
        self._manifest = manifest
        self._order = order
        self._after = after
        self._names = names
        self._number = names.take()
        self._ahead = ahead
        self._lanes = lanes
        self._behind = position
        self._edges = np.zeros(0, dtype=np.int64)
        self._next = -1
        self._declared = False
        self._closed = False
        self._asking: Prefetch | None = None

    def reach(self, position: int) -> None:
        """Reading has come to ``position``."""
        at, self._behind = self._behind, position
        if self._asking is None and at >= self._next and not self._tell(at):
            self._asking = Prefetch(self._client, self._manifest, self._order, at, ahead=self._ahead, lanes=self._lanes)
        if self._asking is not None:
            self._asking.reach(position)

    def close(self) -> None:
        """The plan rests until the next pass's takes its place, or the client's end. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._declared:
                self._client.pause(self._names.of(self._number))
            self._names.give_back(self._number)

    def _tell(self, position: int) -> bool:
        """False if the daemon takes no plan."""
        if not (self._declared and self._client.progress(self._names.of(self._number), position)):
            self._declared = self._declare(position)
        passed = int(np.searchsorted(self._edges, position, side="right"))
        self._next = int(self._edges[passed]) if passed < len(self._edges) else _NEVER
        return self._declared

    def _declare(self, position: int) -> bool:
        now, then = self._order.uses_from(position, self._lanes), self._after().uses_from(0, self._lanes)
        first = np.concatenate((now.first, then.first + self._order.total))
        last = np.concatenate((now.last, then.last + self._order.total))
        shards, numbers = np.unique(np.concatenate((now.shard, then.shard)), return_inverse=True)
        self._edges = np.unique(np.concatenate((first, last + 1)))  # between them nothing changes
        if len(shards) > _MANY:  # what comes first comes while the rest is told
            soon = now.shard[: self._ahead].tolist()
            self._client.prefetch([self._manifest.stat(shard) for shard in soon])
        objects = [self._manifest.stat(shard) for shard in shards.tolist()]
        uses = list(zip(numbers.tolist(), first.tolist(), last.tolist(), strict=True))
        return self._client.plan(self._names.of(self._number), objects, uses, position=position)
