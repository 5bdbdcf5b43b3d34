"""The daemon's place in the file system: the lock that makes it the only one on a socket, and the socket itself.

Both are worked on by the lock's holder alone. Nothing here has to be cleaned by hand after ``kill -9``: the kernel
drops the lock, and the next holder replaces the socket.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from ..errors import ConfigError


class SocketLock:
    """An exclusive ``flock`` beside the socket, held until :meth:`close` or the death of the process."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    @classmethod
    def take(cls, path: Path) -> SocketLock | None:
        """Take the lock without waiting; ``None`` if another process holds it."""
        try:
            import fcntl
        except ImportError:
            raise ConfigError("a daemon needs flock, which this system lacks", url=str(path)) from None
        name = f"{path}.lock"
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as e:
            raise ConfigError(f"cannot be locked: {e.strerror}", url=name, hint="set NEARFLASH_SOCKET") from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return cls(fd)

    def close(self) -> None:
        """Release; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class ListeningSocket:
    """A Unix socket of mode 0600 under a path. It takes the path, over what a former daemon left, once it listens.

    Context manager: leaving it closes the socket and removes the path, if that is still ours.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        if not _replaceable(self._path):
            self.sock.close()
            what = "is in the way of the daemon's socket and is not one"
            raise ConfigError(what, url=str(self._path), hint="set NEARFLASH_SOCKET to another path")
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        try:
            self.sock.bind(os.fspath(fresh))
            fresh.chmod(0o600)
            self.sock.listen()
            os.replace(fresh, self._path)
            self._inode = os.lstat(self._path).st_ino
        except OSError as e:
            self.sock.close()
            what = f"the daemon's socket cannot be made: {e.strerror or e}"
            raise ConfigError(what, url=str(self._path), hint="set NEARFLASH_SOCKET to a short path") from e

    @property
    def in_place(self) -> bool:
        """Whether the path still leads to this socket; cleaners of temporary folders may have removed it."""
        try:
            info = os.lstat(self._path)
        except OSError:
            return False
        return stat.S_ISSOCK(info.st_mode) and info.st_ino == self._inode

    def disappear(self) -> None:
        """Close the socket and remove its path: clients that come now start another daemon. Idempotent."""
        if self.in_place:
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
        self._inode = -1
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disappear()


def _replaceable(path: Path) -> bool:
    """Whether a socket may take this path: nothing is there, or what a former daemon left."""
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:  # nothing there; or the path cannot be used, which binding meets as well and names
        return True
