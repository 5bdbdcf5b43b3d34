"""The backend for local files, in plain system calls: every name a file system can hold, atomic and durable writes.

obstore's own reads as fast, but keeps some names to itself (``x#1``), refuses those that are no Unicode, and does not
work in a forked process.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..errors import Changed, ConfigError, NotFound, StoreError
from .abc import Listing, ObjectMeta, ObjectStore
from .buffers import as_pieces, check_version
from .replies import error_for, refusal_of_os_error
from .tasks import all_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_DELETES_AT_ONCE = 8
# Not blocking: opening a pipe would wait for its other end.
_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
_PREFIX, _SUFFIX = ".nearflash-", ".part"


class LocalStore(ObjectStore):
    """All files of this machine; keys are absolute, normalised paths. One try per call, in a thread.

    A file is written beside its place under a hidden name, synchronised, and moved there. Such leftovers of a process
    that died are not listed. A conditional create is a hard link; a conditional overwrite is a :class:`StoreError`,
    since no system call compares and replaces. ``etag`` is made of inode, time stamp and size.
    """

    url = "file://"

    async def head(self, key: str) -> ObjectMeta:
        return await self._do("head", key, lambda: _meta(key, os.stat(_path(key))))

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if start == end:
            return b""
        return (await self._do("get", key, lambda: _read(key, version, (start, end))))[1]

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        return await self._do("get", key, lambda: _read(key, None, None))

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        if not prefix.startswith("/"):
            raise _no_path(prefix)
        return await self._do("list", prefix, lambda: _listing(prefix, delimiter)), None

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        if if_match is not None:
            raise StoreError("a file system has no conditional overwrite", url=f"file://{key}")

        def write() -> ObjectMeta:
            with _Draft(_path(key)) as draft:
                for piece in as_pieces(data):
                    draft.write(piece)
                return draft.publish(key, create=if_none_match)

        return await self._do("put", key, write)

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        draft = await self._do("put", key, lambda: _Draft(_path(key)))
        try:
            async for part in parts:
                for piece in as_pieces(part):
                    await self._do("put", key, partial(draft.write, piece))
            return await self._do("put", key, lambda: draft.publish(key, create=False))
        finally:
            draft.discard()

    async def delete(self, keys: Sequence[str]) -> None:
        await all_of([partial(self._delete_one, key) for key in keys], at_once=_DELETES_AT_ONCE)

    async def _delete_one(self, key: str) -> None:
        try:
            await self._do("delete", key, lambda: os.unlink(_path(key)))
        except NotFound:
            pass  # a missing key is no error

    async def _do(self, doing: str, key: str, call: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(call)
        except StoreError:
            raise
        except OSError as e:
            raise error_for(refusal_of_os_error(e), doing, url=f"file://{key}") from e


class _Draft:
    """A file on its way: under a name of its own beside ``path`` until it is published or discarded."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder = os.path.dirname(path)
        os.makedirs(self._folder, exist_ok=True)
        self._name = os.path.join(self._folder, f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}")
        self._fd: int | None = os.open(self._name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, piece: memoryview) -> None:
        assert self._fd is not None
        while piece.nbytes:
            piece = piece[os.write(self._fd, piece) :]

    def publish(self, key: str, *, create: bool) -> ObjectMeta:
        assert self._fd is not None
        os.fsync(self._fd)
        if create:
            os.link(self._name, self._path)
            os.unlink(self._name)
        else:
            os.replace(self._name, self._path)
        meta = _meta(key, os.fstat(self._fd))
        os.close(self._fd)
        self._fd = None
        if hasattr(os, "O_DIRECTORY"):
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        return meta

    def discard(self) -> None:
        """Remove it, unless it has been published. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            with suppress(FileNotFoundError):  # a create that failed after its link
                os.unlink(self._name)

    def __enter__(self) -> _Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


def _path(key: str) -> str:
    if not key.startswith("/") or os.path.normpath(key) != key or "\0" in key:
        raise _no_path(key)
    return key


def _no_path(key: str) -> ConfigError:
    return ConfigError(f"{key!r} is no absolute, normalised path", url="file://")


def _meta(key: str, status: os.stat_result) -> ObjectMeta:
    if not stat.S_ISREG(status.st_mode):
        what = "a directory" if stat.S_ISDIR(status.st_mode) else "a device, socket or pipe"
        raise NotFound(f"{what}, not a file", url=f"file://{key}")
    etag = f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'
    return ObjectMeta(key, status.st_size, etag=etag, modified=status.st_mtime)


def _read(key: str, version: ObjectMeta | None, span: tuple[int, int] | None) -> tuple[ObjectMeta, bytearray]:
    fd = os.open(_path(key), _READ)
    try:
        meta = _meta(key, os.fstat(fd))
        if version is not None:
            check_version(meta, version, url=f"file://{key}")
        start, end = span or (0, meta.size)
        if end > meta.size:
            raise Changed("the file is shorter than the range that was asked for", url=f"file://{key}")
        data = bytearray(end - start)
        _fill(fd, memoryview(data), start, key)
        check_version(_meta(key, os.fstat(fd)), meta, url=f"file://{key}")
        return meta, data
    finally:
        os.close(fd)


def _fill(fd: int, view: memoryview, offset: int, key: str) -> None:
    os.lseek(fd, offset, os.SEEK_SET)
    with open(fd, "rb", buffering=0, closefd=False) as file:
        while view.nbytes:
            count = file.readinto(view)
            if not count:
                raise Changed("the file became shorter while it was read", url=f"file://{key}")
            view = view[count:]


def _listing(prefix: str, delimiter: bool) -> Listing:
    objects: list[ObjectMeta] = []
    folders: list[str] = []
    waiting = [prefix[: prefix.rfind("/") + 1]]
    seen: set[tuple[int, int]] = set()  # folders, so that links in a circle end
    while waiting:
        folder = waiting.pop()
        try:
            status = os.stat(folder)
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            continue  # a prefix of nothing, or gone in the meantime
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        for entry in entries:
            path = folder + entry.name
            if entry.is_dir():
                inside = path + "/"
                if inside.startswith(prefix) or prefix.startswith(inside):
                    (folders if delimiter else waiting).append(inside)
            elif path.startswith(prefix) and not (entry.name.startswith(_PREFIX) and entry.name.endswith(_SUFFIX)):
                with suppress(FileNotFoundError, NotFound):  # gone in the meantime, a dangling link, a device
                    objects.append(_meta(path, os.stat(path)))
    return Listing(tuple(sorted(objects, key=lambda meta: meta.key)), tuple(sorted(folders)))
