"""What a pass tells the node's cache: which shards this epoch and the next one need when, and how far reading is."""

from __future__ import annotations

import itertools
import logging
import secrets
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from cachefs.errors import DaemonUnavailable, NearflashError

from .passes import Prefetch

if TYPE_CHECKING:
    from cachefs.client import Client
    from cachefs.shard import ObjectStat

    from .manifest import Manifest
    from .order import EpochOrder
    from .permute import Int64s

_NEVER: Final = 2**62
_MANY: Final = 5000
"""Shards that it takes a moment to tell of."""

log = logging.getLogger("loader")


class PlanNames:
    """Names for the plans of one data set in this process: passes that follow one another use the same one, so that
    each takes the place of the one before it, and nothing that it needs is given up in between.

    Threads may share it, and no method waits for a lock: finalizers of passes come here. When the data set is gone
    its plans are over.
    """

    def __init__(self) -> None:
        self._of = secrets.token_hex(8)
        self._taken: dict[int, object] = {}
        self._declared: dict[str, Client] = {}
        self._warned: dict[str, object] = {}
        weakref.finalize(self, _withdraw, self._declared).atexit = False  # then they are over with the process

    def take(self) -> int:
        mine = object()
        return next(number for number in itertools.count() if self._taken.setdefault(number, mine) is mine)

    def give_back(self, number: int) -> None:
        self._taken.pop(number, None)

    def of(self, number: int) -> str:
        return f"{self._of}/{number}"

    def declared(self, name: str, client: Client) -> None:
        """The client's daemon may hold a plan of this name."""
        self._declared[name] = client

    def first_warning(self, kind: str) -> bool:
        """True the first time that there is this kind of trouble."""
        mine = object()
        return self._warned.setdefault(kind, mine) is mine

    def __reduce__(self) -> tuple[object, ...]:
        return PlanNames, ()


def _withdraw(declared: dict[str, Client]) -> None:
    for name, client in declared.items():
        client.withdraw(name)


class Needs(NamedTuple):
    """What a pass needs: objects, ``(number in objects, first position, last position)`` of each use, and the positions
    between which that does not change."""

    objects: list[ObjectStat]
    uses: list[tuple[int, int, int]]
    edges: Int64s


class Asks(Protocol):
    """Asks the client for what comes next."""

    def reach(self, position: int) -> None: ...


class Following(ABC):
    """A pass as its daemon sees it: a plan that is declared and gone by, or, where the daemon takes none, what comes
    next is asked for.

    The daemon is told of the position before the last one reached, whose samples may still be on their way. It only
    ever helps: what fails here is a warning, and reading goes on.
    """

    def __init__(self, client: Client, names: PlanNames, position: int) -> None:
        self._client = client
        self._names = names
        self._number = names.take()
        self._began = position
        self._behind = position
        self._edges = np.zeros(0, dtype=np.int64)
        self._next = -1
        self._declared = False
        self._closed = False
        self._asking: Asks | None = None
        self._given_up = False

    @abstractmethod
    def _needs(self, began: int, position: int) -> Needs:
        """What the pass needs from its beginning on, however late this is asked: then it is the same in all processes
        that began there, and they share one plan at a daemon that was started anew, too. ``position``: the present."""

    @abstractmethod
    def _ask(self, position: int) -> Asks:
        """What asks for a window ahead from ``position`` on."""

    def reach(self, position: int) -> None:
        """Reading has come to ``position``."""
        at, self._behind = self._behind, position
        if self._asking is None and at >= self._next and not self._planned(at):
            self._asking = self._ask(at)
        if self._asking is not None and not self._given_up:
            try:
                self._asking.reach(position)
            except NearflashError as e:
                self._given_up = True
                self._warn(e)

    def close(self) -> None:
        """The plan rests until the next pass's takes its place, or the end of the data set or the client. Idempotent;
        for finalizers, too."""
        if not self._closed:
            self._closed = True
            if self._declared:
                self._client.pause(self._names.of(self._number))
            self._names.give_back(self._number)

    def _planned(self, position: int) -> bool:
        """False if there is no plan to go by."""
        try:
            return self._tell(position)
        except DaemonUnavailable as e:  # whoever opens a shard is told as well; else another daemon is told soon
            self._declared = False
            self._next = self._edge(position)
            self._warn(e)
            return True
        except NearflashError as e:
            self._warn(e)
            return False

    def _tell(self, position: int) -> bool:
        """False if the daemon takes no plan."""
        name = self._names.of(self._number)
        if self._declared and self._client.progress(name, position):
            self._next = self._edge(position)
            return True
        needs = self._needs(self._began, position)
        self._edges = needs.edges
        self._names.declared(name, self._client)
        self._declared = self._client.plan(name, needs.objects, needs.uses, position=position)
        # It is told once more with the next batch: that the former pass of this name rests may have been told by
        # another thread, over another connection, which the daemon read later.
        self._next = position
        return self._declared

    def _edge(self, position: int) -> int:
        """Where something else is needed than at ``position``."""
        passed = int(np.searchsorted(self._edges, position, side="right"))
        return int(self._edges[passed]) if passed < len(self._edges) else _NEVER

    def _warn(self, error: NearflashError) -> None:
        if self._names.first_warning(type(error).__name__):
            log.warning("the cache was not told what will be read, which may be slower for that: %s", error)


class PlanAhead(Following):
    """Declares a plan to the client's daemon and goes by it; asks for a window ahead where the daemon takes none.

    ``after`` gives the next epoch's order. ``lanes``: those of the node, if it is not to have all.
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
        super().__init__(client, names, position)
        self._manifest = manifest
        self._order = order
        self._after = after
        self._ahead = ahead
        self._lanes = lanes

    def _ask(self, position: int) -> Prefetch:
        return Prefetch(self._client, self._manifest, self._order, position, ahead=self._ahead, lanes=self._lanes)

    def _needs(self, began: int, position: int) -> Needs:
        now, then = self._order.uses_from(began, self._lanes), self._after().uses_from(0, self._lanes)
        first = np.concatenate((now.first, then.first + self._order.total))
        last = np.concatenate((now.last, then.last + self._order.total))
        shards, numbers = np.unique(np.concatenate((now.shard, then.shard)), return_inverse=True)
        if len(shards) > _MANY:  # what comes first comes while the rest is told
            soon = now.shard[now.last >= position][: self._ahead].tolist()
            self._client.prefetch([self._manifest.stat(shard) for shard in soon])
        objects = [self._manifest.stat(shard) for shard in shards.tolist()]
        uses = list(zip(numbers.tolist(), first.tolist(), last.tolist(), strict=True))
        return Needs(objects, uses, np.unique(np.concatenate((first, last + 1))))
