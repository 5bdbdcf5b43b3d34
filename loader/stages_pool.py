"""Processes that a stage's function runs in: :class:`ProcessPool`.

Each process works on one list of samples at a time, for the thread that asked; there are never more lists under way
than processes, so memory is bounded and results come back to who asked, in order. Processes are started when they are
first needed, by ``spawn``: the function must be importable, and a script needs its ``if __name__ == "__main__"``.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from cachefs.errors import ConfigError, DeadlineExceeded, NearflashError

from .stages_channel import Channel, Closed
from .stages_worker import Failure, work

GRACE = 2.0
"""Seconds for a process to end by itself once it is hung up on."""


class ProcessPool:
    """Up to ``processes`` processes that run ``function``; any thread may :meth:`call`. ``what``: its stage, for
    messages; ``timeout``: seconds that one call may take."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        batched: bool,
        processes: int,
        what: str,
        timeout: float,
    ) -> None:
        self._arguments = (function, batched)
        self._most = processes
        self._what = what
        self._timeout = timeout
        self._changed = threading.Condition()
        self._all: set[_Process] = set()
        self._idle: list[_Process] = []
        self._closings = 0
        self._owner = os.getpid()
        weakref.finalize(self, _end_own, self._all, self._owner)

    def call(self, samples: list[Any]) -> list[Any] | Failure:
        """What the function makes of the samples, by the process that is free first.

        Raises ``NearflashError`` where the process was killed or the pool closed, ``DeadlineExceeded`` where it took
        too long, ``ConfigError`` for samples or a function that cannot be sent.
        """
        process = self._take()
        try:
            answer: list[Any] | Failure = process.ask(samples, self._timeout)
        except BaseException as e:
            self._drop(process, 0.0 if isinstance(e, TimeoutError) else GRACE)
            raise self._told(process, e) from e
        with self._changed:
            if process in self._all:
                self._idle.append(process)
                self._changed.notify()
        return answer

    def close(self) -> None:
        """End all processes, those at work too. Idempotent; the pool may be used again."""
        with self._changed:
            self._closings += 1
            processes = list(self._all)
            self._all.clear()
            self._idle.clear()
            self._changed.notify_all()
        _end(processes)

    def _take(self) -> _Process:
        """A process that is free, for the caller alone. Whoever has one gives it back by a deadline."""
        with self._changed:
            closings = self._closings
            if self._owner != os.getpid():  # of the process that this one was forked from
                self._owner = os.getpid()
                self._all.clear()
                self._idle.clear()
            while self._closings == closings:
                if self._idle:
                    return self._idle.pop()
                if len(self._all) < self._most:
                    process = self._started()
                    self._all.add(process)
                    return process
                self._changed.wait()
        raise NearflashError(f"the processes were ended {self._what}")

    def _started(self) -> _Process:
        try:
            return _Process(*self._arguments)
        except (pickle.PicklingError, AttributeError, TypeError) as e:
            raise ConfigError(
                f"the function cannot be sent to a process, {self._what}: {e}",
                hint="define it at the top of a module, or use processes=0",
            ) from e

    def _drop(self, process: _Process, grace: float) -> None:
        with self._changed:
            self._all.discard(process)
            self._changed.notify()
        process.end(grace)

    def _told(self, process: _Process, error: BaseException) -> BaseException:
        if isinstance(error, Closed):
            return NearflashError(
                f"process {process.pid} {process.fate} {self._what}",
                hint="if it never began, the script may lack its if __name__ == '__main__'",
            )
        if isinstance(error, TimeoutError):
            return DeadlineExceeded(f"process {process.pid} took more than {self._timeout:.0f} s {self._what}")
        if isinstance(error, pickle.PicklingError | AttributeError | TypeError):
            return ConfigError(f"samples cannot be sent to a process, {self._what}: {error}", hint="use processes=0")
        return error


class _Process:
    """One process, used by one thread at a time."""

    def __init__(self, function: Callable[[Any], Any], batched: bool) -> None:
        here, there = socket.socketpair()
        self._channel = Channel(here)
        try:
            self._process = multiprocessing.get_context("spawn").Process(
                target=work, args=(there, function, batched), name="nearflash-stage", daemon=True
            )
            self._process.start()
        except BaseException:
            self._channel.close()
            raise
        finally:
            there.close()
        self._ending = threading.Lock()
        self.pid = self._process.pid
        self.fate = ""
        """How it ended, once it has."""

    def ask(self, samples: list[Any], timeout: float) -> Any:
        self._channel.send(samples, timeout)
        answers = self._channel.fileno()
        if answers < 0:
            raise Closed("the pool was closed")
        if not wait([answers, self._process.sentinel], timeout):
            raise TimeoutError
        return self._channel.receive(timeout)

    def hang_up(self) -> None:
        """Let it end by itself. Any thread; idempotent."""
        self._channel.close()

    def end(self, grace: float = GRACE) -> None:
        """End it, by force where it takes longer. Any thread; idempotent."""
        self.hang_up()
        with self._ending:
            if self.fate:
                return
            self._process.join(grace)
            forced = self._process.exitcode is None
            if forced:
                self._process.kill()
                self._process.join()
            self.fate = "was ended" if forced else _fate(self._process.exitcode)
            self._process.close()


def _fate(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"


def _end_own(processes: set[_Process], owner: int) -> None:
    """What is left of a pool that nobody has any more, in the process that started them."""
    if os.getpid() == owner:
        _end(processes)


def _end(processes: set[_Process] | list[_Process]) -> None:
    """End several at once: each is hung up on before any is waited for."""
    for process in processes:
        process.hang_up()
    for process in processes:
        process.end()
