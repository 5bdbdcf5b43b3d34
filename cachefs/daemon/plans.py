"""Plans as clients declare them: assembled from pieces, shared by the processes of a job, dropped with their clients.

A plan is followed once, however many processes read it (the workers of a loader, the ranks of a node): its position is
that of the one that is furthest behind, of those that still come on. The plan that takes the place of another one of
its name does so once it is followed; until then the former one stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from .. import protocol
from ..clock import Clock
from ..errors import ConfigError
from ..flash import EntryKey
from ..objstore.url import parse_url
from ..schedule import MOST_POSITION, Plan
from .following import Followed, Following, Key, Work
from .origins import Access

MOST_BYTES = 512 << 20
"""Memory for all plans together, as estimated; more is refused."""
PATIENCE = 10.0
"""Seconds without a piece after which somebody else may send a plan."""
SILENCE = 300.0
"""Seconds without a word, while others of the same plan speak, after which a reader holds up the plan no more."""
_OBJECT_BYTES = 500
_USE_BYTES = 200
_MOST_NAMES = 64
"""Plans of one session."""
_MOST_TEXT = 256
"""Characters of a plan's name, job and digest."""
_MOST_VERSION = 1024
_MOST_USES = 10_000
"""Uses in one piece."""
_MOST_SHOWN = 16
"""Plans whose progress is shown."""

Who = tuple[str, str]
"""A session and the name that it gave its plan."""


@dataclass(eq=False)
class _Upload:
    """A plan of which not all pieces are there. ``touched``: when the latest one came; ``inf`` once all are there."""

    owner: Who
    touched: float
    count: int = 0
    names: list[str] = field(default_factory=list)
    items: list[protocol.Item] = field(default_factory=list)
    uses: list[tuple[int, int, int]] = field(default_factory=list)
    memory: int = 0


@dataclass(frozen=True)
class _At:
    """Where a reader is, and when it said so."""

    position: int
    said: float


