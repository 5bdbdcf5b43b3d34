"""The decisions over all plans: what to bring in next, what to give up for it, and what is not worth a place.

- The next object to bring in is the one needed soonest, within a budget of bytes ahead of each reader.
- What goes first is an entry without any known use, the least recently used first; then the one that is worth least to
  the job that holds most for its share (:mod:`.ranks`, :mod:`.shares`).
- What comes in ahead of its use takes the place only of what is needed later. What a reader waits for takes the place
  of anything that is not in use at the moment: with a budget every object comes through the cache, and one that is not
  worth keeping goes as soon as it was used. Without one it is kept only if it is worth more than what would have to go,
  and read past the cache otherwise (Belady's MIN with bypass).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from math import inf

from .incoming import Incoming
from .plan import Course, Plan
from .ranks import Ranked, size_class, weight
from .readers import Reader, Readers
from .shares import give_way

_LOOKS = 300
"""Looks at plans in one step of what is done in steps."""
_SOME = 64
"""Entries without a known use that are looked at first: mostly they are enough."""


@dataclass(frozen=True)
class Wanted:
    """An object to bring in: of which plan, its number there, and the number of the use."""

    key: Hashable
    number: int
    use: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an entry with a known use is ranked."""

    reader: Reader
    size: int
    first: int


