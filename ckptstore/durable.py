"""Durable files: what is written is on stable storage, and its name too, before anything is built on it.

The one place that turns the operating system's errors into those of nearflash for a store on a file system.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from cachefs.errors import CheckpointError, Denied, NearflashError, NotFound

from .fileops import FileOps

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
_BATCH_VIEWS = 512
_HINTS = {
    errno.ENOSPC: "free space, or remove old steps",
    errno.EDQUOT: "the disk quota is used up: free space, or remove old steps",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a file is where a folder should be",
}


class DurableFiles:
    """Writes files and folders through a :class:`FileOps`, and remembers what the file system cannot give.

    Thread-safe. Raises ``OSError``; :func:`os_errors` around it makes that an error of nearflash.
    """

    def __init__(self, ops: FileOps, url: str) -> None:
        self.ops = ops
        self._url = url
        self._lock = threading.Lock()
        self._weaknesses: list[str] = []

    @property
    def weaknesses(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._weaknesses)

    def make_folders(self, path: str) -> None:
        """Make a folder and what is missing above it, each durable in the one above."""
        if os.path.isdir(path):
            return
        above = os.path.dirname(path)
        if above != path:
            self.make_folders(above)
        try:
            self.ops.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        self.sync_folder(above)

    def write_file(self, path: str, views: Iterable[memoryview]) -> int:
        size = 0
        fd = self.ops.create(path)
        try:
            for batch in _batches(views):
                self.ops.write(fd, batch)
                size += sum(map(len, batch))
            self.ops.fsync(fd)
        finally:
            self.ops.close(fd)
        return size

    def sync_folder(self, path: str) -> None:
        if not self.ops.sync_folder(path):
            self._note("this file system cannot fsync a folder: a step may not survive a power cut")

    def _note(self, text: str) -> None:
        with self._lock:
            if text in self._weaknesses:
                return
            self._weaknesses.append(text)
        logger.warning("%s: %s", self._url, text)


@contextmanager
def os_errors(url: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block into an error of nearflash that names ``url``."""
    try:
        yield
    except NearflashError:
        raise
    except OSError as e:
        raise translate(e, url) from e


def translate(error: OSError, url: str) -> NearflashError:
    """The error of nearflash for one of the file system."""
    if isinstance(error, FileNotFoundError):
        return NotFound("there is no such file", url=url)
    if isinstance(error, PermissionError):
        return Denied("no permission", url=url)
    reason = error.strerror or str(error)
    return CheckpointError(reason, url=url, hint=_HINTS.get(error.errno or 0))


def _batches(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Views in groups for one call each: many small tensors must not cost a call each."""
    batch: list[memoryview] = []
    pending = 0
    for view in views:
        batch.append(view)
        pending += len(view)
        if pending >= _BATCH_BYTES or len(batch) >= _BATCH_VIEWS:
            yield batch
            batch, pending = [], 0
    if batch:
        yield batch
