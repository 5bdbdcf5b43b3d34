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
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from .incoming import Incoming
from .plan import Course, Plan
from .ranks import Ranked, Ranks, size_class, weight
from .shares import give_way

_NEW = 0.25
"""What the latest report counts in a reader's pace."""


@dataclass(frozen=True)
class Wanted:
    """An object to bring in: of which plan, its number there, and the number of the use."""

    key: Hashable
    number: int
    use: int


@dataclass(eq=False)
class Reader:
    """A plan that is being followed. ``pace`` is in seconds per position, if known; ``paused``: nobody reads now."""

    key: Hashable
    job: str
    course: Course
    ranks: Ranks = field(default_factory=Ranks)
    asked: int = 0
    blocked: bool = False
    paused: bool = False
    pace: float | None = None
    reported: float | None = None

    def note_pace(self, positions: int, now: float) -> None:
        if self.reported is not None and positions > 0 and now > self.reported:
            pace = (now - self.reported) / positions
            self.pace = pace if self.pace is None else self.pace + _NEW * (pace - self.pace)
        if self.reported is None or positions > 0:
            self.reported = now


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an entry with a known use is ranked."""

    reader: Reader
    size: int
    first: int


class Scheduler:
    """All plans of a node and what it holds. Not thread-safe. ``budget``: bytes to bring in ahead, over all plans."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._readers: dict[Hashable, Reader] = {}
        self._shares: dict[str, float] = {}
        self._places: dict[str, _Place] = {}
        self._spare: dict[str, None] = {}

    # --- what is held -----------------------------------------------------------------------------------------------

    def begin(self, sizes: Mapping[str, int]) -> None:
        """What is held, least recently used first; all that was said before about that is void."""
        for name in list(self._places):
            self._unrank(name)
        self._spare = dict.fromkeys(sizes)
        for reader in self._readers.values():
            self._rank_all(reader)

    def added(self, name: str) -> None:
        self._spare[name] = None
        self._rank(name)

    def used(self, name: str) -> None:
        if name in self._spare:
            del self._spare[name]
            self._spare[name] = None

    def removed(self, name: str) -> None:
        self._spare.pop(name, None)
        self._unrank(name)

    def holds(self, name: str) -> bool:
        return name in self._places or name in self._spare

    # --- plans ------------------------------------------------------------------------------------------------------

    @property
    def planned(self) -> bool:
        """Whether there is any plan."""
        return bool(self._readers)

    def declare(self, key: Hashable, plan: Plan, *, job: str, share: float = 1.0, position: int = 0) -> None:
        """Follow a plan from ``position`` on, in the place of the one with this key. A job has its latest share."""
        self.withdraw(key)
        self._readers[key] = Reader(key, job, Course(plan, position))
        self._shares[job] = share
        self._rank_all(self._readers[key])

    def withdraw(self, key: Hashable) -> None:
        """Forget a plan, if there is one of this key."""
        reader = self._readers.pop(key, None)
        if reader is None:
            return
        for name in reader.ranks.names():
            self._rank(name)
        if all(other.job != reader.job for other in self._readers.values()):
            del self._shares[reader.job]

    def progress(self, key: Hashable, position: int, now: float | None = None) -> None:
        """A reader has come to ``position`` of its plan, at ``now`` (seconds of any clock)."""
        reader = self._readers[key]
        if now is not None:
            reader.note_pace(position - reader.course.position, now)
        names = reader.course.plan.names
        for number in reader.course.advance(position):
            if self.holds(names[number]):
                self._rank(names[number])
        for other in self._readers.values():
            other.blocked = False

    def pause(self, key: Hashable, *, paused: bool = True) -> None:
        """Nobody reads a plan for the time being (or somebody does again): until it goes on, what it needs counts as
        needed after all that is needed by plans that are read."""
        reader = self._readers[key]
        if reader.paused != paused:
            reader.paused, reader.reported = paused, None
            self._rank_all(reader)

    def follows(self, key: Hashable) -> bool:
        return key in self._readers

    def position(self, key: Hashable) -> int:
        return self._readers[key].course.position

    def held_bytes(self) -> dict[str, int]:
        """By job, the bytes held of what it needs sooner than others."""
        out = dict.fromkeys(self._shares, 0)
        for reader in self._readers.values():
            out[reader.job] += reader.ranks.bytes
        return out

    # --- decisions --------------------------------------------------------------------------------------------------

    def next_wanted(self) -> Wanted | None:
        """The object to bring in next, asked for once each time it is needed; ``None`` if there is none for now."""
        reader = self._hungriest()
        if reader is None:
            return None
        reader.asked += 1
        return Wanted(reader.key, reader.course.plan.item[reader.asked - 1], reader.asked - 1)

    @property
    def wants(self) -> bool:
        """Whether :meth:`next_wanted` has something."""
        return self._hungriest() is not None

    def _hungriest(self) -> Reader | None:
        """The reader with an object to bring in that is needed before those of others."""
        reading = [reader for reader in self._readers.values() if not reader.paused]
        budget = -(-self.budget // max(1, len(reading)))
        soonest: tuple[float, Reader] | None = None
        for reader in reading:
            course = reader.course
            window = course.window(budget)
            while reader.asked < window and course.is_over(reader.asked):
                reader.asked += 1
            if reader.asked < window and not reader.blocked:
                wait = course.distance(course.plan.first[reader.asked]) * self._pace(reader)
                if soonest is None or wait < soonest[0]:
                    soonest = wait, reader
        return None if soonest is None else soonest[1]

    def defer(self, wanted: Wanted) -> None:
        """There was no room for it: ask again when readers have come on."""
        reader = self._readers.get(wanted.key)
        if reader is not None:
            reader.asked = min(reader.asked, wanted.use)
            reader.blocked = True

    def victims(self, incoming: Incoming | None = None) -> Iterator[str]:
        """The entries that may go for ``incoming`` (``None``: for whatever), in the order in which they should.

        A snapshot: what happens while it is looked at changes nothing in it.
        """
        spare = list(self._spare)
        own = None if incoming is None else self._soonest(incoming.name)
        if incoming is not None and incoming.ahead and own is None:
            return iter(spare)
        taker = None if own is None else own[0].job
        held = self.held_bytes()
        queues: dict[str, Iterator[Ranked]] = {}
        for job in held:
            queue: Iterator[Ranked] = chain(*(self._merged(job, paused=paused) for paused in (True, False)))
            if incoming is not None:
                queue = _worth_less(
                    queue, *self._bar(*own, ahead=incoming.ahead) if own and job == taker else (0.0, 0.0)
                )
            queues[job] = queue
        if taker is not None and incoming is not None:
            held[taker] += incoming.size
        return chain(spare, (ranked.name for ranked in give_way(queues, held, dict(self._shares), taker)))

    # --- inside -----------------------------------------------------------------------------------------------------

    def _bar(self, reader: Reader, number: int, *, ahead: bool) -> tuple[float, float]:
        """How long from now an entry must be not needed, and of which value, so that it may go for an object."""
        course, pace = reader.course, self._pace(reader)
        if ahead:
            return course.distance(course.next_use(number) or 0) * pace, 0.0
        if self.budget > 0:
            return 0.0, 0.0
        after = course.use_after(number)
        kept = weight(size_class(course.plan.sizes[number]))
        return 0.0, inf if after is None else course.distance(after) * pace * kept

    def _soonest(self, name: str) -> tuple[Reader, int] | None:
        """The reader that needs an object the soonest, and the object's number in its plan."""
        best: tuple[tuple[bool, float], Reader, int] | None = None
        for reader in self._readers.values():
            number = reader.course.plan.numbers.get(name)
            first = None if number is None else reader.course.next_use(number)
            if number is not None and first is not None:
                wait = reader.paused, reader.course.distance(first) * self._pace(reader)
                if best is None or wait < best[0]:
                    best = wait, reader, number
        return None if best is None else best[1:]

    def _rank(self, name: str) -> None:
        """Give an entry that is held the place that its next use deserves."""
        was_planned = self._unrank(name)
        found = self._soonest(name)
        if found is None:
            if was_planned:
                self._spare[name] = None
            return
        reader, number = found
        first, size = reader.course.next_use(number), reader.course.plan.sizes[number]
        assert first is not None, "it is needed"
        self._spare.pop(name, None)
        self._places[name] = _Place(reader, size, first)
        reader.ranks.add(name, size, first)

    def _rank_all(self, reader: Reader) -> None:
        for name in reader.course.plan.names:
            if self.holds(name):
                self._rank(name)

    def _unrank(self, name: str) -> bool:
        place = self._places.pop(name, None)
        if place is not None:
            place.reader.ranks.remove(name, place.size, place.first)
        return place is not None

    def _merged(self, job: str, *, paused: bool) -> Iterator[Ranked]:
        """What a job's plans that are read, or those that are not, may lose: worth least first."""
        streams = [
            stream
            for reader in self._readers.values()
            if reader.job == job and reader.paused == paused
            for stream in reader.ranks.streams(reader.course.position, self._pace(reader))
        ]
        merged = streams[0] if len(streams) == 1 else heapq.merge(*streams, key=lambda ranked: -ranked.value)
        return (replace(ranked, distance=inf, value=inf) for ranked in merged) if paused else merged

    def _pace(self, reader: Reader) -> float:
        """Seconds per position; where that is not known yet, as others go."""
        if reader.pace is not None:
            return reader.pace
        known = [other.pace for other in self._readers.values() if other.pace is not None]
        return sum(known) / len(known) if known else 1.0


def _worth_less(queue: Iterator[Ranked], distance: float, value: float) -> Iterator[Ranked]:
    """Those needed later than ``distance`` from now, and worth less than what has this value (a larger one)."""
    for ranked in queue:
        if ranked.value <= value:
            return
        if ranked.distance > distance:
            yield ranked