class Scheduler:
    """All plans of a node and what it holds. Not thread-safe. ``budget``: bytes to bring in ahead, over all plans.

    What costs more than a moment is done in steps: :meth:`follow` and :meth:`forget` take effect at once and return an
    iterator to be exhausted, between whose steps everything else may be called.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._readers = Readers()
        self._leaving: list[Reader] = []
        self._shares: dict[str, float] = {}
        self._places: dict[str, _Place] = {}
        self._spare: dict[str, None] = {}

    # --- what is held -----------------------------------------------------------------------------------------------

    def begin(self, sizes: Mapping[str, int]) -> None:
        """What is held, least recently used first; all that was said before about that is void."""
        for name in list(self._places):
            self._unrank(name)
        self._spare = dict.fromkeys(sizes)
        for reader in self._readers:
            _exhaust(self._ranked_in_steps(reader))

    def added(self, name: str) -> None:
        self._spare[name] = None
        self._rank(name)

    def used(self, name: str) -> None:
        if name in self._spare:
            del self._spare[name]
            self._spare[name] = None

    def removed(self, name: str) -> bool:
        """An entry is gone. True if somebody waited for room, and may ask again."""
        self._spare.pop(name, None)
        self._unrank(name)
        return self._unblock()

    def holds(self, name: str) -> bool:
        return name in self._places or name in self._spare

    # --- plans ------------------------------------------------------------------------------------------------------

    @property
    def planned(self) -> bool:
        """Whether there is any plan."""
        return bool(self._readers or self._leaving)

    def declare(self, key: Hashable, plan: Plan, *, job: str, share: float = 1.0, position: int = 0) -> None:
        """Follow a plan from ``position`` on, in the place of the one with this key. A job has its latest share."""
        self.withdraw(key)
        course = Course(plan, position)
        _exhaust(self.follow(key, course, course.first_to_come(), job=job, share=share))

    def withdraw(self, key: Hashable) -> None:
        """Forget a plan, if there is one of this key."""
        _exhaust(self.forget(key))

    def follow(self, key: Hashable, course: Course, begun: int, *, job: str, share: float = 1.0) -> Iterator[None]:
        """Follow a plan, in steps; one of this key that is followed already gets another ``course``.

        ``begun`` is the number of its first use that is not over.
        """
        reader = self._readers.get(key)
        if reader is None:
            reader = Reader(key, job, course, begun)
            self._readers.add(reader)
        else:
            forward = course.position >= reader.course.position
            reader.asked = max(reader.asked, begun) if forward else begun
            reader.course, reader.reported = course, None
        self._shares[job] = share
        return self._ranked_in_steps(reader)

    def forget(self, key: Hashable) -> Iterator[None]:
        """Withdraw a plan, in steps. What nobody else needs counts as not needed at once."""
        reader = self._readers.pop(key)
        if reader is None:
            return iter(())
        reader.paused = True
        self._leaving.append(reader)
        return self._left_in_steps(reader)

    def progress(self, key: Hashable, position: int, now: float | None = None) -> None:
        """A reader has come to ``position`` of its plan, at ``now`` (seconds of any clock)."""
        reader = self._readers[key]
        if now is not None:
            self._readers.note_pace(reader, position, now)
        names = reader.course.plan.names
        for number in reader.course.advance(position):
            if self.holds(names[number]):
                self._rank(names[number])
        self._unblock()

    def pause(self, key: Hashable, *, paused: bool = True) -> None:
        """Nobody reads a plan for the time being (or somebody does again): until it goes on, what it needs counts as
        needed after all that is needed by plans that are read."""
        reader = self._readers[key]
        if reader.paused != paused:
            reader.paused, reader.reported = paused, None

    def follows(self, key: Hashable) -> bool:
        return key in self._readers

    def passes(self, key: Hashable, position: int) -> int:
        """About how many uses end if a reader comes to ``position``."""
        return self._readers[key].course.passes(position)

    def position(self, key: Hashable) -> int:
        return self._readers[key].course.position

    def held_bytes(self) -> dict[str, int]:
        """By job, the bytes held of what it needs sooner than others."""
        out = dict.fromkeys(self._shares, 0)
        for reader in (*self._readers, *self._leaving):
            out[reader.job] += reader.ranks.bytes
        return out

    # --- decisions --------------------------------------------------------------------------------------------------

    def next_wanted(self) -> Wanted | None:
        """The object to bring in next, asked for once each time it is needed; ``None`` if there is none for now."""
        reader = self._readers.hungriest(self.budget)
        if reader is None:
            return None
        reader.asked += 1
        return Wanted(reader.key, reader.course.plan.item[reader.asked - 1], reader.asked - 1)

    @property
    def wants(self) -> bool:
        """Whether :meth:`next_wanted` has something."""
        return self._readers.hungriest(self.budget) is not None

    def defer(self, wanted: Wanted) -> None:
        """There was no room for it: ask again when readers have come on."""
        reader = self._readers.get(wanted.key)
        if reader is not None:
            reader.asked = min(reader.asked, wanted.use)
            reader.blocked = True

    def victims(self, incoming: Incoming | None = None) -> Iterator[str]:
        """The entries that may go for ``incoming`` (``None``: for whatever), in the order in which they should.

        What happens while it is looked at changes at most where entries come that nobody needs.
        """
        own = None if incoming is None else self._readers.soonest(incoming.name)
        if incoming is not None and incoming.ahead and own is None:
            return _once(self._spares())
        taker = None if own is None else own[0].job
        held = self.held_bytes()
        queues: dict[str, Iterator[Ranked]] = {}
        for job in held:
            queue = self._queue(job)
            if incoming is not None and (own is None or job == taker):
                # Of what others have for its share a job gets also what is in use, last and unless somebody reads it.
                queue = _worth_less(queue, *self._bar(*own, ahead=incoming.ahead) if own else (0.0, 0.0))
            queues[job] = queue
        if taker is not None and incoming is not None:
            held[taker] += incoming.size
        ranked = give_way(queues, held, dict(self._shares), taker)
        return _once(chain(self._spares(), (entry.name for entry in ranked)))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _bar(self, reader: Reader, number: int, *, ahead: bool) -> tuple[float, float]:
        """How long from now an entry must be not needed, and of which value, so that it may go for an object."""
        course, pace = reader.course, self._readers.pace(reader)
        if ahead:
            return course.distance(course.next_use(number) or 0) * pace, 0.0
        if self.budget > 0:
            return 0.0, 0.0
        after = course.use_after(number)
        kept = weight(size_class(course.plan.sizes[number]))
        return 0.0, inf if after is None else course.distance(after) * pace * kept

    def _rank(self, name: str) -> None:
        """Give an entry that is held the place that its next use deserves, be it that of a reader that is paused."""
        was_planned = self._unrank(name)
        needing = self._readers.needing(name)
        found = min(needing, key=lambda one: one[0].course.distance(one[2]) * self._readers.pace(one[0]), default=None)
        if found is None:
            if was_planned:
                self._spare[name] = None
            return
        reader, number, first = found
        size = reader.course.plan.sizes[number]
        self._spare.pop(name, None)
        self._places[name] = _Place(reader, size, first)
        reader.ranks.add(name, size, first)

    def _ranked_in_steps(self, reader: Reader) -> Iterator[None]:
        names = iter(reader.course.plan.names)
        while step := list(islice(names, self._step)):
            for name in step:
                if self.holds(name):
                    self._rank(name)
            yield

    def _left_in_steps(self, reader: Reader) -> Iterator[None]:
        names = iter(reader.ranks.names())
        while step := list(islice(names, self._step)):
            for name in step:
                place = self._places.get(name)
                if place is not None and place.reader is reader:
                    self._rank(name)
            yield
        self._leaving.remove(reader)
        if all(other.job != reader.job for other in (*self._readers, *self._leaving)):
            del self._shares[reader.job]

    @property
    def _step(self) -> int:
        """Entries to rank in one step."""
        return max(10, _LOOKS // max(1, len(self._readers)))

    def _unblock(self) -> bool:
        blocked = [reader for reader in self._readers if reader.blocked]
        for reader in blocked:
            reader.blocked = False
        return bool(blocked)

    def _unrank(self, name: str) -> bool:
        place = self._places.pop(name, None)
        if place is not None:
            place.reader.ranks.remove(name, place.size, place.first)
        return place is not None

    def _spares(self) -> Iterator[str]:
        """What nobody needs: some as it is now, the others as they are when these were looked at."""
        return chain(list(islice(self._spare, _SOME)), self._all_spares())

    def _all_spares(self) -> Iterator[str]:
        yield from list(self._spare)

    def _queue(self, job: str) -> Iterator[Ranked]:
        """What a job may lose: what only plans need that are paused, then the rest, worth least first."""
        readers = [reader for reader in (*self._readers, *self._leaving) if reader.job == job]
        resting = _merged([stream for reader in readers if reader.paused for stream in self._streams(reader)])
        reading = _merged([stream for reader in readers if not reader.paused for stream in self._streams(reader)])
        return self._unshared_first(resting, reading)

    def _streams(self, reader: Reader) -> list[Iterator[Ranked]]:
        return reader.ranks.streams(reader.course.position, self._readers.pace(reader))

    def _unshared_first(self, resting: Iterator[Ranked], reading: Iterator[Ranked]) -> Iterator[Ranked]:
        shared: list[Ranked] = []
        for entry in resting:
            found = self._readers.soonest(entry.name, reading=True)
            first = None if found is None else found[0].course.next_use(found[1])
            if found is None or first is None:
                yield Ranked(entry.name, entry.size, inf, inf)
            else:
                distance = found[0].course.distance(first) * self._readers.pace(found[0])
                value = distance * weight(size_class(entry.size))
                shared.append(Ranked(entry.name, entry.size, distance, value))
        shared.sort(key=_worth_least)
        yield from _merged([reading, iter(shared)]) if shared else reading


def _exhaust(steps: Iterator[None]) -> None:
    for _ in steps:
        pass


def _once(names: Iterator[str]) -> Iterator[str]:
    seen: set[str] = set()
    for name in names:
        if name not in seen:
            seen.add(name)
            yield name


def _worth_least(ranked: Ranked) -> float:
    return -ranked.value


def _merged(streams: list[Iterator[Ranked]]) -> Iterator[Ranked]:
    return streams[0] if len(streams) == 1 else heapq.merge(*streams, key=_worth_least)


def _worth_less(queue: Iterator[Ranked], distance: float, value: float) -> Iterator[Ranked]:
    """Those needed later than ``distance`` from now, and worth less than what has this value (a larger one)."""
    for ranked in queue:
        if ranked.value <= value:
            return
        if ranked.distance > distance:
            yield ranked
