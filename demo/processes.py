"""Finding and ending exactly the processes that the demo started, however far they have detached themselves.

The node daemon leaves its parent's session on purpose, and DataLoader workers outlive a killed parent for a moment, so
a parent-child walk misses some. Instead every process started here carries a random mark in its environment, which its
descendants inherit; the ones that carry the mark are the ones that may be ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import time
from collections.abc import Iterator

import psutil

from cachefs.errors import DeadlineExceeded


class Mark:
    """A random environment variable and the processes that carry it. The own process never counts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value = secrets.token_hex(16)

    def environ(self) -> dict[str, str]:
        """What to add to a child's environment."""
        return {self.name: self.value}

    def processes(self) -> list[psutil.Process]:
        """Live processes that carry the mark (zombies do not: they are dead and only wait for their parent)."""
        return [p for p in psutil.process_iter() if p.pid != os.getpid() and self._carried_by(p)]

    def _carried_by(self, process: psutil.Process) -> bool:
        try:
            carries = process.environ().get(self.name) == self.value
            return bool(carries and process.status() != psutil.STATUS_ZOMBIE)
        except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone meanwhile, or somebody else's: not ours either way
            return False

    def kill(self, *, deadline: float = 20.0) -> int:
        """SIGKILL them all, repeatedly, until none is left (one may fork while being looked for).

        Returns how many were killed. Raises :class:`DeadlineExceeded` naming the survivors.
        """
        end = time.monotonic() + deadline
        killed: set[int] = set()
        while found := self.processes():
            if time.monotonic() > end:
                raise DeadlineExceeded(f"processes {[p.pid for p in found]} survive SIGKILL for {deadline:.0f} s")
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
                killed.add(process.pid)
            psutil.wait_procs(found, timeout=0.5)
        return len(killed)


class Interrupted(KeyboardInterrupt):
    """SIGTERM or SIGHUP, raised as if it were Ctrl-C, so that all cleaning up is done."""


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP raise :class:`Interrupted` in the main thread, as SIGINT does by itself."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted(signal.Signals(number).name)

    previous = {s: signal.signal(s, interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
