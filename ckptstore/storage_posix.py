"""A checkpoint store in a folder of a POSIX file system (local, or shared by nodes: NFS, Lustre, ...).

A step is written into a hidden folder beside the others and becomes a checkpoint by one rename that cannot replace
anything; files and folders are fsynced before it, the root after it. A small record is written under a temporary
name and linked to its own, so it is there whole or not at all.
"""

from __future__ import annotations

import builtins
import os
import secrets
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cachefs.errors import NotFound

from .durable import DurableFiles, os_errors
from .fileops import FileOps, SystemFileOps
from .layout import TEMP_PREFIX, StepRef
from .stage_posix import PosixStage
from .storage import FileInfo, Stage, Storage, check_name, too_short

if TYPE_CHECKING:
    from typing_extensions import Buffer


class PosixStorage(Storage):
    """A folder. It is made by the first save, never by a reader; symbolic links on the way to it are followed.

    ``ops`` is the boundary to the file system for everything a save does (tests record it).
    """

    def __init__(self, root: str | os.PathLike[str], *, ops: FileOps | None = None) -> None:
        self.root = os.path.abspath(root)
        self.url = self.root
        self._files = DurableFiles(SystemFileOps() if ops is None else ops, self.url)

    @property
    def weaknesses(self) -> tuple[str, ...]:
        return self._files.weaknesses

    def exists(self) -> bool:
        return os.path.isdir(self.root)

    def read(self, name: str) -> bytes:
        with os_errors(self.describe(name)), open(self._path(name), "rb", buffering=0) as f:
            return f.readall()

    def read_range(self, name: str, start: int, end: int) -> Buffer:
        wanted = end - start
        with os_errors(self.describe(name)), open(self._path(name), "rb", buffering=0) as f:
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
        with os_errors(self.describe(name)), open(self._path(name), "rb", buffering=0) as f:
            f.seek(start)
            while filled < len(view):
                got = f.readinto(view[filled:])
                if not got:
                    raise too_short(self.describe(name), start, len(view), filled)
                filled += got

    def size(self, name: str) -> int:
        with os_errors(self.describe(name)):
            status = os.stat(self._path(name))
        if not stat.S_ISREG(status.st_mode):
            raise NotFound("is no file", url=self.describe(name))
        return status.st_size

    def list(self, prefix: str = "") -> list[FileInfo]:
        folder = prefix.rpartition("/")[0]
        with os_errors(self.describe(folder) if folder else self.url):
            found = [info for info in self._walk(check_name(folder) if folder else "") if info.name.startswith(prefix)]
        return sorted(found, key=lambda info: info.name)

    def folders(self) -> builtins.list[str]:
        with os_errors(self.url):
            try:
                with os.scandir(self.root) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir())
            except FileNotFoundError:
                return []

    def create(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        folder = os.path.dirname(path)
        temporary = os.path.join(folder, f"{TEMP_PREFIX}{secrets.token_hex(8)}")
        with os_errors(self.describe(name)):
            self._files.make_folders(folder)
            try:
                self._files.write_file(temporary, [memoryview(data)])
                self._files.ops.link_new(temporary, path)
            except FileExistsError:
                return False
            finally:
                try:
                    self._files.ops.unlink(temporary)
                except FileNotFoundError:  # never made, or, where links are lacking, moved
                    pass
            self._files.sync_folder(folder)
        return True

    def stage(self, ref: StepRef, attempt: str) -> Stage:
        return PosixStage(self._files, self.root, ref, attempt)

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
