"""When a daemon that nobody uses ends: a pure decision."""

from __future__ import annotations


class IdleWatch:
    """Tells that nobody used the daemon for ``timeout`` seconds; 0 never does."""

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._last_use = now

    def expired(self, *, busy: bool, now: float) -> bool:
        """To be asked regularly, with whether anybody uses it at the moment."""
        if busy:
            self._last_use = now
        return self._timeout > 0 and now - self._last_use >= self._timeout
