"""What a data set and its DataLoader workers must agree on: from where the next pass starts.

Some integers in memory that forked and spawned workers share with the process that made them. That process, the
*owner*, writes the *base* (``set_epoch``, ``load_state_dict``); whoever begins a pass writes only a *mark* of its own:
the number of that pass since the base. From base and marks follows the pass that comes next, so epochs advance by
themselves in every worker mode, without a lock and whoever dies at whatever moment:

    each pass that is begun is the epoch after the one that was begun before it.

How far a pass got plays no part: workers run ahead of the user by an amount that is a matter of timing, and nothing
tells the owner which batch DataLoader has handed out last. So all ranks that begin equally many passes read the same
epoch, also where they broke a pass off.

All workers of one iteration of a DataLoader read one pass. Where they are started for it, the process that starts
them begins it for them (:mod:`loader.teams`), so passes come in the order in which iterators were made. Workers that
stay begin the later ones themselves, each when it gets to it, which may be after others have begun the one behind it.
A worker joins the pass that its team has begun, also where a base was written meanwhile: the bases of the latest
generations are kept. ``Worker.team`` follows from what DataLoader gives to all workers of an iterator, and from how
many iterations they have seen. A user may seed several iterators alike; so a worker that finds its own mark there
already, from a process before it, begins a new pass. DataLoader's workers mark a pass when they are started or sent
into the next one, before they read.

A process that inherits a cell (``fork``, or a data set sent to a spawned process) and is no DataLoader worker makes it
its own, before it reads, marks or has workers.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import numpy.typing as npt

from .settingwords import OrderWords, Words
from .workers import Worker, find_worker

_KEPT = 16  # bases, each in the place of its generation: the latest and those before it
_WORKERS = 512
_OWNER = _WORKERS  # the place behind the workers'
_GENERATION = 0
_EPOCH, _POSITION, _STOP, _FIXED = range(4)
_SETTINGS = 4  # where those begin that a state fixed
_BEGUN, _BAD = range(2)
_NO_TEAM = 0
_NEVER = (-1, 0)


@dataclass(frozen=True)
class Base:
    """Where the pass after a ``set_epoch`` or ``load_state_dict`` starts.

    ``settings`` of the order, if a state fixed them: of the kind that the data set has. ``stop``: where that pass ends,
    if it begins within a batch.
    """

    epoch: int = 0
    position: int = 0
    settings: Any = None
    stop: int | None = None


@dataclass(frozen=True)
class Start:
    """Where one pass starts. ``number`` counts the passes begun before it since the base of this ``generation``."""

    generation: int
    number: int
    base: Base

    @property
    def epoch(self) -> int:
        return self.base.epoch + self.number

    @property
    def position(self) -> int:
        return 0 if self.number else self.base.position

    @property
    def stop(self) -> int | None:
        return None if self.number else self.base.stop


class EpochCell:
    """See the module's text. ``words``: how the settings of bases are kept."""

    def __init__(self, base: Base | None = None, words: Words | None = None) -> None:
        self._words = words or OrderWords()
        self._make(base or Base(), 0)
        _remember(self)

    def _make(self, base: Base, generation: int) -> None:
        self._attach(RawArray("q", self._header + 2 * (_WORKERS + 1)))
        self._owner = os.getpid()
        self._head[_GENERATION] = generation
        self.write(base)
        self._left = base

    @property
    def _fields(self) -> int:
        return _SETTINGS + self._words.count

    @property
    def _header(self) -> int:
        return 1 + _KEPT * self._fields

    def _attach(self, memory: Any) -> None:
        self._memory = memory
        words: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64)
        self._head = words[: self._header]
        self._marks = words[self._header :].reshape(2, _WORKERS + 1)

    def own(self) -> None:
        """Make it this process's own if it is another's and this is no DataLoader worker.

        It then goes on where the other's stood when this process got it.
        """
        if self._owner != os.getpid() and find_worker() is None:
            self._make(self._left, int(self._head[_GENERATION]) + 1)

    def leave(self) -> None:
        """A copy is about to be made: note where it would go on if it became another process's own."""
        self.own()
        start = self.next_pass()
        self._left = Base(start.epoch, start.position, start.base.settings, start.stop)

    def write(self, base: Base) -> None:
        """Set where the next pass starts; marks of earlier passes no longer count."""
        self._store(base, int(self._head[_GENERATION]) + 1)

    def adopt(self, base: Base, worker: Worker, unread: Start | None) -> None:
        """As :meth:`write`, by several workers that all load the same state: the first of a team counts.

        ``unread``: a pass that this worker has begun but not read from.
        """
        generation = int(self._head[_GENERATION])
        own = int(self._marks[_BEGUN, _place(worker)])
        others = any(_matches(mark, generation) and _team(mark) != worker.team for mark in self._marks[_BEGUN].tolist())
        fresh = unread is not None and unread.number == 0
        if self.base() != base or others or (_matches(own, generation) and not fresh):
            self._store(base, generation + 1)  # the same number, whichever worker writes it

    def _store(self, base: Base, generation: int) -> None:
        head = self._place_of(generation)
        head[_EPOCH], head[_POSITION] = base.epoch, base.position
        head[_STOP] = -1 if base.stop is None else base.stop
        head[_FIXED] = base.settings is not None
        if base.settings is not None:
            head[_SETTINGS:] = self._words.pack(base.settings)
        self._head[_GENERATION] = generation

    def _place_of(self, generation: int) -> npt.NDArray[np.int64]:
        first = 1 + generation % _KEPT * self._fields
        return self._head[first : first + self._fields]

    def base(self, generation: int | None = None) -> Base:
        """The base of a generation, by default of the latest."""
        head = self._place_of(int(self._head[_GENERATION]) if generation is None else generation).tolist()
        settings = self._words.unpack(head[_SETTINGS:]) if head[_FIXED] else None
        return Base(head[_EPOCH], head[_POSITION], settings, None if head[_STOP] < 0 else head[_STOP])

    def next_pass(self) -> Start:
        """Where the next pass starts, whoever begins it."""
        generation = int(self._head[_GENERATION])
        begun = max(_passes(mark, generation) for mark in self._marks[_BEGUN].tolist())
        return Start(generation, begun, self.base(generation))

    def begin(self, worker: Worker | None) -> Start:
        """Begin a pass, or join the one that this worker's team has begun."""
        start = self.next_pass()
        if worker is not None:  # looked for last: what another of the team marks meanwhile is joined, not followed
            start = self._of_team(worker) or start
        self.join(start, worker)
        return start

    def join(self, start: Start, worker: Worker | None) -> None:
        """Mark a pass as begun."""
        place, team = (_OWNER, _NO_TEAM) if worker is None else (_place(worker), worker.team)
        # One aligned 8-byte store: another process sees the old mark or the new one.
        self._marks[_BEGUN, place] = _mark(start, team)

    def _of_team(self, worker: Worker) -> Start | None:
        """The pass that others of this worker's team have begun, and it has not."""
        now, marks = int(self._head[_GENERATION]), self._marks[_BEGUN].tolist()
        latest = max((_begun(mark, now) for mark in marks if _team(mark) == worker.team), default=_NEVER)
        if latest <= _begun(marks[_place(worker)], now):
            return None
        generation, passes = latest
        return Start(generation, passes - 1, self.base(generation))

    def has_begun(self, start: Start, worker: Worker) -> bool:
        """Whether that pass was begun by this worker in this iteration."""
        return int(self._marks[_BEGUN, _place(worker)]) == _mark(start, worker.team)

    def is_latest(self, start: Start) -> bool:
        """Whether no other pass was begun, and no base set, since that one began."""
        now = self.next_pass()
        return (start.generation, start.number + 1) == (now.generation, now.number)

    def count_bad(self, worker: Worker, samples: int) -> None:
        """Count samples that were skipped as damaged."""
        self._marks[_BAD, worker.index % _WORKERS] += samples

    def bad(self) -> int:
        """Samples that this process and its workers skipped as damaged."""
        return int(self._marks[_BAD].sum())

    def __getstate__(self) -> dict[str, Any]:
        self.leave()
        if get_spawning_popen() is not None:
            return {"words": self._words, "memory": self._memory, "owner": self._owner, "left": self._left}
        return {"words": self._words, "left": self._left}  # a copy for later or elsewhere shares nothing

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "memory" in state:
            self._words = state["words"]
            self._attach(state["memory"])
            self._owner, self._left = state["owner"], state["left"]
            _remember(self)
        else:
            self.__init__(state["left"], state["words"])  # type: ignore[misc]


