"""Ending a daemon and waiting until it has gone."""

from __future__ import annotations

from .client import Client
from .clock import SYSTEM_CLOCK, Clock
from .errors import DaemonUnavailable, DeadlineExceeded

_SECONDS = 20.0


def stop_and_wait(client: Client, clock: Clock = SYSTEM_CLOCK) -> bool:
    """End the client's daemon; False if none runs. The client must not be one that starts daemons.

    Raises ``DeadlineExceeded`` if the socket still answers after a bounded time.
    """
    try:
        client.stop_daemon()
    except DaemonUnavailable:
        return False
    deadline = clock.monotonic() + _SECONDS
    while clock.monotonic() < deadline:
        client.close()  # a fresh connection is what tells
        try:
            client.stats()
        except DaemonUnavailable:
            return True
        clock.sleep(0.05)
    raise DeadlineExceeded(f"the daemon still answers after {_SECONDS:.0f} s", url=str(client.settings.socket))
