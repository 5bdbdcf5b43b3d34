"""The file operations of a commit as one small boundary, so that tests can record them and replay every prefix.

:class:`SystemFileOps` is the real thing. Everything raises ``OSError`` as the system gives it; the storage above
turns that into an error of nearflash.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol

FILE_MODE = 0o644
"""Checkpoints are for other tools too: the user's umask decides who else may read them, as for any file they make."""
FOLDER_MODE = 0o755

_RENAME_NOREPLACE = 1
_AT_FDCWD = -100
_NO_SUCH_CALL = frozenset({errno.EINVAL, errno.ENOSYS})
_IOV_MAX = 512


class FileOps(Protocol):
    """What a save does to a file system. Paths are absolute."""

    def mkdir(self, path: str) -> None:
        """Make one folder. ``FileExistsError`` if it is there."""

    def create(self, path: str) -> int:
        """A descriptor to write a new file. ``FileExistsError`` if it is there."""

    def write(self, fd: int, views: Sequence[memoryview]) -> None:
        """Append all bytes of all views (format ``B``)."""

    def fsync(self, fd: int) -> None:
        """Put a file's bytes on stable storage."""

    def close(self, fd: int) -> None:
        """Close a descriptor of :meth:`create`."""

    def sync_folder(self, path: str) -> bool:
        """Put a folder's entries on stable storage; ``False`` where the file system has no such thing (EINVAL)."""

    def rename_new(self, source: str, target: str) -> None:
        """Rename a folder to a name that is free or an empty folder; ``OSError`` (EEXIST, ENOTEMPTY) otherwise."""

    def link_new(self, source: str, target: str) -> None:
        """Give a file another name, or move it there, atomically. ``FileExistsError`` if the name is taken."""

    def unlink(self, path: str) -> None:
        """Remove a file."""

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""


class SystemFileOps:
    """The operating system. ``rename`` stands for :func:`rename_noreplace`, which some systems lack."""

    def __init__(self, rename: Callable[[str, str], bool] | None = None) -> None:
        self._rename = rename_noreplace if rename is None else rename

    def mkdir(self, path: str) -> None:
        os.mkdir(path, FOLDER_MODE)

    def create(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
        return os.open(path, flags, FILE_MODE)

    def write(self, fd: int, views: Sequence[memoryview]) -> None:
        pending = list(views)
        while pending:
            if hasattr(os, "writev"):
                written = os.writev(fd, pending[:_IOV_MAX])
            else:
                written = os.write(fd, pending[0])
            done = 0
            while done < len(pending) and written >= len(pending[done]):
                written -= len(pending[done])
                done += 1
            del pending[:done]
            if written:
                pending[0] = pending[0][written:]

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def sync_folder(self, path: str) -> bool:
        if os.name == "nt":
            return False
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as e:
            if e.errno == errno.EINVAL:
                return False
            raise
        finally:
            os.close(fd)
        return True

    def rename_new(self, source: str, target: str) -> None:
        if not self._rename(source, target):
            # A committed folder is never empty, so a plain rename cannot replace one either.
            os.rename(source, target)

    def link_new(self, source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError as e:
            if e.errno not in {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}:
                raise
            if not self._rename(source, target):
                raise

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)


@cache
def _renameat2() -> Any:
    """glibc's ``renameat2`` (2.28 and later), or ``None``."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


def rename_noreplace(source: str, target: str) -> bool:
    """``renameat2(RENAME_NOREPLACE)``; ``False`` where kernel, C library or file system lack it, ``OSError`` else."""
    function = _renameat2()
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_SUCH_CALL:
        return False
    raise OSError(code, os.strerror(code), source, None, target)
