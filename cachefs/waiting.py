"""How long a client waits for an object: what was asked for, and when it has lasted too long."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .errors import DeadlineExceeded

_WINDOW = 5.0
"""Seconds that one wait at the daemon lasts at most; then the client looks at progress and asks again."""


@dataclass(frozen=True)
class OpenArgs:
    """What was asked for: enough to open again after the daemon or the process has changed."""

    url: str
    version: str | None
    size: int | None
    deadline: float | None
    stall: float
    """Seconds without any new chunk after which a wait without ``deadline`` ends."""
    private: int | None = None
    """Most bytes of the object that are kept in this process's memory past the cache (``None``: by what is free)."""


class Watch:
    """Decides when a wait has lasted too long: at its deadline, else when nothing new came for the stall time."""

    def __init__(self, args: OpenArgs, now: float) -> None:
        self._args = args
        self._present = -1
        self._ends = now + (args.stall if args.deadline is None else args.deadline)
        self._now = now

    @property
    def until(self) -> float:
        """When the deadline that was asked for is over; ``inf`` without one."""
        return math.inf if self._args.deadline is None else self._ends

    def window(self) -> float:
        """How long the next wait may last. Raises ``DeadlineExceeded`` when nothing is left."""
        left = self._ends - self._now
        if left <= 0:
            raise self.error()
        return min(_WINDOW, left)

    def error(self) -> DeadlineExceeded:
        """For a wait that has lasted too long."""
        if self._args.deadline is None:
            return DeadlineExceeded(f"nothing arrived for {self._args.stall:.0f} s", url=self._args.url)
        return DeadlineExceeded(f"not all there after {self._args.deadline:g} s", url=self._args.url)

    def note(self, present: int, now: float) -> None:
        """``present`` chunks are there now."""
        self._now = now
        if present != self._present:
            self._present = present
            if self._args.deadline is None:
                self._ends = now + self._args.stall
