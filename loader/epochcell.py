"""What a data set and its DataLoader workers must agree on: from where the next pass starts.

A few integers in memory that forked and spawned workers share with the process that made them. The process that owns
the data set writes the *base* (``set_epoch``, ``load_state_dict``); workers read it when a pass starts and only ever
write their own *marks*: which pass they have started and finished. From base and marks follows the pass that comes
next, so epochs advance by themselves in every worker mode, without a lock and whoever dies at whatever moment:

    a pass is finished when all of its workers have finished it; then the next one is the next epoch from its start.

A pass that was broken off begins again where it began. (Workers run ahead of the user: a pass broken off in its last
``prefetch_factor * num_workers`` batches may have been finished by all of its workers and count as such.)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import numpy.typing as npt

from .epochs import OrderSettings
from .workers import Worker

_HEADER = 8
_BANKS = 16  # ranks that inherited one cell from their parent keep their marks apart
_WORKERS = 512
_GENERATION, _EPOCH, _POSITION, _SEED, _LANES, _BLOCKS, _FLAGS, _STOP = range(8)
_STARTED, _FINISHED, _BAD = range(3)


@dataclass(frozen=True)
class Base:
    """Where the pass after a ``set_epoch`` or ``load_state_dict`` starts.

    ``settings`` of the order, if a state fixed them. ``stop``: where that pass ends, if it begins within a batch.
    """

    epoch: int = 0
    position: int = 0
    settings: OrderSettings | None = None
    stop: int | None = None


@dataclass(frozen=True)
class Start:
    """Where one pass starts. ``number`` counts the passes finished since the base of this ``generation``."""

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
    """See the module's text. ``rank`` chooses the bank of marks; ranks on one host rarely share a cell at all."""

    def __init__(self, base: Base | None = None) -> None:
        self._attach(RawArray("q", _HEADER + 3 * _BANKS * _WORKERS))
        self.owner = os.getpid()
        self.write(base or Base())

    def _attach(self, memory: Any) -> None:
        self._memory = memory
        words: npt.NDArray[np.int64] = np.frombuffer(memory, np.int64)
        self._head = words[:_HEADER]
        self._marks = words[_HEADER:].reshape(3, _BANKS, _WORKERS)

    def write(self, base: Base) -> None:
        """Set where the next pass starts; marks of earlier passes no longer count."""
        generation = int(self._head[_GENERATION])
        self._store(base)
        self._head[_GENERATION] = generation + 1

    def adopt(self, base: Base, rank: int) -> None:
        """As :meth:`write`, by several workers that all load the same state: the first one counts."""
        generation = int(self._head[_GENERATION])
        if self.base() != base or self._finished(generation, rank):
            self._store(base)
            self._head[_GENERATION] = generation + 1  # the same number, whichever worker writes it

    def _store(self, base: Base) -> None:
        head = self._head
        settings = base.settings
        head[_EPOCH], head[_POSITION] = base.epoch, base.position
        head[_STOP] = -1 if base.stop is None else base.stop
        head[_FLAGS] = 0
        if settings is not None:
            large = settings.seed >= 1 << 63
            head[_SEED] = settings.seed - (large << 64)
            head[_LANES], head[_BLOCKS] = settings.lanes, settings.block_shards
            flags = (settings.shuffle, settings.exchange, settings.balance == "samples", settings.cut, large, True)
            head[_FLAGS] = sum(flag << bit for bit, flag in enumerate(flags))

    def base(self) -> Base:
        head = self._head.tolist()
        shuffle, exchange, samples, cut, large, fixed = (bool(head[_FLAGS] >> bit & 1) for bit in range(6))
        settings = None
        if fixed:
            settings = OrderSettings(
                seed=head[_SEED] + (large << 64),
                lanes=head[_LANES],
                block_shards=head[_BLOCKS],
                shuffle=shuffle,
                exchange=exchange,
                balance="samples" if samples else "bytes",
                cut=cut,
            )
        return Base(head[_EPOCH], head[_POSITION], settings, None if head[_STOP] < 0 else head[_STOP])

    def next_pass(self, rank: int) -> Start:
        """Where the next pass of this rank starts."""
        generation = int(self._head[_GENERATION])
        return Start(generation, self._finished(generation, rank), self.base())

    def being_read(self, rank: int) -> bool:
        """Whether workers have started the pass that comes next by the marks, hence have not all finished it."""
        start = self.next_pass(rank)
        marks = self._marks[_STARTED, rank % _BANKS].tolist()
        return any(_matches(mark, start.generation) and _passes(mark) == start.number + 1 for mark in marks)

    def started(self, start: Start, rank: int, worker: Worker) -> None:
        """A worker begins a pass."""
        self._mark(_STARTED, start, rank, worker)

    def finished(self, start: Start, rank: int, worker: Worker) -> None:
        """A worker has yielded all of its part of a pass."""
        self._mark(_FINISHED, start, rank, worker)

    def count_bad(self, rank: int, worker: Worker, samples: int) -> None:
        """Count samples that were skipped as damaged."""
        self._marks[_BAD, rank % _BANKS, worker.index % _WORKERS] += samples

    def bad(self, rank: int) -> int:
        """Samples that this rank's workers skipped as damaged."""
        return int(self._marks[_BAD, rank % _BANKS].sum())

    def _mark(self, kind: int, start: Start, rank: int, worker: Worker) -> None:
        # One aligned 8-byte store: another process sees the old mark or the new one.
        mark = ((start.generation & 0xFFFF) << 46) | ((start.number + 1) << 16) | min(worker.count, _WORKERS)
        place = (kind, rank % _BANKS, worker.index % _WORKERS)
        held = int(self._marks[place])
        if not _matches(held, start.generation) or _passes(held) <= start.number + 1:  # an old iterator may end late
            self._marks[place] = mark

    def _finished(self, generation: int, rank: int) -> int:
        marks = [m if _matches(m, generation) else 0 for m in self._marks[_FINISHED, rank % _BANKS].tolist()]
        most = max(map(_passes, marks))
        if most == 0:
            return 0
        # Whoever finished pass number `most` could only start it when the one before was finished.
        latest = [mark for mark in marks if _passes(mark) == most]
        whole = any(marks[: mark & 0xFFFF] == [mark] * (mark & 0xFFFF) for mark in set(latest))
        return most if whole else most - 1

    def __getstate__(self) -> dict[str, Any]:
        if get_spawning_popen() is not None:
            return {"memory": self._memory, "owner": self.owner}
        return {"base": self.base()}  # a copy for later or elsewhere shares nothing

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "memory" in state:
            self._attach(state["memory"])
            self.owner = state["owner"]
        else:
            self.__init__(state["base"])  # type: ignore[misc]


def _matches(mark: int, generation: int) -> bool:
    return mark >> 46 == generation & 0xFFFF


def _passes(mark: int) -> int:
    return mark >> 16 & 0x3FFFFFFF
