"""A cache that is nothing but a scheduler's decisions and a count of bytes: what a plan costs, without a daemon."""

from __future__ import annotations

from collections.abc import Hashable

from ..schedule import Incoming, Plan, Scheduler


class Replay:
    """One access after the other, each whole before the next. ``fetches`` counts what the origin was asked for."""

    def __init__(self, capacity: int, budget: int = 0) -> None:
        self.scheduler = Scheduler(budget)
        self.capacity = capacity
        self.held: dict[str, int] = {}
        self.fetches = 0
        self.fetched_bytes = 0
        self.bypassed = 0
        self._plans: dict[Hashable, Plan] = {}

    def declare(self, key: Hashable, plan: Plan, *, job: str = "job", share: float = 1.0, position: int = 0) -> None:
        self._plans[key] = plan
        self.scheduler.declare(key, plan, job=job, share=share, position=position)

    def progress(self, key: Hashable, position: int, now: float | None = None) -> None:
        """A reader has come there; bring in what is wanted now."""
        self.scheduler.progress(key, position, now)
        while (wanted := self.scheduler.next_wanted()) is not None:
            plan = self._plans[wanted.key]
            name, size = plan.names[wanted.number], plan.sizes[wanted.number]
            if name not in self.held and not self._bring(Incoming(name, size, ahead=True)):
                self.scheduler.defer(wanted)

    def access(self, name: str, size: int) -> bool:
        """A reader reads a whole object; True if it was there."""
        if name in self.held:
            self.scheduler.used(name)
            return True
        if not self._bring(Incoming(name, size, ahead=False)):
            self.bypassed += 1
            self._count(size)
        return False

    def run(self, key: Hashable, *, start: int = 0, stop: int | None = None) -> int:
        """Read the uses of a plan with first positions in ``[start, stop)`` one by one; returns the fetches so far."""
        plan = self._plans[key]
        for number, first in zip(plan.item, plan.first, strict=True):
            if first >= start and (stop is None or first < stop):
                self.progress(key, first)
                self.access(plan.names[number], plan.sizes[number])
        return self.fetches

    def _bring(self, incoming: Incoming) -> bool:
        short = sum(self.held.values()) + incoming.size - self.capacity
        going: list[str] = []
        for name in self.scheduler.victims(incoming) if short > 0 else ():
            going.append(name)
            short -= self.held[name]
            if short <= 0:
                break
        if short > 0:
            return False
        for name in going:
            del self.held[name]
            self.scheduler.removed(name)
        self.held[incoming.name] = incoming.size
        self.scheduler.added(incoming.name)
        self._count(incoming.size)
        return True

    def _count(self, size: int) -> None:
        self.fetches += 1
        self.fetched_bytes += size
