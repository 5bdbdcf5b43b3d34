"""Objects that the cache cannot take: fetched by the daemon, kept in memory of this process alone.

The memory is a file without a name (a memfd on Linux), so views are fresh copy-on-write maps like those of cached
objects, and it is gone with its last user, however the process ends. Only pieces that were asked for take space.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .clock import SYSTEM_CLOCK, Clock
from .forklock import ForkLock
from .session import Expired

Fetch = Callable[[int, int, memoryview, float], None]
"""``fetch(start, end, target, until)`` fills ``target`` with bytes ``[start, end)``, or raises ``Expired``."""


class PassThrough:
    """``size`` bytes in pieces of ``piece`` bytes, each fetched when first asked for. Thread-safe; survives a fork."""

    def __init__(self, size: int, piece: int, fetch: Fetch, clock: Clock = SYSTEM_CLOCK) -> None:
        self._size = size
        self._piece = piece
        self._fetch = fetch
        self._clock = clock
        self._present = bytearray(-(-size // piece))
        self._guard = ForkLock()
        self._map: mmap.mmap | None = None
        self.fd = -1
        self.fd = _nameless_file()
        os.ftruncate(self.fd, size)
        if size:
            self._map = mmap.mmap(self.fd, size)

    def has(self, start: int, end: int) -> bool:
        return self._present.find(0, start // self._piece, -(-end // self._piece)) < 0

    def present_to(self, start: int) -> int:
        """Up to where every byte from ``start`` on is there."""
        missing = self._present.find(0, start // self._piece)
        return self._size if missing < 0 else max(start, missing * self._piece)

    def bytes_with(self, start: int, end: int) -> int:
        """The memory in use once ``[start, end)`` is there."""
        first, last = start // self._piece, -(-end // self._piece)
        return (self._present.count(1) + self._present.count(0, first, last)) * self._piece

    def ensure(self, start: int, end: int, *, until: float = math.inf) -> None:
        """Fetch what is missing of ``[start, end)``; threads that want the same piece share one fetch.

        Raises :class:`~.session.Expired` at ``until`` (monotonic); the pieces that have come by then stay.
        """
        if self._map is None:
            return
        memory = memoryview(self._map)
        for index in range(start // self._piece, -(-end // self._piece)):
            with self._turn(until):
                if not self._present[index]:
                    low, high = index * self._piece, min((index + 1) * self._piece, self._size)
                    self._fetch(low, high, memory[low:high], until)
                    self._present[index] = 1

    def close(self) -> None:
        """Close the file; the memory stays as long as views of it live. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._map = None
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    @contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        lock = self._guard.of_this_process()
        left = until - self._clock.monotonic()
        if left <= 0 or not lock.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            raise Expired
        try:
            yield
        finally:
            lock.release()


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nearflash-pass", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
