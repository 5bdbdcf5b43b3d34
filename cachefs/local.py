"""Local files: mapped in place, without daemon and without a copy."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from .errors import Changed, Denied, NearflashError, NotFound, StoreError
from .maps import private_map
from .shard import ObjectStat, Shard


class LocalShard(Shard):
    """A regular file, opened read-only and read where it lies.

    The file must not be truncated or rewritten in place while it is read: views show what the file holds.
    """

    def __init__(self, path: str, *, version: str | None = None, size: int | None = None) -> None:
        self._fd = -1
        fd = _open_file(path)
        try:
            info = _regular(path, os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        self.url = path
        self.size = info.st_size
        self.version = _version(info)
        if (version is not None and version != self.version) or (size is not None and size != self.size):
            self.close()
            raise Changed("the file is no longer the one that was listed", url=path, hint="list it again")

    @property
    def cached(self) -> bool:
        return True

    def view(self) -> memoryview:
        return private_map(self.fileno(), self.size, self.url)

    def wait(self, start: int, end: int) -> None:
        self.check_range(start, end)

    def fileno(self) -> int:
        if self._fd < 0:
            raise NearflashError("the shard is closed", url=self.url)
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def read_file(path: str) -> bytes:
    """A file whole."""
    with LocalShard(path) as shard:
        parts = []
        got = 0
        while got < shard.size:
            part = os.pread(shard.fileno(), shard.size - got, got)
            if not part:
                raise Changed("the file became shorter while it was read", url=path, offset=got)
            parts.append(part)
            got += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def stat_file(path: str) -> ObjectStat:
    """Size and version of a file; all of it counts as cached."""
    with LocalShard(path) as shard:
        return ObjectStat(path, shard.size, shard.version, shard.size)


def list_folder(path: str, *, delimiter: bool = False) -> list[ObjectStat]:
    """The regular files below a folder, sorted by the bytes of their path. A file gives itself alone.

    Symbolic links are followed; a folder that contains itself is entered once. With ``delimiter`` only the folder's
    own files and, as prefixes that end in ``/``, its subfolders. Raises ``NotFound`` or ``Denied``.
    """
    try:
        info = os.stat(path)
    except OSError as e:
        raise _error(path, e) from e
    if not stat.S_ISDIR(info.st_mode):
        return [stat_file(path)]
    found = list(_walk(path, ((info.st_dev, info.st_ino),), recurse=not delimiter))
    return sorted(found, key=lambda item: os.fsencode(item.url))


def _walk(folder: str, ancestors: tuple[tuple[int, int], ...], *, recurse: bool) -> Iterator[ObjectStat]:
    try:
        with os.scandir(folder) as entries:
            children = list(entries)
    except OSError as e:
        raise _error(folder, e) from e
    for child in children:
        try:
            info = child.stat()
        except FileNotFoundError:
            continue  # removed while we listed, or a link to nothing
        except OSError as e:
            raise _error(child.path, e) from e
        if stat.S_ISREG(info.st_mode):
            yield ObjectStat(child.path, info.st_size, _version(info), info.st_size)
        elif stat.S_ISDIR(info.st_mode):
            identity = (info.st_dev, info.st_ino)
            if not recurse:
                yield ObjectStat(child.path + "/", 0, "")
            elif identity not in ancestors:
                yield from _walk(child.path, (*ancestors, identity), recurse=True)


def _open_file(path: str) -> int:
    # O_NONBLOCK: opening a FIFO must not wait for its writer; it means nothing for a regular file.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags)
    except OSError as e:
        raise _error(path, e) from e


def _regular(path: str, info: os.stat_result) -> os.stat_result:
    if stat.S_ISDIR(info.st_mode):
        raise NotFound("is a directory, not a file", url=path, hint="name a file in it")
    if not stat.S_ISREG(info.st_mode):
        raise NotFound("is not a regular file", url=path)
    return info


def _version(info: os.stat_result) -> str:
    return f"{info.st_size}-{info.st_mtime_ns}-{info.st_ino}"


def _error(path: str, error: OSError) -> NearflashError:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return NotFound("no such file", url=path)
    if isinstance(error, PermissionError):
        if os.path.isdir(path):
            return Denied("this user may not list the directory", url=path)
        return Denied("this user may not read the file", url=path)
    return StoreError(f"cannot be read: {os.strerror(error.errno) if error.errno else error}", url=path)
