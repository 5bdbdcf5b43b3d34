"""A few bytes that a process shares with those it forks: what one of them found out, the others need not.

DataLoader's forked workers start from a data set whose parent may never have looked at the data. The first of them
lists and counts it and puts the manifest here; the others, and the workers of later epochs, take it from here.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.clock import SYSTEM_CLOCK, Clock

try:
    import fcntl
except ImportError:  # Windows has no fork either
    fcntl = None  # type: ignore[assignment]

WAIT = 600.0
"""Seconds to wait for another process that is about to fill the shelf; after that everyone does the work alone."""
_PAUSE = 0.02


class Shelf:
    """An anonymous file, inherited by fork only: a copy made in any other way is an empty shelf of its own."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._fd = _anonymous_file()
        self._close = weakref.finalize(self, os.close, self._fd)

    def read(self) -> bytes:
        """What was put here; empty if nothing was."""
        size = os.fstat(self._fd).st_size
        return os.pread(self._fd, size, 0) if size else b""

    def write(self, data: bytes) -> None:
        """Put something here, once; within :meth:`held`."""
        with open(os.dup(self._fd), "r+b") as file:
            file.write(data)

    @contextmanager
    def held(self, wait: float = WAIT) -> Iterator[bool]:
        """Keep other processes out meanwhile, or wait for the one that is in. A process that dies lets go.

        After ``wait`` seconds it goes on without (and yields ``False``): then two may do the same work.
        """
        taken = fcntl is not None and self._take(wait)
        try:
            yield taken
        finally:
            if taken:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def _take(self, wait: float) -> bool:
        deadline = self._clock.monotonic() + wait
        while True:
            try:
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if self._clock.monotonic() >= deadline:
                    return False
                self._clock.sleep(_PAUSE)
            else:
                return True

    def __reduce__(self) -> tuple[Any, ...]:
        return (Shelf, ())


class SharedNumbers:
    """Numbers that a process and those it forks see alike, all 0 at first; a copy made in any other way starts with
    what is in it then and goes its own way.

    There is no lock: each number is written once, or by all with the same value.
    """

    def __init__(self, start: bytes = b"") -> None:
        self._fd = _anonymous_file()
        self._close = weakref.finalize(self, os.close, self._fd)
        if start:
            os.pwrite(self._fd, start, 0)

    def array(self, length: int) -> npt.NDArray[np.int64]:
        """The first ``length`` of them, in the memory that is shared."""
        if length == 0:
            return np.zeros(0, dtype=np.int64)
        if os.fstat(self._fd).st_size < 8 * length:
            os.truncate(self._fd, 8 * length)  # by several at once: to the same length
        return np.frombuffer(mmap.mmap(self._fd, 8 * length), dtype=np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return (SharedNumbers, (os.pread(self._fd, os.fstat(self._fd).st_size, 0),))


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nearflash-shelf", getattr(os, "MFD_CLOEXEC", 0))
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
