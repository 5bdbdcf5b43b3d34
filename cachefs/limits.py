"""What a system call of ours met, in one line: the limits of a process have a way out that can be named."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import CacheError, NearflashError

FILES = "raise ulimit -n"
"""The way out for a process that has too many files open."""
_HINTS = {
    errno.EMFILE: FILES,
    errno.ENFILE: "raise fs.file-max",
    errno.ENOMEM: "too little memory, or too many maps: close views, or raise vm.max_map_count",
}
SCARCE = frozenset(_HINTS)
"""Errors that tell of this process or machine, and nothing of the file at hand."""
_MOST_PRIVATE = 16 << 30


def private_limit(meminfo: str = "/proc/meminfo") -> int:
    """Bytes of one object that a process may keep in its memory unless told otherwise: half of what is available on
    this machine now (``meminfo`` as Linux writes it, see proc(5)), at most 16 GiB."""
    try:
        with open(meminfo, encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file if ":" in line)
        return min(_MOST_PRIVATE, int(lines["MemAvailable"].split()[0]) * 1024 // 2)
    except (FileNotFoundError, KeyError):
        return _MOST_PRIVATE  # another system


def way_out(e: OSError) -> str | None:
    """What to do about an error that is one of :data:`SCARCE`, else None."""
    return _HINTS.get(e.errno or 0)


def shortage(e: OSError, doing: str, url: str | None) -> CacheError:
    """The error for a system call that failed while ``doing`` something with ``url``."""
    reason = os.strerror(e.errno).lower() if e.errno else str(e)
    return CacheError(f"{reason} while {doing}", url=url, hint=way_out(e))


@contextmanager
def system_calls(doing: str, url: str | None) -> Iterator[None]:
    """Turns an ``OSError`` that is none of ours yet into a :class:`CacheError`."""
    try:
        yield
    except NearflashError:
        raise
    except OSError as e:
        raise shortage(e, doing, url) from e
