"""The backend over any other fsspec file system, through its synchronous methods in threads.

fsspec's view is a file system's: no conditional writes, and as much atomicity as the file system behind it has.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigError, NotFound, StoreError
from .abc import Listing, ObjectMeta, ObjectStore
from .buffers import as_pieces, check_range, check_version
from .replies import Refusal, error_for, refusal_of_os_error, shorten
from .tasks import all_of
from .url import ObjectUrl

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_DELETES_AT_ONCE = 8
_HEADS_AT_ONCE = 16


class FsspecStore(ObjectStore):
    """One bucket (or root) of an fsspec file system. One try per call.

    The file system is made at the first call; a package that is missing for it is a :class:`ConfigError`. ``ask`` tells
    of objects whose size or version a listing leaves out (default: :meth:`head`); to be given where another backend
    serves the objects themselves, which may tell versions otherwise.
    """

    def __init__(self, url: ObjectUrl, *, ask: Callable[[str], Awaitable[ObjectMeta]] | None = None) -> None:
        self.url = url.root
        self._url = url
        self._ask = ask or self.head
        self._made: Any = None

    async def head(self, key: str) -> ObjectMeta:
        return await self._do("head", key, self._head)

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if start == end:
            return b""

        def read(fs: Any, path: str) -> bytes:
            url = self._url_of(key)
            if version is not None:
                check_version(self._head(fs, path), version, url=url)
            data: bytes = fs.cat_file(path, start=start, end=end)
            if version is not None:
                # Nothing binds the read itself to a version: the same one before and after it is what can be had.
                check_version(self._head(fs, path), version, url=url)
            check_range((start, end), len(data), (start, end), url=url)
            return data

        return await self._do("get", key, read)

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        def read(fs: Any, path: str) -> tuple[ObjectMeta, bytes]:
            meta = self._head(fs, path)
            data: bytes = fs.cat_file(path)
            check_version(self._head(fs, path), meta, url=self._url_of(key))
            check_range((0, meta.size), len(data), (0, meta.size), url=self._url_of(key))
            return meta, data

        return await self._do("get", key, read)

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        def find(fs: Any, folder: str) -> list[dict[str, Any]]:
            try:
                found = fs.ls(folder, detail=True) if delimiter else fs.find(folder, detail=True).values()
            except FileNotFoundError:
                return []
            return list(found)

        infos = await self._do("list", prefix[: prefix.rfind("/") + 1], find)
        named = [(self._key_of(info["name"]), info) for info in infos]
        wanted = [(key, info) for key, info in named if key.startswith(prefix)]
        files = sorted((item for item in wanted if item[1]["type"] == "file"), key=lambda item: item[0])
        found = await all_of([partial(self._listed, key, info) for key, info in files], at_once=_HEADS_AT_ONCE)
        objects = (meta for meta in found if meta is not None)
        folders = sorted(key.rstrip("/") + "/" for key, info in wanted if info["type"] == "directory")
        return Listing(tuple(objects), tuple(folders)), None

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        if if_none_match or if_match is not None:
            raise StoreError(
                "conditional writes are not possible through fsspec", url=self._url_of(key), hint="use a native backend"
            )

        def write(fs: Any, path: str) -> ObjectMeta:
            fs.pipe_file(path, b"".join(as_pieces(data)))
            return self._head(fs, path)

        return await self._do("put", key, write)

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        # Gathered on disk first: most file systems show a file as soon as it is opened for writing.
        with tempfile.NamedTemporaryFile(prefix="nearflash-") as spool:
            async for part in parts:
                for piece in as_pieces(part):
                    await asyncio.to_thread(spool.write, piece)
            await asyncio.to_thread(spool.flush)

            def upload(fs: Any, path: str) -> ObjectMeta:
                fs.put_file(spool.name, path)
                return self._head(fs, path)

            return await self._do("put", key, upload)

    async def delete(self, keys: Sequence[str]) -> None:
        await all_of([partial(self._delete_one, key) for key in keys], at_once=_DELETES_AT_ONCE)

    async def close(self) -> None:
        self._made = None

    async def _listed(self, key: str, info: dict[str, Any]) -> ObjectMeta | None:
        """An object of a listing; ``None`` if it is not there after all (a page of links proves nothing)."""
        meta = _meta(key, info)
        if info.get("size") is not None and (meta.etag or meta.modified):
            return meta
        try:
            return await self._ask(key)
        except NotFound:
            return None

    async def _delete_one(self, key: str) -> None:
        try:
            await self._do("delete", key, lambda fs, path: fs.rm_file(path))
        except NotFound:
            pass  # a missing key is no error

    async def _do(self, doing: str, key: str, call: Callable[[Any, str], T]) -> T:
        def run() -> T:
            return call(self._file_system(), self._path_of(key))

        try:
            return await asyncio.to_thread(run)
        except (StoreError, ConfigError):
            raise
        except Exception as e:  # a file system of anybody's making raises what it likes
            raise error_for(refusal_of(e), doing, url=self._url_of(key)) from e

    def _file_system(self) -> Any:
        if self._made is None:
            import fsspec

            try:
                self._made = fsspec.filesystem(self._url.scheme)
            except (ImportError, ValueError) as e:
                raise ConfigError(
                    f"no file system for {self._url.scheme}:// URLs: {shorten(str(e))}", url=self.url
                ) from e
        return self._made

    def _head(self, fs: Any, path: str) -> ObjectMeta:
        info = fs.info(path)
        if info["type"] != "file":
            raise NotFound("a folder, not an object", url=path)
        return _meta(self._key_of(info["name"]), info)

    def _path_of(self, key: str) -> str:
        return self._url_of(key)

    def _key_of(self, name: str) -> str:
        root = self._file_system()._strip_protocol(self._url_of(""))
        return name.removeprefix(root).removeprefix("/")

    def _url_of(self, key: str) -> str:
        return f"{self.url}/{key}"


def refusal_of(error: BaseException) -> Refusal:
    """Kind of failure that a file system's exception stands for, as far as Python's own classes tell."""
    status = getattr(error, "status", None) or getattr(error, "status_code", None)
    if isinstance(status, int) and 300 <= status < 600:
        return Refusal(status, None, str(error))
    if isinstance(error, OSError):
        return refusal_of_os_error(error)
    return Refusal(400, type(error).__name__, str(error))


def _meta(key: str, info: dict[str, Any]) -> ObjectMeta:
    etag = info.get("ETag") or info.get("etag")
    stamp = next((info[name] for name in ("LastModified", "mtime", "created", "updated") if info.get(name)), 0.0)
    modified = stamp.timestamp() if isinstance(stamp, datetime) else stamp if isinstance(stamp, int | float) else 0.0
    return ObjectMeta(key, int(info["size"] or 0), etag=etag, modified=float(modified))
