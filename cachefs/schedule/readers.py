"""The plans that are being followed: how fast each is read, and which of them needs an object the soonest."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from .plan import Course
from .ranks import Ranks

_NEW = 0.25
"""What the latest report counts in a reader's pace."""


@dataclass(eq=False)
class Reader:
    """A plan that is being followed. ``pace`` is in seconds per position, if known; ``paused``: nobody reads now."""

    key: Hashable
    job: str
    course: Course
    asked: int = 0
    ranks: Ranks = field(default_factory=Ranks)
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


class Readers:
    """All readers, by key."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, Reader] = {}
        self._usual: float | None = None

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Reader]:
        """As they are now."""
        return iter(list(self._by_key.values()))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._by_key

    def __getitem__(self, key: Hashable) -> Reader:
        return self._by_key[key]

    def get(self, key: Hashable) -> Reader | None:
        return self._by_key.get(key)

    def add(self, reader: Reader) -> None:
        self._by_key[reader.key] = reader
        self._usual = None

    def pop(self, key: Hashable) -> Reader | None:
        self._usual = None
        return self._by_key.pop(key, None)

    def note_pace(self, reader: Reader, position: int, now: float) -> None:
        """A reader comes to ``position`` at ``now``."""
        reader.note_pace(position - reader.course.position, now)
        self._usual = None

    def hungriest(self, budget: int) -> Reader | None:
        """The reader with an object to bring in that is needed before those of others; ``budget``: bytes
        ahead, of all together."""
        reading = [reader for reader in self._by_key.values() if not reader.paused]
        budget = -(-budget // max(1, len(reading)))
        soonest: tuple[float, Reader] | None = None
        for reader in reading:
            course = reader.course
            window = course.window(budget)
            while reader.asked < window and course.is_over(reader.asked):
                reader.asked += 1
            if reader.asked < window and not reader.blocked:
                wait = course.distance(course.plan.first[reader.asked]) * self.pace(reader)
                if soonest is None or wait < soonest[0]:
                    soonest = wait, reader
        return None if soonest is None else soonest[1]

    def soonest(self, name: str, *, reading: bool = False) -> tuple[Reader, int] | None:
        """The reader that needs an object the soonest (of those not paused, if there is one that needs it; of those
        only, if ``reading``), and the object's number in its plan."""
        best: tuple[tuple[bool, float], Reader, int] | None = None
        for reader, number, first in self.needing(name):
            wait = reader.paused, reader.course.distance(first) * self.pace(reader)
            if not (reading and reader.paused) and (best is None or wait < best[0]):
                best = wait, reader, number
        return None if best is None else best[1:]

    def needing(self, name: str) -> Iterator[tuple[Reader, int, int]]:
        """The readers that need an object, its number in their plans, and when."""
        for reader in list(self._by_key.values()):
            number = reader.course.plan.numbers.get(name)
            first = None if number is None else reader.course.next_use(number)
            if number is not None and first is not None:
                yield reader, number, first

    def pace(self, reader: Reader) -> float:
        """Seconds per position; where that is not known yet, as others go."""
        if reader.pace is not None:
            return reader.pace
        if self._usual is None:
            known = [other.pace for other in list(self._by_key.values()) if other.pace is not None]
            self._usual = sum(known) / len(known) if known else 1.0
        return self._usual
