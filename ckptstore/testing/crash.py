"""What a power cut may leave of a save on a file system: record the operations, then make every legal remainder.

:class:`RecordingOps` passes operations on and keeps them. :class:`Disk` carries a prefix of them out in memory and
tells durable from pending: bytes until the file is fsynced, names until their folder is. After a power cut a file has
the bytes of its last fsync and of what came after none, a beginning, or all, in full or as zeros; a folder has the
entries of its last fsync and any of the later changes, each alone (that is weaker than what journaling file systems
promise, as in Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014). A rename is one change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..fileops import FileOps, SystemFileOps

Bytes = Literal["durable", "half", "zeros", "all"]


@dataclass(frozen=True)
class Op:
    """One operation that has succeeded: its name in :class:`FileOps`, the path, and a second path or the bytes."""

    name: str
    path: str
    other: str = ""
    data: bytes = b""


class RecordingOps:
    """Passes every operation on to ``inner`` and keeps those that succeed."""

    def __init__(self, inner: FileOps | None = None) -> None:
        self.inner: FileOps = SystemFileOps() if inner is None else inner
        self.ops: list[Op] = []
        self._open: dict[int, str] = {}

    def mkdir(self, path: str) -> None:
        self.inner.mkdir(path)
        self.ops.append(Op("mkdir", path))

    def create(self, path: str) -> int:
        fd = self.inner.create(path)
        self._open[fd] = path
        self.ops.append(Op("create", path))
        return fd

    def write(self, fd: int, views: Sequence[memoryview]) -> None:
        self.inner.write(fd, views)
        self.ops.append(Op("write", self._open[fd], data=b"".join(views)))

    def fsync(self, fd: int) -> None:
        self.inner.fsync(fd)
        self.ops.append(Op("fsync", self._open[fd]))

    def close(self, fd: int) -> None:
        self.inner.close(fd)
        self._open.pop(fd, None)

    def sync_folder(self, path: str) -> bool:
        done = self.inner.sync_folder(path)
        if done:
            self.ops.append(Op("sync_folder", path))
        return done

    def rename_new(self, source: str, target: str) -> None:
        self.inner.rename_new(source, target)
        self.ops.append(Op("rename", source, target))

    def link_new(self, source: str, target: str) -> None:
        self.inner.link_new(source, target)
        self.ops.append(Op("link", source, target))

    def unlink(self, path: str) -> None:
        self.inner.unlink(path)
        self.ops.append(Op("unlink", path))

    def rmdir(self, path: str) -> None:
        self.inner.rmdir(path)
        self.ops.append(Op("rmdir", path))


@dataclass
class _File:
    durable: bytes = b""
    data: bytes = b""


@dataclass
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[Callable[[dict[str, _File | _Folder]], None]] = field(default_factory=list)

    def change(self, act: Callable[[dict[str, _File | _Folder]], None]) -> None:
        act(self.entries)
        self.pending.append(act)

    def sync(self) -> None:
        self.durable = dict(self.entries)
        self.pending.clear()


class Disk:
    """The state of the folder ``base`` after some operations; ``base`` itself is durable and empty at first."""

    def __init__(self, base: str, ops: Sequence[Op]) -> None:
        self._base = base
        self._root = _Folder()
        for op in ops:
            self._carry_out(op)

    def crash(
        self, target: Path, *, survives: Callable[[], bool] = lambda: False, content: Callable[[], Bytes]
    ) -> None:
        """Write into the folder ``target`` what a power cut now may leave.

        ``survives`` is asked for each pending change of a folder, ``content`` for each file that has pending bytes.
        """
        self._leave(self._root, target, survives, content)

    def _leave(self, folder: _Folder, target: Path, survives: Callable[[], bool], content: Callable[[], Bytes]) -> None:
        entries = dict(folder.durable)
        for act in folder.pending:
            if survives():
                act(entries)
        target.mkdir(exist_ok=True)
        for name, node in entries.items():
            if isinstance(node, _Folder):
                self._leave(node, target / name, survives, content)
            else:
                (target / name).write_bytes(_remains(node, content))

    def _carry_out(self, op: Op) -> None:
        folder, name = self._at(op.path)
        if op.name == "mkdir":
            self._add(folder, name, _Folder())
        elif op.name == "create":
            self._add(folder, name, _File())
        elif op.name == "write":
            file = folder.entries[name]
            assert isinstance(file, _File)
            file.data += op.data
        elif op.name == "fsync":
            file = folder.entries[name]
            assert isinstance(file, _File)
            file.durable = file.data
        elif op.name == "sync_folder":
            self._folder(op.path).sync()
        elif op.name == "link":
            other, new = self._at(op.other)
            self._add(other, new, folder.entries[name])
        elif op.name in {"unlink", "rmdir"}:

            def remove(entries: dict[str, _File | _Folder]) -> None:
                entries.pop(name, None)

            folder.change(remove)
        elif op.name == "rename":
            other, new = self._at(op.other)
            assert other is folder, "a rename within one folder is all this model knows"
            node = folder.entries[name]

            def move(entries: dict[str, _File | _Folder]) -> None:
                entries.pop(name, None)
                entries[new] = node

            folder.change(move)
        else:
            raise AssertionError(op)

    def _add(self, folder: _Folder, name: str, node: _File | _Folder) -> None:
        folder.change(lambda entries: entries.__setitem__(name, node))

    def _at(self, path: str) -> tuple[_Folder, str]:
        return self._folder(os.path.dirname(path)) if path != self._base else self._root, os.path.basename(path)

    def _folder(self, path: str) -> _Folder:
        node: _File | _Folder = self._root
        relative = os.path.relpath(path, self._base)
        for name in relative.split(os.sep) if relative != "." else []:
            assert isinstance(node, _Folder)
            node = node.entries[name]
        assert isinstance(node, _Folder)
        return node


def _remains(file: _File, content: Callable[[], Bytes]) -> bytes:
    if file.durable == file.data:
        return file.data
    kind = content()
    extra = file.data[len(file.durable) :]
    if kind == "durable":
        return file.durable
    if kind == "half":
        return file.durable + extra[: len(extra) // 2]
    return file.durable + (bytes(len(extra)) if kind == "zeros" else extra)
