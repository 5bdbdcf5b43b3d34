"""A lock that a fork cannot leave locked for ever."""

from __future__ import annotations

import os
import threading


class ForkLock:
    """One lock per process: a thread of the parent that held it during a fork holds nothing in the child.

    ``of_this_process`` is safe to call from several threads, also the first time after a fork.
    """

    def __init__(self) -> None:
        self._locks = {os.getpid(): threading.Lock()}

    def of_this_process(self) -> threading.Lock:
        pid = os.getpid()
        lock = self._locks.get(pid)
        return self._locks.setdefault(pid, threading.Lock()) if lock is None else lock
