"""Every system call that the flash store makes on its files, behind one small object.

The store calls nothing else that changes the disk, so a test can count the calls, stop at the n-th as ``kill -9``
would, or make one fail like a bad disk. Names are single path components below an open directory (``dir_fd``), and
no call follows a symbolic link.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import NamedTuple

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_NO_PREALLOCATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NO_LEASES = {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES, errno.EPERM, errno.ENOLCK}


class Found(NamedTuple):
    """One regular file of a directory: its name, size and disk space in bytes, and time of last change."""

    name: str
    size: int
    disk_bytes: int
    mtime: float


class FileOps:
    """The real calls. Stateless and thread-safe; errors are the system's own ``OSError``."""

    def open_top(self, path: str) -> int:
        """The user's cache directory. That path, and it alone, may lead through links."""
        return os.open(path, os.O_RDONLY | _DIRECTORY | _CLOEXEC)

    def open_dir(self, name: str, *, dir_fd: int) -> int:
        return os.open(name, os.O_RDONLY | _DIRECTORY | _NOFOLLOW | _CLOEXEC, dir_fd=dir_fd)

    def make_dir(self, name: str, *, dir_fd: int) -> None:
        os.mkdir(name, 0o700, dir_fd=dir_fd)

    def create(self, name: str, *, dir_fd: int) -> int:
        """A new file of mode 0600, open for reading and writing; ``FileExistsError`` if the name is taken."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC, 0o600, dir_fd=dir_fd)

    def open(self, name: str, *, dir_fd: int, write: bool = False) -> int:
        return os.open(name, (os.O_RDWR if write else os.O_RDONLY) | _NOFOLLOW | _CLOEXEC, dir_fd=dir_fd)

    def open_for_reader(self, name: str, *, dir_fd: int) -> int:
        """A read-only descriptor that is handed out: whoever gets it closes it."""
        return os.open(name, os.O_RDONLY | _NOFOLLOW | _CLOEXEC, dir_fd=dir_fd)

    def duplicate(self, fd: int) -> int:
        """Another descriptor of the same open file."""
        return os.dup(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """``size`` bytes at ``offset``; fewer only at the end of the file."""
        data = os.pread(fd, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        have = len(data)
        while have < size and (more := os.pread(fd, size - have, offset + have)):
            parts.append(more)
            have += len(more)
        return b"".join(parts)

    def write(self, fd: int, data: memoryview | bytes, offset: int) -> None:
        """All of ``data`` at ``offset``."""
        done = os.pwrite(fd, data, offset)
        view = memoryview(data)
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)

    def allocate(self, fd: int, size: int) -> None:
        """Make the file ``size`` bytes long, with its blocks where the file system can promise them beforehand."""
        if size == 0:
            return
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(fd, 0, size)
                return
            except OSError as e:
                if e.errno not in _NO_PREALLOCATION:
                    raise
        os.ftruncate(fd, size)

    def disk_bytes(self, fd: int) -> int:
        """What the file or directory takes on disk."""
        return os.fstat(fd).st_blocks * 512

    def stat(self, name: str, *, dir_fd: int) -> os.stat_result:
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)

    def fstat(self, fd: int) -> os.stat_result:
        return os.fstat(fd)

    def rename(self, name: str, to: str, *, src_fd: int, dst_fd: int) -> None:
        os.rename(name, to, src_dir_fd=src_fd, dst_dir_fd=dst_fd)

    def unlink(self, name: str, *, dir_fd: int) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def list_files(self, dir_fd: int) -> list[Found]:
        """The regular files of a directory. Links, directories and other things are left out."""
        out: list[Found] = []
        with os.scandir(dir_fd) as it:
            for item in it:
                if item.is_file(follow_symlinks=False):
                    st = item.stat(follow_symlinks=False)
                    out.append(Found(item.name, st.st_size, st.st_blocks * 512, st.st_mtime))
        return out

    def touch(self, name: str, when: float, *, dir_fd: int) -> None:
        os.utime(name, (when, when), dir_fd=dir_fd, follow_symlinks=False)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def free_bytes(self, dir_fd: int) -> int:
        """Disk space that this user may still take."""
        vfs = os.fstatvfs(dir_fd)
        return vfs.f_bavail * vfs.f_frsize

    def block_bytes(self, dir_fd: int) -> int:
        """The unit in which the file system gives out space."""
        return max(os.fstatvfs(dir_fd).f_frsize, os.fstat(dir_fd).st_blksize)

    def is_held(self, fd: int) -> bool | None:
        """Whether anyone but ``fd``'s own open file has this file open or mapped; None where nobody can tell.

        A write lease (fcntl(2), "Leases") is granted only if there is no other open file description, and a map
        keeps the description that it was made from alive, also in a process that inherited it.
        """
        if fcntl is None or not hasattr(fcntl, "F_SETLEASE"):
            return None
        try:
            # Someone who opens the file while we hold the lease makes the kernel signal us. SIGIO would end the
            # process, SIGURG is ignored by default.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as e:
            if e.errno in {errno.EAGAIN, errno.EBUSY}:
                return True
            if e.errno in _NO_LEASES:
                return None
            raise
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False
