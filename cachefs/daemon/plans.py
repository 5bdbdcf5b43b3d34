"""Plans as clients declare them: assembled from pieces, shared by the processes of a job, dropped with their clients.

A plan is followed once, however many processes read it (the workers of a loader, the ranks of a node): its position is
that of the one that is furthest behind. The scheduler is told by two sides, clients through the event loop and the
flash store from its threads, so it is guarded by a lock, which nobody holds while waiting for anything.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from .. import protocol
from ..clock import Clock
from ..errors import ConfigError
from ..flash import EntryKey
from ..objstore.url import parse_url
from ..schedule import Incoming, Plan, S3Fifo, Scheduler, Wanted
from .origins import Access

MOST_BYTES = 512 << 20
"""Memory for all plans together, as estimated; more is refused."""
_OBJECT_BYTES = 500
_USE_BYTES = 200
_MOST_NAMES = 64
"""Plans of one session."""
_AHEAD = 8
_MOST_AHEAD = 16 << 30
"""Bytes to bring in ahead of need: this part of the quota, and no more than that."""

Who = tuple[str, str]
"""A session and the name that it gave its plan."""
Key = tuple[str, str, str]
"""Whose origin, job, digest: what plans must have in common to be one."""


@dataclass
class _Upload:
    """A plan of which not all pieces are there."""

    owner: Who
    count: int = 0
    names: list[str] = field(default_factory=list)
    items: list[protocol.Item] = field(default_factory=list)
    uses: list[tuple[int, int, int]] = field(default_factory=list)
    memory: int = 0


@dataclass(frozen=True)
class _Followed:
    plan: Plan
    items: list[protocol.Item]
    access: Access
    share: float
    memory: int


class Plans:
    """All plans of a daemon; the :class:`~cachefs.flash.eviction.Ranking` of its store.

    ``fifo``: without any plan S3-FIFO decides what goes first, otherwise the time of the last use.
    """

    def __init__(self, clock: Clock, *, fifo: bool = True, most_bytes: int = MOST_BYTES) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._scheduler = Scheduler(0)
        self._fifo = S3Fifo() if fifo else None
        self._followed: dict[Key, _Followed] = {}
        self._uploads: dict[Key, _Upload] = {}
        self._readers: dict[Key, dict[Who, int]] = {}
        self._paused: set[Who] = set()
        self._declared: dict[Who, Key] = {}

    # --- what clients say -------------------------------------------------------------------------------------------

    async def declare(self, session: str, access: Access, piece: protocol.Plan) -> protocol.Planned:
        """Take a piece of a plan. Raises :class:`ConfigError` for one that makes no sense."""
        who = session, piece.name
        if not piece.digest:
            self._leave(who)
            return protocol.Planned("known")
        _check(piece)
        key = access.identity, piece.job, piece.digest
        if not piece.start and not piece.objects and not piece.uses and not piece.last:
            return protocol.Planned(self._offered(who, key, piece))
        upload = self._uploads.get(key)
        if upload is None or upload.owner != who or upload.count != piece.start:
            self._drop_upload(key, who)
            return protocol.Planned("lost")
        memory = sum(_OBJECT_BYTES + len(item.url) for item in piece.objects) + _USE_BYTES * len(piece.uses)
        if self._memory() + memory > self._most_bytes:
            self._leave(who)
            return protocol.Planned("refused")
        names = [_name(item, access) for item in piece.objects]
        upload.memory += memory
        upload.names += names
        upload.items += piece.objects
        upload.uses += piece.uses
        upload.count += len(piece.objects) + len(piece.uses)
        if not piece.last:
            return protocol.Planned("more")
        try:
            plan = await asyncio.to_thread(_assembled, upload)
        except ConfigError:
            self._leave(who)
            raise
        if self._uploads.get(key) is upload:
            del self._uploads[key]
            followed = self._followed[key] = _Followed(plan, upload.items, access, piece.share, upload.memory)
            await asyncio.to_thread(self._follow, key, followed, self._position(key))
            if self._followed.get(key) is followed:
                self._move(key)
            else:  # all readers left meanwhile
                self._withdraw(key)
        return protocol.Planned("known")

    def progress(self, session: str, request: protocol.Progress) -> protocol.Planned:
        """A reader has come on."""
        who = session, request.name
        key = self._declared.get(who)
        if key is None or not (key in self._followed or key in self._uploads):
            return protocol.Planned("lost")
        readers = self._readers[key]
        readers[who] = max(readers[who], request.position)
        self._paused.discard(who)
        self._move(key)
        return protocol.Planned("known")

    def pause(self, session: str, names: list[str]) -> None:
        """Readers rest. A plan does when all of its readers do."""
        for name in names:
            who = session, name
            key = self._declared.get(who)
            if key is not None:
                self._paused.add(who)
                self._move(key)

    def leave(self, session: str) -> None:
        """A client is gone, and its plans with it."""
        for who in [who for who in self._declared if who[0] == session]:
            self._leave(who)

    # --- what to bring in -------------------------------------------------------------------------------------------

    def next_wanted(self) -> tuple[Wanted, protocol.Item, Access] | None:
        """The object to bring in next, and whose access to the origin brings it."""
        with self._lock:
            wanted = self._scheduler.next_wanted()
        followed = None if wanted is None else self._followed.get(cast(Key, wanted.key))
        if wanted is None or followed is None:
            return None
        return wanted, followed.items[wanted.number], followed.access

    def defer(self, wanted: Wanted) -> None:
        """There was no room for it."""
        with self._lock:
            self._scheduler.defer(wanted)

    @property
    def wants(self) -> bool:
        """Whether there is something to bring in."""
        with self._lock:
            return self._scheduler.wants

    @property
    def any(self) -> bool:
        return bool(self._followed)

    def stats(self) -> dict[str, float | int | str | None]:
        """What is followed, and how far it has come."""
        with self._lock:
            held = self._scheduler.held_bytes()
            lines = [
                f"{key[1]}: {self._scheduler.position(key)} of {followed.plan.end}{self._resting(key)}"
                for key, followed in self._followed.items()
                if self._scheduler.follows(key)
            ]
        return {
            "plans": len(self._followed),
            "plan_jobs": len(held),
            "plan_objects": sum(len(followed.items) for followed in self._followed.values()),
            "plan_held_bytes": sum(held.values()),
            "plan_progress": "; ".join(lines),
        }

    # --- what the store says, in its threads ------------------------------------------------------------------------

    def begin(self, sizes: Mapping[str, int], quota: int) -> None:
        with self._lock:
            self._scheduler.budget = min(quota // _AHEAD, _MOST_AHEAD)
            self._scheduler.begin(sizes)
        if self._fifo is not None:
            self._fifo.begin(sizes)

    def added(self, name: str, size: int) -> None:
        with self._lock:
            self._scheduler.added(name)
        if self._fifo is not None:
            self._fifo.added(name, size)

    def used(self, name: str) -> None:
        with self._lock:
            self._scheduler.used(name)
        if self._fifo is not None:
            self._fifo.used(name)

    def removed(self, name: str) -> None:
        with self._lock:
            self._scheduler.removed(name)
        if self._fifo is not None:
            self._fifo.removed(name)

    def order(self, incoming: Incoming | None) -> Generator[str, None, None] | None:
        with self._lock:
            if self._scheduler.planned:
                return _each(self._scheduler.victims(incoming))
        return None if self._fifo is None else self._fifo.order()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _offered(self, who: Who, key: Key, piece: protocol.Plan) -> str:
        if self._declared.get(who) != key:
            self._leave(who)
            if sum(other[0] == who[0] for other in self._declared) >= _MOST_NAMES:
                return "refused"
        self._declared[who] = key
        self._paused.discard(who)
        self._readers.setdefault(key, {})[who] = piece.position
        followed = self._followed.get(key)
        if followed is not None:
            self._move(key)
            return "known"
        upload = self._uploads.get(key)
        if upload is not None and upload.owner != who:
            return "known"  # somebody is sending it
        self._uploads[key] = _Upload(who)
        return "more"

    def _leave(self, who: Who) -> None:
        key = self._declared.pop(who, None)
        if key is None:
            return
        self._drop_upload(key, who)
        self._paused.discard(who)
        readers = self._readers[key]
        del readers[who]
        if readers:
            self._move(key)
            return
        del self._readers[key]
        if self._followed.pop(key, None) is not None:
            self._withdraw(key)

    def _drop_upload(self, key: Key, who: Who) -> None:
        upload = self._uploads.get(key)
        if upload is not None and upload.owner == who:
            del self._uploads[key]

    def _follow(self, key: Key, followed: _Followed, position: int) -> None:
        with self._lock:
            self._scheduler.declare(key, followed.plan, job=key[1], share=followed.share, position=position)

    def _withdraw(self, key: Key) -> None:
        with self._lock:
            self._scheduler.withdraw(key)

    def _position(self, key: Key) -> int:
        """That of the reader that is furthest behind, of those that read."""
        readers = self._readers[key]
        return min((at for who, at in readers.items() if who not in self._paused), default=max(readers.values()))

    def _move(self, key: Key) -> None:
        position, followed = self._position(key), self._followed.get(key)
        paused = self._paused.issuperset(self._readers[key])
        with self._lock:
            if followed is None or not self._scheduler.follows(key):
                return  # it is being made, and asks for the position itself
            if position >= self._scheduler.position(key):
                self._scheduler.progress(key, position, None if paused else self._clock.monotonic())
                self._scheduler.pause(key, paused=paused)
                return
        self._follow(key, followed, position)  # a reader joined that begins earlier

    def _resting(self, key: Key) -> str:
        return ", paused" if self._paused.issuperset(self._readers.get(key, ())) else ""

    def _memory(self) -> int:
        followed, uploads = self._followed.values(), self._uploads.values()
        return sum(plan.memory for plan in followed) + sum(upload.memory for upload in uploads)


def _each(names: Iterator[str]) -> Generator[str, None, None]:
    yield from names


def _check(piece: protocol.Plan) -> None:
    if not 0 < piece.share < float("inf"):
        raise ConfigError(f"a share of {piece.share} is none", hint="a positive number; jobs get their part of the sum")
    for item in piece.objects:
        if item.version is None or item.size is None:
            raise ConfigError("a plan needs versions and sizes", url=item.url, hint="list the objects")


def _name(item: protocol.Item, access: Access) -> str:
    assert item.version is not None, "checked before"
    return EntryKey(access.endpoint, str(parse_url(item.url)), item.version).name


def _assembled(upload: _Upload) -> Plan:
    """Made in a thread, with all that is derived from it."""
    plan = Plan.of(upload.names, [item.size or 0 for item in upload.items], upload.uses)
    _ = plan.following, plan.by_last, plan.bytes_before, plan.numbers
    return plan
