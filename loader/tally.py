"""Sample counts that become known while a data set is read: who counts, in what order, and what is done with errors.

Shards are counted by a few threads, those first that are needed first. The threads are made when there is something to
count and end when there is nothing; a fork leaves none behind. Processes that were forked from one another share what
they found; a sample index that is kept beside the shard in the node's cache spares all others the walk as well.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import numpy as np

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import DataError, DeadlineExceeded, EmptyDataset, FormatError

from .buffers import IndexCache
from .manifest import derivation
from .opening import open_mapped
from .permute import Int64s
from .reader import DataWarning
from .shelf import SharedNumbers
from .workers import ALONE, find_worker

if TYPE_CHECKING:
    from cachefs.client import Client

    from .counting import OnError
    from .manifest import Manifest

WAIT: Final = 600.0
"""Seconds without any new count after which waiting ends; a thread that is at what is waited for has deadlines."""
_THREADS: Final = 4
_AHEAD: Final = 16
_PAUSE: Final = 0.05
_UNKNOWN: Final = 0
_DAMAGED: Final = -1


class Tally:
    """The counts of a manifest's shards: those it has, and those that are found from now on."""

    def __init__(
        self,
        manifest: Manifest,
        client: Client,
        table: SharedNumbers,
        *,
        on_error: OnError,
        indexes: IndexCache,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._manifest = manifest
        self._client = client
        self._on_error = on_error
        self._indexes = indexes
        self._clock = clock
        self._numbers = table.array(len(manifest.shards))  # count + 1, so that 0 is not known
        told = (manifest.counts >= 0) & (self._numbers == _UNKNOWN)
        self._numbers[told] = manifest.counts[told] + 1
        for number in manifest.damaged:
            self._numbers[number] = _DAMAGED
        self._desks = {os.getpid(): _Desk()}

    @property
    def known(self) -> int:
        """How many shards are counted."""
        return int(np.count_nonzero(self._numbers))

    @property
    def complete(self) -> bool:
        return self.known == len(self._numbers)

    def counts(self) -> Int64s:
        """Samples of each shard, -1 where it is not known; 0 for a damaged shard that is skipped."""
        numbers: Int64s = self._numbers.copy()
        return np.where(numbers == _DAMAGED, 0, numbers - 1)

    def of(self, number: int) -> int:
        """Samples of one shard, -1 where that is not known."""
        value = int(self._numbers[number])
        return 0 if value == _DAMAGED else value - 1

    def damaged(self) -> dict[int, DataError]:
        """Why shards count as empty."""
        errors = self._desk().damaged
        return {
            number: errors.get(number)
            or FormatError("another process found it damaged", url=self._manifest.stat(number).url)
            for number in np.flatnonzero(self._numbers == _DAMAGED).tolist()
        }

    @property
    def skipped(self) -> int:
        """Entries that belong to no sample, in the shards that this process counted."""
        return self._desk().skipped

    def want(self, who: object, shards: Int64s) -> None:
        """Let these be counted, in this order, in place of what ``who`` wanted before."""
        desk = self._desk()
        with desk.changed:
            own, others = _shared_out(shards)
            desk.wishes[id(who)] = deque([*own, *others])
            self._hire(desk)
        desk.say()

    def forget(self, who: object) -> None:
        """What ``who`` wanted is no longer needed."""
        desk = self._desk()
        with desk.changed:
            desk.wishes.pop(id(who), None)

    def need(self, shards: Int64s) -> None:
        """Wait until these are counted, before all that is merely wanted.

        Raises what is wrong with one of them: a damaged shard's ``DataError``, or what the client raises; and
        ``DeadlineExceeded`` after :data:`WAIT` seconds in which nothing was counted and no thread here was at one of
        these. Of several errors it is the first in their order, the same in all processes. ``EmptyDataset`` where all
        are counted and none has a sample.
        """
        desk, key = self._desk(), threading.get_ident()
        known, until = -1, 0.0
        own, _ = _shared_out(shards[self._numbers[shards] == _UNKNOWN])
        try:
            with desk.changed:
                desk.urgent[key] = deque(own)
                desk.try_again(shards)
                while True:
                    self._raise(desk, shards)
                    missing = shards[self._numbers[shards] == _UNKNOWN]
                    if not missing.size:
                        break
                    if self.known > known or not desk.busy.isdisjoint(missing.tolist()):
                        known, until = self.known, self._clock.monotonic() + WAIT
                    elif self._clock.monotonic() >= until:
                        raise DeadlineExceeded(
                            f"waited {WAIT:.0f} s for the samples of {len(missing)} shard(s) to be counted",
                            url=self._manifest.stat(int(missing[0])).url,
                        )
                    left = (n for n in missing.tolist() if n not in desk.busy and n not in desk.errors)
                    desk.urgent[key] = desk.urgent[key] or deque(left)
                    self._hire(desk)
                    desk.changed.wait(_PAUSE)  # another process may be the one that finds it
        finally:
            with desk.changed:
                desk.urgent.pop(key, None)
        desk.say()
        if self.complete and not (self._numbers > 1).any():
            stats, hint = self._manifest.shards, derivation(self._manifest.format) or None
            raise EmptyDataset(f"no sample in {len(stats)} shard(s), the first is {stats[0].url}", hint=hint)

    def count(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Count all that is left, in listing order; ``progress(counted, shards)`` is told now and then."""
        left = np.flatnonzero(self._numbers == _UNKNOWN)
        self.want(left, left)
        try:
            for start in range(0, len(left), _AHEAD):
                self.need(left[start : start + _AHEAD])
                if progress is not None:
                    progress(self.known, len(self._numbers))
        finally:
            self.forget(left)

    def _desk(self) -> _Desk:
        pid = os.getpid()
        desk = self._desks.get(pid)
        return self._desks.setdefault(pid, _Desk()) if desk is None else desk

    def _raise(self, desk: _Desk, shards: Int64s) -> None:
        for number in shards.tolist():
            error = desk.errors.get(number)
            if error is not None:
                if not isinstance(error, DataError):
                    del desk.errors[number]  # it may work the next time
                raise error.with_traceback(None)
            if self._numbers[number] == _UNKNOWN:
                return  # what may be wrong with it comes before the others' errors

    def _hire(self, desk: _Desk) -> None:
        """Let threads work, within the desk's lock."""
        while desk.threads < min(_THREADS, sum(map(len, desk.queues()))):
            thread = threading.Thread(target=self._work, args=(desk,), name="nearflash-count", daemon=True)
            try:
                thread.start()  # it takes something to do once it has the lock, so it cannot end before it is counted
            except (RuntimeError, MemoryError):
                if not desk.threads:
                    raise
                return
            desk.threads += 1

    def _work(self, desk: _Desk) -> None:
        while True:
            with desk.changed:
                number = desk.take(self._numbers)
                if number is None:
                    desk.threads -= 1
                    return
                soon = desk.soon(self._numbers)
            self._one(desk, number, soon)

    def _one(self, desk: _Desk, number: int, soon: list[int]) -> None:
        error: Exception | None = None
        value = _UNKNOWN
        try:
            if soon and not self._manifest.format.folder:
                self._client.prefetch([self._manifest.stat(n) for n in soon])
            value = self._counted(desk, number) + 1
        except Exception as e:  # noqa: BLE001 - raised again by whoever needs this shard
            error = e
            if isinstance(e, DataError) and self._on_error == "skip":
                value = _DAMAGED
        with desk.changed:
            desk.busy.discard(number)
            if value == _DAMAGED:
                assert isinstance(error, DataError)
                desk.damaged[number] = error
                desk.notes.append(f"a damaged shard counts as empty: {error}")
            elif error is not None:
                desk.errors[number] = error
            if value != _UNKNOWN:
                self._numbers[number] = value
            desk.changed.notify_all()

    def _counted(self, desk: _Desk, number: int) -> int:
        index = self._indexes.get(number)
        if index is None:
            stat = self._manifest.stat(number)
            shard = open_mapped(self._client, stat.url, self._manifest.format, version=stat.version, size=stat.size)
            try:
                index = shard.index
            finally:
                shard.close()
            self._indexes.put(number, index)
            with desk.changed:
                desk.skipped += index.skipped
                desk.notes += [f"{stat.url}: {note}" for note in index.notes]
        return len(index)


class _Desk:
    """What one process has to count; used within its lock."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.urgent: dict[int, deque[int]] = {}
        self.wishes: dict[int, deque[int]] = {}
        self.busy: set[int] = set()
        self.errors: dict[int, Exception] = {}
        self.damaged: dict[int, DataError] = {}
        self.notes: list[str] = []
        self.skipped = 0
        self.threads = 0
        self._asked: set[int] = set()
        self._said = False

    def queues(self) -> Iterable[deque[int]]:
        return [*self.urgent.values(), *self.wishes.values()]

    def take(self, numbers: Int64s) -> int | None:
        """The shard to count next."""
        for queue in self.queues():
            while queue:
                number = queue.popleft()
                if numbers[number] == _UNKNOWN and number not in self.busy and number not in self.errors:
                    self.busy.add(number)
                    return number
        return None

    def soon(self, numbers: Int64s) -> list[int]:
        """Shards that are counted soon and have not been asked for."""
        out: list[int] = []
        for queue in self.queues():
            for number in list(queue)[: _AHEAD - len(out)]:
                if number not in self._asked and numbers[number] == _UNKNOWN:
                    out.append(number)
        self._asked.update(out)
        return out

    def try_again(self, shards: Int64s) -> None:
        """Forget what went wrong when these were counted ahead, unless it is the data that is wrong."""
        for number in shards.tolist():
            if not isinstance(self.errors.get(number), DataError):
                self.errors.pop(number, None)

    def say(self) -> None:
        """Pass on the first note of the shards that were counted."""
        with self.changed:
            notes, self.notes = self.notes, []
            said, self._said = self._said, self._said or bool(notes)
        if notes and not said:
            warnings.warn(f"{notes[0]} (further notes on other shards are left out)", DataWarning, stacklevel=4)


def _shared_out(shards: Int64s) -> tuple[list[int], list[int]]:
    """Those that are this DataLoader worker's to count first, and those that are another's, each in order."""
    worker = find_worker() or ALONE
    own = shards % worker.count == worker.index
    return shards[own].tolist(), shards[~own].tolist()
