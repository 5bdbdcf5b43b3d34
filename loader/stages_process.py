"""One process that a stage's function runs in: started, asked and ended by :class:`StageProcess`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

from .stages_channel import Channel, Closed
from .stages_worker import work

GRACE = 2.0
"""Seconds for a process to end by itself once it is hung up on."""
START = 120.0
"""Seconds for a process to begin: to import what the function needs, on a machine that is busy."""
_KILLED = 10.0
"""Seconds for a process that was killed to be gone; one that the system does not let go is left to it."""


class Unsendable(Exception):
    """Samples that cannot be pickled. Nothing was sent."""


class Unreadable(Exception):
    """An answer that cannot be unpickled here."""


class NotStarted(TimeoutError):
    """The process did not begin in time."""


class Line:
    """What a process is asked, and answers, over a channel: one question at a time. ``start``: seconds until it must
    have said that it began."""

    def __init__(self, channel: Channel, start: float = START) -> None:
        self._channel = channel
        self._start = start
        self.began = False
        """Whether the other side said that it began."""

    def ask(self, samples: list[Any], timeout: float) -> Any:
        """What it answers within ``timeout`` seconds of its beginning, or of now.

        Raises ``NotStarted``, ``TimeoutError``, ``Closed``, ``Unsendable`` or ``Unreadable``.
        """
        if not self.began:
            try:
                self._channel.receive(self._start)
            except TimeoutError as e:
                raise NotStarted from e
            self.began = True
        until = self._channel.clock.monotonic() + timeout
        try:
            self._channel.send(samples, timeout)
        except (TimeoutError, Closed):
            raise
        except Exception as e:  # whatever pickling of the user's objects raises
            raise Unsendable(str(e)) from e
        try:
            return self._channel.receive(max(until - self._channel.clock.monotonic(), 0.0))
        except (TimeoutError, Closed):
            raise
        except Exception as e:  # whatever unpickling of the user's objects raises
            raise Unreadable(str(e)) from e


class StageProcess:
    """One process, used by one thread at a time.

    Raises what pickling raises where the function cannot be sent.
    """

    def __init__(self, function: Callable[[Any], Any], batched: bool) -> None:
        here, there = socket.socketpair()
        self._channel = Channel(here)
        self._line = Line(self._channel)
        try:
            self._process = multiprocessing.get_context("spawn").Process(
                target=work, args=(there, function, batched, os.getpid()), name="nearflash-stage", daemon=True
            )
            self._process.start()
        except BaseException:
            self._channel.close()
            raise
        finally:
            there.close()
        self._ending = threading.Lock()
        self.pid = self._process.pid
        self.hung_up = False
        """Whether this side ended it."""
        self.fate = ""
        """How it ended, once it has."""

    @property
    def began(self) -> bool:
        """Whether it has said that it began."""
        return self._line.began

    def ask(self, samples: list[Any], timeout: float) -> Any:
        """See :meth:`Line.ask`. Another thread that ends the process ends this with ``Closed``."""
        return self._line.ask(samples, timeout)

    def hang_up(self) -> None:
        """Let it end by itself. Any thread; idempotent."""
        self.hung_up = True
        self._channel.close()

    def end(self, grace: float = GRACE) -> None:
        """End it, by force where it takes longer. Any thread; idempotent; bounded."""
        self._channel.close()
        with self._ending:
            if not self.fate:
                self.fate = _ended(self._process, grace)


def _ended(process: Any, grace: float) -> str:
    """How a process ended that was hung up on."""
    process.join(grace)
    forced = process.exitcode is None
    if forced:
        process.kill()
        process.join(_KILLED)
    code = process.exitcode
    if code is None:
        return "was killed and is still there"
    process.close()
    return "was ended" if forced else _fate(code)


def _fate(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