class Plans:
    """All plans of a daemon. Belongs to one event loop, but for :attr:`following`.

    ``on_ready`` is called when a plan was brought to where its reader is after the call that moved it.
    """

    def __init__(self, clock: Clock, *, fifo: bool = True, most_bytes: int = MOST_BYTES) -> None:
        self._clock = clock
        self._most_bytes = most_bytes
        self.following = Following(clock, fifo=fifo)
        self.on_ready: Callable[[], object] = lambda: None
        self._uploads: dict[Key, _Upload] = {}
        self._readers: dict[Key, dict[Who, _At]] = {}
        self._paused: set[tuple[Who, Key]] = set()
        self._declared: dict[Who, Key] = {}
        self._former: dict[Who, Key] = {}
        self._working: set[asyncio.Future[None]] = set()

    # --- what clients say -------------------------------------------------------------------------------------------

    async def declare(self, session: str, access: Access, piece: protocol.Plan) -> protocol.Planned:
        """Take a piece of a plan. Raises :class:`ConfigError` for one that makes no sense."""
        who = session, piece.name
        try:
            return protocol.Planned(await self._declare(who, access, piece))
        except BaseException:
            self._leave(who)
            raise

    def progress(self, session: str, request: protocol.Progress) -> protocol.Planned:
        """A reader has come on. Raises :class:`ConfigError` for a position that is none."""
        _check_position(request.position)
        who = session, request.name
        key = self._declared.get(who)
        if key is None or (self.following.get(key) is None and self._stalled(key, who)):
            return protocol.Planned("lost")
        readers = self._readers[key]
        readers[who] = _At(max(readers[who].position, request.position), self._clock.monotonic())
        self._paused.discard((who, key))
        self._move(key)
        return protocol.Planned("known")

    def pause(self, session: str, names: list[str]) -> None:
        """Readers rest. A plan does when all of its readers do."""
        for name in names:
            who = session, name
            key = self._declared.get(who)
            if key is not None:
                self._paused.add((who, key))
                self._move(key)

    def leave(self, session: str) -> None:
        """A client is gone, and its plans with it."""
        for who in [who for who in self._declared if who[0] == session]:
            self._leave(who)

    # --- what is shown ----------------------------------------------------------------------------------------------

    @property
    def wants(self) -> bool:
        """Whether there is something to bring in, or may be in a moment."""
        return bool(self._working) or self.following.wants

    @property
    def any(self) -> bool:
        return bool(self.following.items())

    def stats(self) -> dict[str, float | int | str | None]:
        """What is followed, and how far it has come."""
        held, plans = self.following.held_bytes(), self.following.items()
        lines = [
            f"{key[1]}: {followed.position} of {followed.plan.end}{', paused' if followed.paused else ''}"
            for key, followed in plans
            if followed.ready
        ]
        if len(lines) > _MOST_SHOWN:
            lines[_MOST_SHOWN:] = [f"and {len(lines) - _MOST_SHOWN} more"]
        return {
            "plans": len(plans),
            "plan_jobs": len({key[1] for key, _ in plans}),
            "plan_objects": sum(len(followed.items) for _, followed in plans),
            "plan_held_bytes": sum(held.values()),
            "plan_progress": "; ".join(lines),
        }

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _declare(self, who: Who, access: Access, piece: protocol.Plan) -> str:
        if not piece.digest:
            self._leave(who)
            return "known"
        _check(piece)
        key = access.identity, piece.job, piece.digest
        if not piece.start and not piece.objects and not piece.uses and not piece.last:
            return self._offered(who, key, piece.position)
        upload = self._uploads.get(key)
        if upload is None or upload.owner != who or upload.count != piece.start or upload.touched == inf:
            self._drop_upload(key, who)
            return "lost"
        memory = _memory(piece)
        if self._memory() + memory > self._most_bytes:
            self._quit_former(who)
            if self._memory() + memory > self._most_bytes:
                self._leave(who)
                return "refused"
        upload.names += [_name(item, access) for item in piece.objects]
        upload.memory += memory
        upload.items += piece.objects
        upload.uses += piece.uses
        upload.count += len(piece.objects) + len(piece.uses)
        upload.touched = inf if piece.last else self._clock.monotonic()
        if not piece.last:
            return "more"
        plan = await asyncio.to_thread(_assembled, upload, self.following.quota)
        if self._uploads.get(key) is upload:
            del self._uploads[key]
            position, paused = self._position(key)
            followed = Followed(plan, upload.items, access, piece.share, upload.memory, position, paused)
            await asyncio.to_thread(self.following.begin_to_follow(key, followed))
            if self.following.get(key) is followed:
                for reader in list(self._readers[key]):
                    self._quit_former(reader)
        return "known"

    def _offered(self, who: Who, key: Key, position: int) -> str:
        before = self._declared.get(who)
        if before is None and sum(other[0] == who[0] for other in self._declared) >= _MOST_NAMES:
            return "refused"
        if before != key:
            if self._former.get(who) == key:
                del self._former[who]  # it is the one again
            if before is not None and self.following.get(before) is not None:
                self._quit_former(who)
                self._former[who] = before
            elif before is not None:
                self._quit(who, before)
        self._declared[who] = key
        self._paused.discard((who, key))
        self._readers.setdefault(key, {})[who] = _At(position, self._clock.monotonic())
        followed = self.following.get(key)
        if followed is not None:
            self._move(key)
            if followed.ready:
                self._quit_former(who)
            return "known"
        if not self._stalled(key, who):
            return "known"  # somebody is sending it
        self._uploads[key] = _Upload(who, self._clock.monotonic())
        return "more"

    def _stalled(self, key: Key, who: Who) -> bool:
        """Whether nobody but perhaps ``who`` is sending a plan."""
        upload = self._uploads.get(key)
        return upload is None or upload.owner == who or self._clock.monotonic() - upload.touched > PATIENCE

    def _leave(self, who: Who) -> None:
        self._quit_former(who)
        key = self._declared.pop(who, None)
        if key is not None:
            self._quit(who, key)

    def _quit_former(self, who: Who) -> None:
        key = self._former.pop(who, None)
        if key is not None:
            self._quit(who, key)

    def _quit(self, who: Who, key: Key) -> None:
        """One reader of a plan less."""
        self._drop_upload(key, who)
        self._paused.discard((who, key))
        readers = self._readers[key]
        del readers[who]
        if readers:
            self._move(key)
        else:
            del self._readers[key]
            self._work(self.following.withdraw([key]))

    def _drop_upload(self, key: Key, who: Who) -> None:
        upload = self._uploads.get(key)
        if upload is not None and upload.owner == who:
            del self._uploads[key]

    def _position(self, key: Key) -> tuple[int, bool]:
        """That of the reader that is furthest behind, of those that read; and whether none does.

        One that is silent for long counts no more until it speaks again.
        """
        readers = self._readers[key]
        reading = [at for who, at in readers.items() if (who, key) not in self._paused]
        if not reading:
            return max(at.position for at in readers.values()), True
        latest = max(at.said for at in reading)
        return min(at.position for at in reading if latest - at.said <= SILENCE), False

    def _move(self, key: Key) -> None:
        position, paused = self._position(key)
        self._work(self.following.move(key, position, paused=paused))

    def _work(self, work: Work | None) -> None:
        """Do what takes longer in a thread."""
        if work is None:
            return
        working = asyncio.get_running_loop().run_in_executor(None, work)
        self._working.add(working)
        working.add_done_callback(self._worked)

    def _worked(self, working: asyncio.Future[None]) -> None:
        self._working.discard(working)
        if not working.cancelled():
            self.on_ready()

    def _memory(self) -> int:
        followed, uploads = self.following.items(), self._uploads.values()
        return sum(plan.memory for _, plan in followed) + sum(upload.memory for upload in uploads)


