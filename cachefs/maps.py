"""Private, writable memory over a file: the only way in which cached bytes reach a user.

The memoryview owns the mapping: Python unmaps it when the view and everything made from it are gone, so nothing here
is ever unmapped by hand. Before Python 3.13 each mapping also keeps a duplicate of the file descriptor.
"""

from __future__ import annotations

import mmap
import sys
from typing import Any

from .errors import NearflashError
from .limits import system_calls

_EXTRA: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_STATUS = "/proc/self/status"


def follows_file(status: str = _STATUS) -> bool:
    """Whether a private map shows what is written to its file later, in pages that nobody wrote to.

    POSIX leaves this open. On Linux such pages *are* the pages of the file, which ``write`` changes, also where they
    were looked at before. What makes them private is a write, and what counts as one: pinning for a device, and
    locking, which is why a process that locks its memory (``mlockall``; ``status`` as proc(5) has it) is told no.
    """
    if sys.platform != "linux":
        return False
    try:
        with open(status, encoding="ascii", errors="replace") as file:
            return any(line.split() == ["VmLck:", "0", "kB"] for line in file)
    except OSError:
        return False  # no /proc here: nobody knows


def private_map(fd: int, size: int, url: str | None = None) -> memoryview:
    """Map ``size`` bytes of ``fd`` copy-on-write; the descriptor may be closed afterwards, not before.

    The file must hold at least ``size`` bytes and must never be truncated while the view lives (else SIGBUS on
    access). No swap is reserved for pages that nobody writes to. Raises :class:`CacheError` naming ``url`` when the
    system has no room for another map.
    """
    if fd < 0:
        raise NearflashError("the shard is closed")  # mmap would take -1 for a wish for zeros
    if size == 0:
        return memoryview(bytearray())
    with system_calls("mapping it", url):
        if not hasattr(mmap, "MAP_PRIVATE"):
            return memoryview(mmap.mmap(fd, size, access=mmap.ACCESS_COPY))
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
        return memoryview(mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE, **_EXTRA))
