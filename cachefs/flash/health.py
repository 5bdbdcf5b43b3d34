"""Whether the disk can be written now: a fault is remembered, and looked into again later by the injected clock."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

from ..clock import Clock
from ..errors import CacheFull, DiskFault
from ..limits import SCARCE, way_out
from ..metrics import Metrics

PROBE_INTERVAL = 5.0
"""Seconds between looks at a failed disk."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def disk_error(e: OSError, path: Path | str, doing: str) -> CacheFull | DiskFault:
    """The one-line error for a failed system call on ``path``; an error that is one already is returned as it is."""
    if isinstance(e, DiskFault):
        return e
    reason = e.strerror or str(e)
    if e.errno in SCARCE:
        return CacheFull(f"{reason} while {doing}", url=str(path), hint=f"{way_out(e)}; until then reads pass through")
    if e.errno in FULL:
        return CacheFull(f"no space left while {doing}: {reason}", url=str(path), hint="reads pass through")
    return DiskFault(f"the cache disk failed while {doing}: {reason}", url=str(path), hint="reads pass through")


class Health:
    """Remembers the last fault until a probe succeeds. Thread-safe.

    ``probe`` tries the disk and returns, or raises ``OSError``.
    """

    def __init__(self, path: Path, clock: Clock, metrics: Metrics, probe: Callable[[], None]) -> None:
        self._path = path
        self._clock = clock
        self._metrics = metrics
        self._probe = probe
        self._lock = threading.Lock()
        self._fault: CacheFull | DiskFault | None = None
        self._retry_at = 0.0

    @property
    def fault(self) -> CacheFull | DiskFault | None:
        """The fault that keeps the store from writing, or None."""
        return self._fault

    def note(self, e: OSError, path: Path | str, doing: str) -> CacheFull | DiskFault:
        """Remember a failed call; returns the error to raise.

        A process at its own limits (descriptors, memory) says nothing of the disk: that is not remembered.
        """
        error = disk_error(e, path, doing)
        if e.errno in SCARCE:
            return error
        with self._lock:
            if self._fault is None:  # later faults do not put the next look off
                self._retry_at = self._clock.monotonic() + PROBE_INTERVAL
            self._fault = error
            self._metrics.set("flash_degraded", 1)
        self._metrics.add("flash_disk_faults")
        return error

    def check(self) -> None:
        """Raise the remembered fault, unless it is time to probe and the probe finds the disk well.

        One caller probes; the others get the fault meanwhile.
        """
        with self._lock:
            fault = self._fault
            if fault is None:
                return
            due = self._clock.monotonic() >= self._retry_at
            if due:
                self._retry_at = self._clock.monotonic() + PROBE_INTERVAL
        if not due:
            raise type(fault)(fault.what, url=fault.url, offset=fault.offset, hint=fault.hint)
        try:
            self._probe()
        except OSError as e:
            raise self.note(e, self._path, "probing it") from e
        with self._lock:
            if self._fault is fault:
                self._fault = None
                self._metrics.set("flash_degraded", 0)

    def confirm(self, e: OSError, path: str, doing: str) -> None:
        """Tell a failing disk from a bad spot on it: returns if the disk works, else remembers and raises the fault."""
        try:
            self._probe()
        except OSError as probed:
            raise self.note(probed if probed.errno in SCARCE else e, path, doing) from probed
