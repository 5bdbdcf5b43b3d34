"""A checkpoint store in a folder of a POSIX file system (local, or shared by nodes: NFS, Lustre, ...).

A step is written into a hidden folder beside the others and becomes a checkpoint by one rename that cannot replace
anything; files and folders are fsynced before it, the root after it. A small record is written under a temporary
name and linked to its own, so it is there whole or not at all.
"""

from __future__ import annotations

import builtins
import errno
import logging
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cachefs.errors import CheckpointConflict, CheckpointError, Denied, NearflashError, NotFound

from .fileops import FileOps, SystemFileOps
from .layout import MANIFEST, TEMP_PREFIX, StepRef, check_file
from .storage import FileInfo, Stage, Storage, byte_views, check_name, too_short

if TYPE_CHECKING:
    from typing_extensions import Buffer

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 << 20
_BATCH_VIEWS = 512
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
_HINTS = {
    errno.ENOSPC: "free space, or remove old steps",
    errno.EDQUOT: "the disk quota is used up: free space, or remove old steps",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a file is where a folder should be",
}


class PosixStorage(Storage):
    """A folder. It is made by the first save, never by a reader; symbolic links on the way to it are followed.

    ``ops`` is the boundary to the file system for everything a save does (tests record it).
    """

    def __init__(self, root: str | os.PathLike[str], *, ops: FileOps | None = None) -> None:
        self.root = os.path.abspath(root)
        self.url = self.root
        self._ops: FileOps = SystemFileOps() if ops is None else ops
        self._lock = threading.Lock()
        self._weaknesses: list[str] = []

    @property
    def weaknesses(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._weaknesses)

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def read(self, name: str) -> bytes:
        with self._errors(name), open(self._path(name), "rb", buffering=0) as f:
            return f.readall()

    def read_range(self, name: str, start: int, end: int) -> Buffer:
        wanted = end - start
        with self._errors(name), open(self._path(name), "rb", buffering=0) as f:
            f.seek(start)
            data = f.read(wanted) or b""
            while len(data) < wanted:  # one call reads 2 GiB at most
                more = f.read(wanted - len(data))
                if not more:
                    raise too_short(self.describe(name), start, wanted, len(data))
                data += more
        return data

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        if not target.nbytes:
            return
        view = target.cast("B")
        filled = 0
        with self._errors(name), open(self._path(name), "rb", buffering=0) as f:
            f.seek(start)
            while filled < len(view):
                got = f.readinto(view[filled:])
                if not got:
                    raise too_short(self.describe(name), start, len(view), filled)
                filled += got

    def size(self, name: str) -> int:
        with self._errors(name):
            status = os.stat(self._path(name))
        if not stat.S_ISREG(status.st_mode):
            raise NotFound("is no file", url=self.describe(name))
        return status.st_size

    def list(self, prefix: str = "") -> list[FileInfo]:
        folder = prefix.rpartition("/")[0]
        with self._errors(folder):
            found = [info for info in self._walk(check_name(folder) if folder else "") if info.name.startswith(prefix)]
        return sorted(found, key=lambda info: info.name)

    def folders(self) -> builtins.list[str]:
        with self._errors(""):
            try:
                with os.scandir(self.root) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir())
            except FileNotFoundError:
                return []

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"{TEMP_PREFIX}{secrets.token_hex(8)}")
        with self._errors(name):
            self._make_folders(folder)
            self._write_file(temporary, [memoryview(data)])
            try:
                self._ops.link_new(temporary, path)
            except FileExistsError:
                return False
            finally:
                try:
                    self._ops.unlink(temporary)
                except FileNotFoundError:  # where links are lacking, it was moved
                    pass
            self._sync_folder(folder)
        return True

    def stage(self, ref: StepRef, attempt: str) -> Stage:
        with self._errors(ref.folder):
            self._make_folders(self.root)
        return _PosixStage(self, ref, attempt)

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *check_name(name).split("/"))

    def _walk(self, folder: str) -> Iterator[FileInfo]:
        path = self._path(folder) if folder else self.root
        try:
            with os.scandir(path) as entries:
                found = list(entries)
        except FileNotFoundError:
            return
        for entry in found:
            name = f"{folder}/{entry.name}" if folder else entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(name)
            elif entry.is_file():
                try:
                    status = entry.stat()
                except FileNotFoundError:  # removed since: a listing is of one moment
                    continue
                yield FileInfo(name, status.st_size, status.st_mtime)

    def _make_folders(self, path: str) -> None:
        """Make a folder and what is missing above it, each durable in the one above."""
        if os.path.isdir(path):
            return
        above = os.path.dirname(path)
        if above != path:
            self._make_folders(above)
        try:
            self._ops.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
        self._sync_folder(above)

    def _write_file(self, path: str, views: Iterable[memoryview]) -> int:
        size = 0
        fd = self._ops.create(path)
        try:
            for batch in _batches(views):
                self._ops.write(fd, batch)
                size += sum(map(len, batch))
            self._ops.fsync(fd)
        finally:
            self._ops.close(fd)
        return size

    def _sync_folder(self, path: str) -> None:
        if not self._ops.sync_folder(path):
            self._note("this file system cannot fsync a folder: a step may not survive a power cut")

    def _note(self, text: str) -> None:
        with self._lock:
            if text in self._weaknesses:
                return
            self._weaknesses.append(text)
        logger.warning("%s: %s", self.url, text)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn ``OSError`` into an error of nearflash that names the file."""
        try:
            yield
        except NearflashError:
            raise
        except OSError as e:
            raise translate(e, self.describe(name) if name else self.url) from e


class _PosixStage(Stage):
    """A hidden folder that becomes the step's. See :class:`.storage.Stage`."""

    needs_tombstone = False

    def __init__(self, storage: PosixStorage, ref: StepRef, attempt: str) -> None:
        self.ref = ref
        self.attempt = attempt
        self._has_manifest = False
        self._storage = storage
        self._ops = storage._ops
        self._final = os.path.join(storage.root, ref.folder)
        self._folder = os.path.join(storage.root, ref.temp_folder(attempt))
        with storage._errors(ref.folder):
            try:
                self._ops.mkdir(self._folder)
            except FileExistsError:  # another process of this attempt was first
                if not os.path.isdir(self._folder):
                    raise
            self._identity = _identity(self._folder)

    def write(self, file: str, buffers: Iterable[Buffer]) -> int:
        check_file(file)
        name = f"{self.ref.folder}/{file}"
        with self._storage._errors(name):
            try:
                size = self._storage._write_file(os.path.join(self._folder, file), byte_views(buffers))
            except FileExistsError:
                raise CheckpointConflict(
                    "was written before by an attempt of this id",
                    url=self._storage.describe(name),
                    hint="abort the earlier save, or give each run its own attempt id",
                ) from None
            self._storage._sync_folder(self._folder)
        return size

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._storage._errors(self.ref.folder), os.scandir(self._folder) as entries:
            for entry in entries:
                # Opening makes a network file system ask the server, where stat may answer from a stale cache.
                with open(entry.path, "rb", buffering=0) as f:
                    found[entry.name] = os.fstat(f.fileno()).st_size
        return found

    def publish(self, manifest: bytes) -> bool:
        with self._storage._errors(self.ref.manifest):
            path = os.path.join(self._folder, MANIFEST)
            if not self._has_manifest:
                self._storage._write_file(path, [memoryview(manifest)])
                self._has_manifest = True
            self._storage._sync_folder(self._folder)
            try:
                self._ops.rename_new(self._folder, self._final)
            except OSError as e:
                if e.errno in _TAKEN:
                    return False
                raise
        return True

    def settle(self) -> None:
        with self._storage._errors(self.ref.folder):
            self._storage._sync_folder(self._storage.root)

    def discard(self) -> list[CheckpointError]:
        """As the base class says, and more: the attempt's whole hidden folder goes, whoever wrote into it.

        It is renamed first. So a coordinator that is about to commit finds it gone, or was faster and nothing of the
        committed step is touched.
        """
        dead = f"{self._folder}.dead-{secrets.token_hex(8)}"
        try:
            if _identity(self._folder) != self._identity:  # a later save of the same step
                return []
            self._ops.rename_new(self._folder, dead)
        except FileNotFoundError:
            return []
        except OSError as e:
            return [CheckpointError(f"cannot be removed: {e.strerror}", url=self._folder)]
        failed: list[CheckpointError] = []
        try:
            for name in os.listdir(dead):
                try:
                    self._ops.unlink(os.path.join(dead, name))
                except OSError as e:
                    failed.append(CheckpointError(f"cannot be removed: {e.strerror}", url=os.path.join(dead, name)))
            if not failed:
                self._ops.rmdir(dead)
        except OSError as e:
            failed.append(CheckpointError(f"cannot be removed: {e.strerror}", url=dead))
        return failed


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


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
