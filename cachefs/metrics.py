"""Counters and gauges of one process part (a daemon, a client), read as a plain dict.

There is no global registry: whoever counts owns a :class:`Metrics` and hands it to its parts. Exporters (the status
command, Prometheus) read :meth:`Metrics.snapshot`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable


class Metrics:
    """Named numbers. Thread-safe; names are ``snake_case`` with the unit last (``origin_bytes``, ``fill_seconds``)."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """``names`` are there from the beginning, at 0."""
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(names, 0)

    def add(self, name: str, amount: float = 1) -> None:
        """Count ``amount`` more; a name never seen starts at 0."""
        with self._lock:
            self._values[name] = self._values.get(name, 0) + amount

    def set(self, name: str, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            self._values[name] = value

    def get(self, name: str) -> float:
        """The value now; 0 for a name never seen."""
        with self._lock:
            return self._values.get(name, 0)

    def snapshot(self) -> dict[str, float]:
        """A copy of all values, sorted by name."""
        with self._lock:
            return dict(sorted(self._values.items()))
