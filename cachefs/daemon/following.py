"""The plans that are followed: what the event loop and the flash store's threads both tell the scheduler and ask it.

It is guarded by a lock, which nobody holds while waiting for anything, and only for a moment: what takes longer (to
rank what is held anew for a plan) is done in a thread, in steps between which the lock is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import cast

from .. import protocol
from ..clock import Clock
from ..schedule import Course, Incoming, Plan, S3Fifo, Scheduler, Wanted
from .origins import Access

Key = tuple[str, str, str]
"""Whose origin, job, digest: what plans must have in common to be one."""
Work = Callable[[], None]
"""Something to be called in a thread."""

_AHEAD = 8
_MOST_AHEAD = 16 << 30
"""Bytes to bring in ahead of need: this part of the quota, and no more than that."""
_MOST_PASSED = 1000
"""Uses that a reader may pass at once on the event loop."""
_BREATH = 0.0005
"""Seconds between two steps, so that others who wait for the lock get it."""


@dataclass(eq=False)
class Followed:
    """A plan, where its reader is, and whether all of its readers rest. ``ready`` once it was followed for the first
    time; ``busy`` while a thread brings the scheduler to where the reader is."""

    plan: Plan
    items: list[protocol.Item]
    access: Access
    share: float
    memory: int
    position: int
    paused: bool
    ready: bool = False
    busy: bool = True


class Following:
    """A scheduler for several threads; the :class:`~cachefs.flash.eviction.Ranking` of a daemon's store.

    ``fifo``: without any plan S3-FIFO decides what goes first, otherwise the time of the last use. ``on_room`` is
    called in any thread, perhaps with the store's lock held, when what found no room may be asked for again.
    """

    def __init__(self, clock: Clock, *, fifo: bool) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._scheduler = Scheduler(0)
        self._fifo = S3Fifo() if fifo else None
        self._plans: dict[Key, Followed] = {}
        self.quota: int | None = None
        self.on_room: Callable[[], object] = lambda: None

    # --- plans; called in the event loop ----------------------------------------------------------------------------

    def get(self, key: Key) -> Followed | None:
        return self._plans.get(key)

    def items(self) -> list[tuple[Key, Followed]]:
        return list(self._plans.items())

    def begin_to_follow(self, key: Key, followed: Followed) -> Work:
        """A new plan. Returns the work that remains."""
        with self._lock:
            self._plans[key] = followed
        return lambda: self._bring(key, followed)

    def move(self, key: Key, position: int, *, paused: bool) -> Work | None:
        """A plan's reader is at ``position``. Returns the work that remains, if there is any."""
        with self._lock:
            followed = self._plans.get(key)
            if followed is None:
                return None
            followed.position, followed.paused = position, paused
            if followed.busy or self._moved(key, followed):
                return None
            followed.busy = True
            return lambda: self._bring(key, followed)

    def withdraw(self, keys: list[Key]) -> Work | None:
        """Forget plans, all at once. Returns the work that remains, if there is any."""
        with self._lock:
            gone = [key for key in keys if self._plans.pop(key, None) is not None]
            left = [self._scheduler.forget(key) for key in gone if self._scheduler.follows(key)]
        return (lambda: self._in_steps(chain(*left))) if left else None

    def held_bytes(self) -> dict[str, int]:
        """By job."""
        with self._lock:
            return self._scheduler.held_bytes()

    # --- what to bring in -------------------------------------------------------------------------------------------

    def next_wanted(self) -> tuple[Wanted, protocol.Item, Access] | None:
        """The object to bring in next, and whose access to the origin brings it."""
        with self._lock:
            wanted = self._scheduler.next_wanted()
            followed = None if wanted is None else self._plans.get(cast(Key, wanted.key))
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

    # --- what the store says, in its threads ------------------------------------------------------------------------

    def begin(self, sizes: Mapping[str, int], quota: int) -> None:
        with self._lock:
            self.quota = quota
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
            freed = self._scheduler.removed(name)
        if freed:
            self.on_room()
        if self._fifo is not None:
            self._fifo.removed(name)

    def order(self, incoming: Incoming | None) -> Generator[str, None, None] | None:
        with self._lock:
            if self._scheduler.planned:
                return _each(self._scheduler.victims(incoming))
        return None if self._fifo is None else self._fifo.order()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _bring(self, key: Key, followed: Followed) -> None:
        """Bring the scheduler to where the reader of a plan is, unless the plan is withdrawn meanwhile."""
        while True:
            course = Course(followed.plan, followed.position)
            begun = course.first_to_come()
            with self._lock:
                if self._plans.get(key) is not followed:
                    return
                steps = self._scheduler.follow(key, course, begun, job=key[1], share=followed.share)
                self._scheduler.pause(key, paused=followed.paused)
            self._in_steps(steps)
            with self._lock:
                if self._plans.get(key) is not followed:
                    return
                followed.ready = True
                followed.busy = not self._moved(key, followed)
                if not followed.busy:
                    return

    def _moved(self, key: Key, followed: Followed) -> bool:
        """With the lock: follow a reader that went on; False if it went back, or far."""
        position = followed.position
        if position < self._scheduler.position(key) or self._scheduler.passes(key, position) > _MOST_PASSED:
            return False
        self._scheduler.progress(key, position, None if followed.paused else self._clock.monotonic())
        self._scheduler.pause(key, paused=followed.paused)
        return True

    def _in_steps(self, steps: Iterator[None]) -> None:
        while True:
            with self._lock:
                if next(steps, True):
                    return
            self._clock.sleep(_BREATH)


def _each(names: Iterator[str]) -> Generator[str, None, None]:
    yield from names
