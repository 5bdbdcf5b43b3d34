"""Whether obstore works in this process.

Its Rust runtime consists of threads, one set for the whole process, started at first use. A fork copies the memory but
not the threads: in the child every call would wait for ever.
"""

from __future__ import annotations

import os


class NativeRuntime:
    """Remembers which process started the runtime."""

    def __init__(self) -> None:
        self._pid: int | None = None

    @property
    def usable(self) -> bool:
        """Whether it runs in this process, or can still be started in it."""
        return self._pid is None or self._pid == os.getpid()

    def start(self) -> bool:
        """Say that it will be used from now on; whether it can be."""
        if self._pid is None:
            self._pid = os.getpid()
        return self.usable


RUNTIME = NativeRuntime()
"""One for the process, as the thing it stands for is."""
