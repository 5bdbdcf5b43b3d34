"""A declared future, and how far it has come.

A plan says in which order a job will use which objects: each use is an interval of the job's own positions (samples),
the first to the last one that needs the object. An object has several uses where the plan covers several epochs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from ..errors import ConfigError

MOST_POSITION = 1 << 62
"""Positions and sizes are below this."""


@dataclass(frozen=True, eq=False)
class Plan:
    """``names`` and ``sizes`` (bytes) of objects; and their uses in the order of ``first``: parallel lists of the
    object's number, its first position and its last one."""

    names: Sequence[str]
    sizes: Sequence[int]
    item: Sequence[int]
    first: Sequence[int]
    last: Sequence[int]

    @classmethod
    def of(cls, names: Sequence[str], sizes: Sequence[int], uses: Iterable[tuple[int, int, int]]) -> Plan:
        """A plan from uses ``(object number, first, last)`` in any order. Raises :class:`ConfigError` for nonsense.

        An object that is named several times goes by its first number.
        """
        rows = sorted(uses, key=lambda use: use[1])
        if len(names) != len(sizes):
            raise ConfigError(f"a plan with {len(names)} names and {len(sizes)} sizes")
        if any(not 0 <= size < MOST_POSITION for size in sizes):
            raise ConfigError("a plan with a size that no object has")
        for number, first, last in rows:
            if not (0 <= number < len(names) and 0 <= first <= last < MOST_POSITION):
                what = f"a plan with a use of object {number} of {len(names)} at positions {first} to {last}"
                raise ConfigError(what)
        item = [row[0] for row in rows]
        if len(set(names)) < len(names):
            numbers = _first_numbers(names)
            item = [numbers[names[number]] for number in item]
        return cls(names, sizes, item, [row[1] for row in rows], [row[2] for row in rows])

    @cached_property
    def following(self) -> list[int]:
        """For each use the number of the same object's next one, or -1."""
        out, later = [-1] * len(self.item), [-1] * len(self.names)
        for use in range(len(self.item) - 1, -1, -1):
            number = self.item[use]
            out[use], later[number] = later[number], use
        return out

    @cached_property
    def end(self) -> int:
        """The position behind the last use."""
        return max(self.last, default=-1) + 1

    @cached_property
    def by_last(self) -> list[int]:
        """The uses in the order in which they end."""
        order: list[int] = np.argsort(np.asarray(self.last, dtype=np.int64), kind="stable").tolist()
        return order

    @cached_property
    def bytes_before(self) -> list[int]:
        """The bytes of all uses before each one, and of all."""
        return list(accumulate((self.sizes[number] for number in self.item), initial=0))

    @cached_property
    def numbers(self) -> dict[str, int]:
        return _first_numbers(self.names)


def _first_numbers(names: Sequence[str]) -> dict[str, int]:
    return {names[number]: number for number in range(len(names) - 1, -1, -1)}


class Course:
    """A plan and the position that its reader has come to. Moving on costs what the uses passed cost, never a scan."""

    def __init__(self, plan: Plan, position: int = 0) -> None:
        self.plan = plan
        self.position = 0
        self._ended = 0
        self._head = [-1] * len(plan.names)
        for use in range(len(plan.item) - 1, -1, -1):
            self._head[plan.item[use]] = use
        self.advance(position)

    def advance(self, position: int) -> list[int]:
        """The reader is about to read ``position``; returns the objects whose next use is another one now.

        What lies before the position it had is ignored: nobody goes back.
        """
        if position <= self.position:
            return []
        plan, head = self.plan, self._head
        self.position = position
        changed = []
        while self._ended < len(plan.by_last) and plan.last[plan.by_last[self._ended]] < position:
            number = plan.item[plan.by_last[self._ended]]
            self._ended += 1
            use = head[number]
            if use >= 0 and plan.last[use] < position:
                while use >= 0 and plan.last[use] < position:
                    use = plan.following[use]
                head[number] = use
                changed.append(number)
        return changed

    def next_use(self, number: int) -> int | None:
        """Where an object is needed next: the first position of its current or next use; ``None`` for never."""
        use = self._head[number]
        return None if use < 0 else self.plan.first[use]

    def use_after(self, number: int) -> int | None:
        """The same for the use after that one."""
        use = self._head[number]
        use = use if use < 0 else self.plan.following[use]
        return None if use < 0 else self.plan.first[use]

    def distance(self, first: int) -> int:
        """Positions until ``first``; 0 for what is in use."""
        return max(0, first - self.position)

    def is_over(self, use: int) -> bool:
        return self.plan.last[use] < self.position

    def first_to_come(self) -> int:
        """The number of the first use that is not over."""
        use, last = 0, self.plan.last
        while use < len(last) and last[use] < self.position:
            use += 1
        return use

    def passes(self, position: int) -> int:
        """About how many uses end on the way to ``position``."""
        return bisect_right(self.plan.first, position) - bisect_right(self.plan.first, self.position)

    def window(self, budget: int) -> int:
        """How many of the plan's uses may be asked for: those begun, and ``budget`` bytes of those that come next.

        The next one always is. Without a budget nothing is asked for.
        """
        plan = self.plan
        if budget <= 0:
            return 0
        begun = bisect_right(plan.first, self.position)
        reached = bisect_right(plan.bytes_before, plan.bytes_before[begun] + budget) - 1
        return max(reached, min(begun + 1, len(plan.item)))
