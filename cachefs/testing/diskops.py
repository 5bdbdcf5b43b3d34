"""The flash store's system calls with faults: a process that dies between two of them, a disk that refuses some."""

from __future__ import annotations

import os
from collections.abc import Callable

from ..flash.fileops import FileOps, Found

CHANGES = frozenset({"make_dir", "create", "write", "allocate", "rename", "unlink", "touch"})
"""The calls that leave a trace on disk."""


class Crash(BaseException):
    """The process "died" here. Not an ``Exception``: no handler of the code under test may live on after it."""


class WatchedOps(FileOps):
    """Real calls, each announced to :meth:`before` by its name and the file's name, and a list of open descriptors."""

    def __init__(self) -> None:
        self.open_fds: set[int] = set()

    def before(self, call: str, name: str) -> None:
        """Called ahead of every call; raises to make it fail."""

    def release(self) -> None:
        """Close what the code under test left open, as the end of its process would."""
        for fd in self.open_fds:
            os.close(fd)
        self.open_fds.clear()

    def _opened(self, fd: int) -> int:
        self.open_fds.add(fd)
        return fd

    def open_top(self, path: str) -> int:
        self.before("open_top", path)
        return self._opened(super().open_top(path))

    def open_dir(self, name: str, *, dir_fd: int) -> int:
        self.before("open_dir", name)
        return self._opened(super().open_dir(name, dir_fd=dir_fd))

    def make_dir(self, name: str, *, dir_fd: int) -> None:
        self.before("make_dir", name)
        super().make_dir(name, dir_fd=dir_fd)

    def create(self, name: str, *, dir_fd: int) -> int:
        self.before("create", name)
        return self._opened(super().create(name, dir_fd=dir_fd))

    def open(self, name: str, *, dir_fd: int, write: bool = False) -> int:
        self.before("open_write" if write else "open", name)
        return self._opened(super().open(name, dir_fd=dir_fd, write=write))

    def open_for_reader(self, name: str, *, dir_fd: int) -> int:
        self.before("open", name)
        return super().open_for_reader(name, dir_fd=dir_fd)

    def duplicate(self, fd: int) -> int:
        self.before("duplicate", "")
        return self._opened(super().duplicate(fd))

    def close(self, fd: int) -> None:
        self.before("close", "")
        self.open_fds.discard(fd)
        super().close(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        self.before("read", "")
        return super().read(fd, size, offset)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        self.before("write", "")
        super().write(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self.before("allocate", "")
        super().allocate(fd, size)

    def disk_bytes(self, fd: int) -> int:
        self.before("disk_bytes", "")
        return super().disk_bytes(fd)

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        self.before("stat", name)
        return super().stat(name, dir_fd=dir_fd)

    def fstat(self, fd: int) -> os.stat_result:
        self.before("fstat", "")
        return super().fstat(fd)

    def rename(self, name: str, to: str, *, src_fd: int, dst_fd: int) -> None:
        self.before("rename", name)
        super().rename(name, to, src_fd=src_fd, dst_fd=dst_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        self.before("unlink", name)
        super().unlink(name, dir_fd=dir_fd)

    def list_files(self, dir_fd: int) -> list[Found]:
        self.before("list_files", "")
        return super().list_files(dir_fd)

    def touch(self, name: str, when: float, *, dir_fd: int) -> None:
        self.before("touch", name)
        super().touch(name, when, dir_fd=dir_fd)

    def sync(self, fd: int) -> None:
        self.before("sync", "")
        super().sync(fd)

    def free_bytes(self, dir_fd: int) -> int:
        self.before("free_bytes", "")
        return super().free_bytes(dir_fd)

    def block_bytes(self, dir_fd: int) -> int:
        self.before("block_bytes", "")
        return super().block_bytes(dir_fd)

    def is_held(self, fd: int) -> bool | None:
        self.before("is_held", "")
        return super().is_held(fd)


class CrashingOps(WatchedOps):
    """Dies at the n-th call that changes the disk, counted from :meth:`arm`; a write gets half its bytes out first.

    After that every call raises :class:`Crash`, so nothing that runs while the exception travels has any effect, as
    after ``kill -9``. Call :meth:`release` then, and open the directory anew with another instance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.changes = 0
        self.dead = False
        self._crash_at = 0

    def arm(self, n: int) -> None:
        """Die at the n-th change from now on; 0 never."""
        self._crash_at = self.changes + n if n else 0

    def before(self, call: str, name: str) -> None:
        if self.dead:
            raise Crash
        if call in CHANGES:
            self.changes += 1
            if self.changes == self._crash_at:
                self.dead = True
                if call != "write":
                    raise Crash

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        self.before("write", "")
        if self.dead:
            os.pwrite(fd, memoryview(data)[: len(data) // 2], offset)
            raise Crash
        FileOps.write(self, fd, data, offset)

    def release(self) -> None:
        self.dead = True
        super().release()


class FaultyOps(WatchedOps):
    """Raises what ``fault(call, name)`` returns (an errno), or lets the call through if that is None or 0."""

    def __init__(self, fault: Callable[[str, str], int | None] | None = None) -> None:
        super().__init__()
        self.fault = fault
        self.calls: list[str] = []

    def before(self, call: str, name: str) -> None:
        self.calls.append(call)
        number = self.fault(call, name) if self.fault else None
        if number:
            raise OSError(number, os.strerror(number), name or None)