def _mark(start: Start, team: int) -> int:
    return (start.generation & 0xFFFF) << 46 | (start.number + 1 & 0x3FFFFF) << 24 | team


def _matches(mark: int, generation: int) -> bool:
    return mark != 0 and mark >> 46 == generation & 0xFFFF


def _passes(mark: int, generation: int) -> int:
    return mark >> 24 & 0x3FFFFF if _matches(mark, generation) else 0


def _begun(mark: int, now: int) -> tuple[int, int]:
    """The generation of the pass that is marked, and its number there from 1, if that generation's base is kept."""
    generation = now - (now - (mark >> 46) & 0xFFFF)
    return (generation, _passes(mark, generation)) if mark and now - generation < _KEPT else _NEVER


def _team(mark: int) -> int:
    return mark & 0xFFFFFF


def _place(worker: Worker) -> int:
    """Each team has places of its own, so iterations that are open at one time keep out of each other's way."""
    return (worker.team + worker.index) % _WORKERS


# Cells of this process that are in use: those that a process about to be forked will share.
_live: dict[int, weakref.ref[EpochCell]] = {}


def _remember(cell: EpochCell) -> None:
    number = id(cell)
    _live[number] = weakref.ref(cell, lambda _: _live.pop(number, None))


def _before_fork() -> None:
    for reference in list(_live.values()):
        cell = reference()
        if cell is not None:
            cell.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
