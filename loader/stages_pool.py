"""Processes that a stage's function runs in: :class:`ProcessPool`.

Each process works on one list of samples at a time, for the thread that asked; there are never more lists under way
than processes, so memory is bounded and results come back to who asked, in order. Threads that wait for a process get
one in the order in which they asked. Processes are started when they are first needed, by ``spawn``: the function must
be importable, and a script needs its ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from cachefs.errors import ConfigError, DeadlineExceeded, NearflashError

from .stages_channel import Closed
from .stages_process import GRACE, START, NotStarted, StageProcess, Unreadable, Unsendable
from .stages_worker import Failure

_SLACK = 60.0
"""Seconds, beyond what a call may take, in which a process must come free."""


class Process(Protocol):
    """What the pool needs of a process: :class:`loader.stages_process.StageProcess`."""

    pid: int | None
    hung_up: bool
    fate: str

    @property
    def began(self) -> bool: ...

    def ask(self, samples: list[Any], timeout: float) -> Any: ...

    def hang_up(self) -> None: ...

    def end(self, grace: float = GRACE) -> None: ...


class ProcessPool:
    """Up to ``processes`` processes that run ``function``; any thread may :meth:`call`. ``what``: its stage, for
    messages; ``timeout``: seconds that one call may take; ``start`` starts a process."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        batched: bool,
        processes: int,
        what: str,
        timeout: float,
        start: Callable[[Callable[[Any], Any], bool], Process] = StageProcess,
    ) -> None:
        self._arguments = (function, batched)
        self._start = start
        self._most = processes
        self._what = what
        self._timeout = timeout
        self._changed = threading.Condition()
        self._all: set[Process] = set()
        self._idle: list[Process] = []
        self._queue: deque[object] = deque()  # the threads that wait, in the order in which they came
        self._shut = False
        self._owner = os.getpid()
        weakref.finalize(self, _end_own, self._all, self._owner)

    def call(self, samples: list[Any]) -> list[Any] | Failure:
        """What the function makes of the samples, by the process that is free first.

        Raises ``NearflashError`` where the process was killed or the pool closed, ``DeadlineExceeded`` where it took
        too long, ``ConfigError`` for samples, results or a function that cannot be sent.
        """
        process = self._take()
        try:
            answer: list[Any] | Failure = process.ask(samples, self._timeout)
        except BaseException as e:
            cut_short = process.hung_up or isinstance(e, TimeoutError)
            self._drop(process, 0.0 if cut_short else GRACE)
            told = self._told(process, e)
            if told is None:
                raise
            raise told from e
        with self._changed:
            if process in self._all:
                self._idle.append(process)
                self._changed.notify_all()
        return answer

    @property
    def waiting(self) -> int:
        """How many threads wait for a process."""
        with self._changed:
            return len(self._queue)

    def open(self) -> None:
        """Let it be called again after :meth:`close` or :meth:`interrupt`."""
        with self._changed:
            self._shut = False

    def interrupt(self) -> None:
        """Refuse all calls, those under way too, until it is opened again. Processes without work are kept."""
        with self._changed:
            busy = self._all.difference(self._idle)
            self._shut = True
            self._changed.notify_all()
        for process in busy:
            process.hang_up()

    def close(self) -> None:
        """End all processes, those at work too, and refuse calls until it is opened again. Idempotent."""
        with self._changed:
            processes = list(self._all)
            self._shut = True
            self._all.clear()
            self._idle.clear()
            self._changed.notify_all()
        _end(processes)

    def _take(self) -> Process:
        """A process that is free, for the caller alone. Whoever has one gives it back by a deadline."""
        most, ticket = START + self._timeout + _SLACK, object()
        with self._changed:
            if self._owner != os.getpid():  # of the process that this one was forked from
                self._owner = os.getpid()
                self._all.clear()
                self._idle.clear()
                self._queue.clear()
            self._queue.append(ticket)
            try:
                while not self._shut:
                    if self._queue[0] is ticket and self._idle:
                        return self._idle.pop()
                    if self._queue[0] is ticket and len(self._all) < self._most:
                        process = self._started()
                        self._all.add(process)
                        return process
                    if not self._changed.wait(most):  # nobody gave one back in all that time
                        raise DeadlineExceeded(f"no process was free within {most:g} s {self._what}")
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()
        raise self._closed()

    def _started(self) -> Process:
        try:
            return self._start(*self._arguments)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ConfigError(
                f"the function cannot be sent to a process, {self._what}: {e}",
                hint="define it at the top of a module, or use processes=0",
            ) from e

    def _drop(self, process: Process, grace: float) -> None:
        with self._changed:
            self._all.discard(process)
            self._changed.notify_all()
        process.end(grace)

    def _closed(self) -> NearflashError:
        return NearflashError(f"the loader was closed, or its pass ended, {self._what}")

    def _told(self, process: Process, error: BaseException) -> BaseException | None:
        """What is raised in place of an error; ``None``: itself."""
        if isinstance(error, Closed):
            if process.hung_up:
                return self._closed()
            hint = None
            if not process.began:
                hint = "it had not begun: see what it printed; the script may lack its if __name__ == '__main__'"
            return NearflashError(f"process {process.pid} {process.fate} {self._what}", hint=hint)
        if isinstance(error, NotStarted):
            return DeadlineExceeded(f"process {process.pid} had not begun after {START:g} s {self._what}")
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(
                f"process {process.pid} took more than {self._timeout:g} s {self._what}", hint="raise the timeout="
            )
        if isinstance(error, Unsendable):
            return ConfigError(f"samples cannot be sent to a process, {self._what}: {error}", hint="use processes=0")
        if isinstance(error, Unreadable):
            return ConfigError(
                f"what the function made cannot be unpickled, {self._what}: {error}", hint="use processes=0"
            )
        return None


def _end_own(processes: set[Process], owner: int) -> None:
    """What is left of a pool that nobody has any more, in the process that started them."""
    if os.getpid() == owner:
        _end(processes)


def _end(processes: set[Process] | list[Process]) -> None:
    """End several at once: each is hung up on before any is waited for."""
    for process in processes:
        process.hang_up()
    until = time.monotonic() + GRACE
    for process in processes:
        process.end(max(until - time.monotonic(), 0.0))
