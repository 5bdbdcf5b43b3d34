"""Work done ahead by threads, and handed out in order: the engine under :class:`loader.Loader`.

Threads take items from one source in turn, work on them side by side and leave the results in a window; the consumer
takes them in the order of the items. The window is bounded by the memory its results take, so a slow consumer stops the
threads and a fast one never finds more than it can hold.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import DeadlineExceeded

Item = TypeVar("Item")
Result = TypeVar("Result")

STOP_SECONDS = 10.0
"""How long stopping waits for a thread that is in the middle of an item; afterwards it is left to end by itself."""
PATIENCE = 1.0
"""How much of that it waits before it has what threads wait for interrupted."""
_PAUSE = 1.0


@dataclass
class StageTimes:
    """Seconds since the pass began, summed over threads where several work at once."""

    planning: float = 0.0
    """Deciding what comes next, and asking for it to be fetched."""
    working: float = 0.0
    """Reading, decoding and putting batches together."""
    full: float = 0.0
    """Threads that had nothing to do because enough was ready."""
    empty: float = 0.0
    """The consumer waiting for a batch that was not ready."""


@dataclass(frozen=True)
class Window:
    """How much may be ready, or in work, ahead of the consumer. One item is always allowed."""

    items: int
    nbytes: int


@dataclass
class _Done(Generic[Result]):
    result: Result | None
    error: BaseException | None
    cost: int


class Pipeline(Generic[Item, Result]):
    """An iterator of ``work(item)`` for the items of ``source``, in their order.

    ``source`` is advanced by one thread at a time, ``work`` called by several at once. ``cost``: the bytes that a
    result holds. An exception of either is raised where its result would have come, and ends the iteration. Threads
    start with the first ``next``; :meth:`close` stops them. ``interrupt``: called at most once, where stopping has to
    wait: ends what ``work`` or ``source`` may be waiting for.
    """

    def __init__(
        self,
        source: Iterator[Item],
        work: Callable[[Item], Result],
        *,
        threads: int,
        window: Window,
        cost: Callable[[Result], int],
        name: str = "loader",
        clock: Clock = SYSTEM_CLOCK,
        interrupt: Callable[[], None] | None = None,
    ) -> None:
        self._interrupt = interrupt
        self._source = source
        self._work = work
        self._cost = cost
        self._count = threads
        self._window = window
        self._name = name
        self._clock = clock
        self._planning = threading.Lock()  # held while the source is advanced
        self._state = threading.Lock()  # guards all that follows; nobody is woken who would only wait again
        self._ready = threading.Condition(self._state)  # the consumer, waiting for the next result
        self._room = threading.Condition(self._state)  # the thread that plans, waiting to begin one more item
        self._waiting = False  # whether there is such a thread
        self._done: dict[int, _Done[Result]] = {}
        self._begun = 0  # items taken from the source
        self._given = 0  # results handed out
        self._held = 0  # bytes that are ready
        self._largest = 0  # the most that one result took: what an item in work is expected to take
        self._end: int | None = None  # the number of items, once the source has ended
        self._stopped = False
        self._threads: list[threading.Thread] = []
        self.times = StageTimes()

    def __iter__(self) -> Iterator[Result]:
        return self

    def __next__(self) -> Result:
        if not self._threads and not self._stopped:
            self._start()
        began = self._clock.monotonic()
        with self._state:
            while True:
                done = self._done.pop(self._given, None)
                if done is not None:
                    break
                if self._stopped or (self._end is not None and self._given >= self._end):
                    raise StopIteration
                self._ready.wait(_PAUSE)
                if not any(thread.is_alive() for thread in self._threads) and self._given not in self._done:
                    if self._end is not None and self._given >= self._end:
                        raise StopIteration
                    raise DeadlineExceeded("the loader's threads are gone", hint="was the process forked meanwhile?")
            self._given += 1
            self._held -= done.cost
            self.times.empty += self._clock.monotonic() - began
            self._admit()
        if done.error is not None:
            self.close()
            raise done.error
        assert done.result is not None
        return done.result

    @property
    def cut_off(self) -> bool:
        """Whether it was stopped before its last result was handed out."""
        return self._stopped and (self._end is None or self._given < self._end)

    def _start(self) -> None:
        # Threads in the middle of C++ code when the interpreter ends take the process down with them; finalizers that
        # are left run before that. The threads keep this object, so it is there until they have ended.
        weakref.finalize(self, _close, weakref.ref(self))
        for number in range(self._count):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        while True:
            with self._planning:
                if not self._may_begin():
                    return
                began = self._clock.monotonic()
                number = self._begun
                try:
                    item = next(self._source)
                except StopIteration:
                    self._finish(number)
                    return
                except BaseException as e:  # noqa: BLE001 - whatever it is, it is raised to the consumer
                    e.add_note("in the loader's planning stage")
                    with self._state:
                        self._take_in(number, _Done(None, e, 0))
                    self._finish(number + 1)
                    return
                self._begun += 1
                planned = self._clock.monotonic()
            try:
                result = self._work(item)
                done = _Done(result, None, self._cost(result))
                del result
            except BaseException as e:  # noqa: BLE001 - whatever it is, it is raised to the consumer
                e.add_note("in the loader's reading stage")
                done = _Done(None, _no_end(e), 0)
            del item
            with self._state:
                self.times.planning += planned - began
                self.times.working += self._clock.monotonic() - planned
                self._take_in(number, done)
            del done

    def _may_begin(self) -> bool:
        """Wait until one more item fits the window; False when the pipeline has stopped or its source has ended."""
        began = self._clock.monotonic()
        with self._state:
            while not self._stopped and self._end is None and not self._fits():
                self._waiting = True
                self._room.wait()
            self._waiting = False
            self.times.full += self._clock.monotonic() - began
            return not self._stopped and self._end is None

    def _fits(self) -> bool:
        ahead = self._begun - self._given
        in_work = ahead - len(self._done)
        expected = self._held + (in_work + 1) * self._largest
        return ahead == 0 or (ahead < self._window.items and expected <= self._window.nbytes)

    def _admit(self) -> None:
        """Wake the thread that waits for room, if there is some now. The state is locked."""
        if self._waiting and self._fits():
            self._waiting = False
            self._room.notify()

    def _take_in(self, number: int, done: _Done[Result]) -> None:
        """A result is there. The state is locked."""
        if not self._stopped:
            self._done[number] = done
            self._held += done.cost
            self._largest = max(self._largest, done.cost)
            self._admit()
        if number == self._given:
            self._ready.notify()

    def _finish(self, items: int) -> None:
        with self._state:
            self._end = items
            self._ready.notify()
            self._room.notify()

    def stop(self) -> None:
        """Drop what is ready, and let the threads end once they are through with what they do. Idempotent."""
        with self._state:
            self._stopped = True
            self._done.clear()
            self._held = 0
            self._ready.notify()
            self._room.notify()

    def close(self, until: float | None = None) -> None:
        """Stop the threads and drop what is ready. Idempotent; waits :data:`STOP_SECONDS` for a thread at work, or
        until that moment of the clock."""
        self.stop()
        if until is None:
            until = self._clock.monotonic() + STOP_SECONDS
        interrupt, self._interrupt = self._interrupt, None  # once: later there may be another pass
        if interrupt is not None and self._join(min(self._clock.monotonic() + PATIENCE, until)):
            interrupt()
        self._join(until)

    def _join(self, until: float) -> bool:
        """Wait for the threads; whether some are left."""
        own = threading.current_thread()
        for thread in self._threads:
            if thread is not own and thread.is_alive():
                thread.join(max(until - self._clock.monotonic(), 0.0))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return any(thread is not own for thread in self._threads)


def close_all(*pipelines: Pipeline[Any, Any], clock: Clock = SYSTEM_CLOCK) -> None:
    """Close several, of which each may wait for those before it, within the time that one may take."""
    for pipeline in pipelines:
        pipeline.stop()
    until = clock.monotonic() + STOP_SECONDS
    for pipeline in pipelines:
        pipeline.close(until)


def _no_end(error: BaseException) -> BaseException:
    """An error that the consumer does not take for the end of the iteration."""
    if not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError("StopIteration was raised in the loader's reading stage (by a collate_fn?)")
    wrapped.__cause__ = error
    return wrapped


def _close(pipeline: weakref.ref[Any]) -> None:
    running = pipeline()
    if running is not None:
        running.close()