def _memory(piece: protocol.Plan) -> int:
    objects = sum(_OBJECT_BYTES + len(item.url) + len(item.version or "") for item in piece.objects)
    return objects + _USE_BYTES * len(piece.uses)


def _check(piece: protocol.Plan) -> None:
    if not 0 < piece.share < inf:
        raise ConfigError(f"a share of {piece.share} is none", hint="a positive number; jobs get their part of the sum")
    for what, text in (("name", piece.name), ("job", piece.job), ("digest", piece.digest)):
        if len(text) > _MOST_TEXT:
            raise ConfigError(f"a plan whose {what} has {len(text)} characters", hint=f"at most {_MOST_TEXT}")
    _check_position(piece.position)
    if len(piece.objects) > protocol.PAGE_ITEMS or len(piece.uses) > _MOST_USES:
        raise ConfigError(f"a piece of a plan with {len(piece.objects)} objects and {len(piece.uses)} uses")
    for item in piece.objects:
        if item.version is None or item.size is None:
            raise ConfigError("a plan needs versions and sizes", url=item.url, hint="list the objects")
        if len(item.version) > _MOST_VERSION:
            raise ConfigError(f"a plan with a version of {len(item.version)} characters", url=item.url)


def _check_position(position: int) -> None:
    if not 0 <= position < MOST_POSITION:
        raise ConfigError(f"a plan has no position {position}", hint="positions count samples from 0 on")


def _name(item: protocol.Item, access: Access) -> str:
    assert item.version is not None, "checked before"
    return EntryKey(access.endpoint, str(parse_url(item.url)), item.version).name


def _assembled(upload: _Upload, quota: int | None) -> Plan:
    """Made in a thread, with all that is derived from it; without uses of what never fits into the cache."""
    sizes = [item.size or 0 for item in upload.items]
    plan = Plan.of(upload.names, sizes, upload.uses)
    if quota is not None and max(sizes, default=0) >= quota:
        plan = Plan.of(upload.names, sizes, [use for use in upload.uses if sizes[use[0]] < quota])
    _ = plan.following, plan.by_last, plan.bytes_before, plan.numbers, plan.end
    return plan
