"""Bytes handed to another process in a file without a name that nobody can change any more.

On Linux a sealed memfd; reading it can neither block on a device nor find it shorter than it was. Elsewhere a temporary
file that is already unlinked.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .errors import CacheError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from typing_extensions import Buffer

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE if hasattr(fcntl, "F_ADD_SEALS") else 0


@contextmanager
def sealed_file(data: Buffer) -> Iterator[int]:
    """A descriptor of a file with these bytes, open for the block."""
    fd = _nameless_file()
    try:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], done)
        if _SEALS:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        yield fd
    finally:
        os.close(fd)


def sealed_bytes(fd: int, most: int) -> int:
    """The length of a file that somebody else handed over. Raises :class:`CacheError` if it is not a sealed one, or has
    more than ``most`` bytes. The descriptor stays the caller's."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or not _is_sealed(fd):
        raise CacheError("bytes in a file that could still change")
    if info.st_size > most:
        raise CacheError(f"{info.st_size} bytes; at most {most} are taken")
    return info.st_size


def read_sealed(fd: int, size: int) -> bytes:
    """Its ``size`` bytes."""
    parts = []
    got = 0
    while got < size:
        part = os.pread(fd, size - got, got)
        if not part:
            raise CacheError("the file became shorter while it was read")
        parts.append(part)
        got += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _is_sealed(fd: int) -> bool:
    if not _SEALS:
        return True  # this system has no seals
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False  # not a memfd


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nearflash-attach", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
