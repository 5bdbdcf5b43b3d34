"""The flock that makes one process the owner of a cache directory."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from pathlib import Path

from ..errors import CacheBusy, CacheError, ConfigError, DiskFault
from .fileops import FileOps

LOCK = "lock"
_DAEMON_S = re.compile(r"daemon\.(log|json).*")
"""What a daemon leaves that could not open the cache when it started."""
_TREE = re.compile(r"nearflash-v\d+")
"""The tree of :mod:`.layout`, of any version."""
_MADE_BY_A_FILE_SYSTEM = {"lost+found"}
_READ_ONLY = {errno.EROFS, errno.EACCES}


class DirectoryLock:
    """An exclusive lock on ``<cache_dir>/lock``, held until :meth:`close` or the death of the process.

    The file stays; its content (the owner's pid) is for messages only.
    """

    def __init__(self, cache_dir: Path, fd: int, ops: FileOps) -> None:
        self._cache_dir = cache_dir
        self._fd = fd
        self._ops = ops

    @classmethod
    def take(cls, cache_dir: Path, ops: FileOps) -> DirectoryLock:
        """Take the lock without waiting.

        Raises :class:`CacheBusy` if another process holds it (naming its pid), :class:`CacheError` if the file is not a
        lock of ours, :class:`ConfigError` where the system has no ``flock``, ``OSError`` for the rest.
        """
        return cls(cache_dir, _take(cache_dir, ops), ops)

    def renew(self) -> None:
        """Lock the file that has the path now, if it is another one (the disk was away and is back). Raises as
        :meth:`take` does."""
        top = self._ops.open_top(str(self._cache_dir))
        try:
            there = self._ops.stat(LOCK, dir_fd=top)
        except FileNotFoundError:
            there = None
        finally:
            self._ops.close(top)
        if there is not None and os.path.samestat(there, self._ops.fstat(self._fd)):
            return
        fresh = _take(self._cache_dir, self._ops)
        self._ops.close(self._fd)
        self._fd = fresh

    def close(self) -> None:
        """Release; idempotent."""
        if self._fd >= 0:
            self._ops.close(self._fd)
            self._fd = -1


def prepare_directory(cache_dir: Path, socket: Path) -> None:
    """Make the directory if there is none; raise :class:`CacheError` if it cannot be a cache of this user.

    One that holds other things and no cache is somebody's data or home, named by mistake. ``socket`` and its lock may
    lie there, and be there first.
    """
    try:
        os.makedirs(cache_dir, mode=0o700, exist_ok=True)
        owner = os.stat(cache_dir).st_uid
        names = set(os.listdir(cache_dir))
    except (FileExistsError, NotADirectoryError):
        raise CacheError("is not a directory", url=str(cache_dir), hint="set cache_dir to a directory") from None
    except OSError as e:
        where = f" ({e.filename})" if e.filename not in (None, str(cache_dir)) else ""
        hint = "set cache_dir, or NEARFLASH_CACHE_DIR, to a directory that can be made"
        raise DiskFault(f"cannot be made: {e.strerror}{where}", url=str(cache_dir), hint=hint) from e
    if hasattr(os, "geteuid") and owner != os.geteuid():
        raise CacheError(
            f"belongs to user {owner}, not to user {os.geteuid()}",
            url=str(cache_dir),
            hint="set cache_dir to a directory of your own",
        )
    foreign = sorted(
        name
        for name in names - _MADE_BY_A_FILE_SYSTEM
        if not name.startswith(socket.name) and not _DAEMON_S.fullmatch(name)
    )
    if foreign and not any(name == LOCK or _TREE.fullmatch(name) for name in names):
        raise CacheError(
            f"is no cache and holds other things ({foreign[0]!r}{' ...' if len(foreign) > 1 else ''})",
            url=str(cache_dir),
            hint="set cache_dir, or NEARFLASH_CACHE_DIR, to an empty or a new folder, perhaps one in there",
        )


def _take(cache_dir: Path, ops: FileOps) -> int:
    try:
        import fcntl
    except ImportError:
        raise ConfigError("the cache needs flock, which this system lacks", url=str(cache_dir)) from None
    fd, writable = _open(cache_dir, ops)
    try:
        if not stat.S_ISREG(ops.fstat(fd).st_mode):
            raise _foreign(cache_dir)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = ops.read(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            raise CacheBusy(
                f"held by pid {pid}",
                url=str(cache_dir),
                hint="connect to that daemon, stop it, or choose another cache_dir",
            ) from None
        if not re.fullmatch(rb"\s*\d*\s*", ops.read(fd, 4096, 0)):
            raise _foreign(cache_dir)
        if writable:
            with contextlib.suppress(OSError):  # for messages only: a full disk must not keep the cache from reading
                ops.write(fd, f"{os.getpid()}\n".ljust(16).encode(), 0)
    except BaseException:
        ops.close(fd)
        raise
    return fd


def _open(cache_dir: Path, ops: FileOps) -> tuple[int, bool]:
    """(descriptor, whether it is writable) of the lock file, made if there is none."""
    top = ops.open_top(str(cache_dir))
    try:
        try:
            return ops.open(LOCK, dir_fd=top, write=True), True
        except FileNotFoundError:
            return ops.create(LOCK, dir_fd=top), True
        except OSError as e:
            if e.errno not in _READ_ONLY:
                raise
            try:
                return ops.open(LOCK, dir_fd=top), False
            except FileNotFoundError:
                raise e from None
    except OSError as e:
        if e.errno in {errno.ELOOP, errno.EISDIR}:
            raise _foreign(cache_dir) from e
        raise
    finally:
        ops.close(top)


def _foreign(cache_dir: Path) -> CacheError:
    return CacheError("is not a lock file of this cache", url=str(cache_dir / LOCK), hint="choose another cache_dir")
