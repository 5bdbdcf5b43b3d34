"""The backend over obstore, a binding of the Rust crate object_store: S3, GCS, Azure, HTTP, local files, memory.

It takes about a fifth of the CPU time that pure Python clients take for a byte, and no GIL. What it cannot do is read
every key under its own name: a path may not have empty, ``.`` or ``..`` segments, loses a slash at either end, and may
not hold control characters (:func:`.route.is_plain` tells); and a listing takes a folder for a prefix, gives folder
markers without their slash, and fails as a whole at a key of that kind. :mod:`.route` sends those elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import obstore

from ..errors import Changed, NotFound, StoreError, Unavailable
from .abc import Listing, ObjectMeta, ObjectStore
from .buffers import as_pieces, check_range, check_version, match_tag
from .multipart import Parts
from .native import RUNTIME
from .obstore_errors import OBSTORE_ERRORS, refusal_of
from .replies import error_for, refusal_without_tag
from .tasks import all_of, cancel_all

if TYPE_CHECKING:
    from obstore import GetOptions
    from typing_extensions import Buffer

_LIST_PAGE = 1000
_PART_BYTES = 16 << 20
_DELETES_AT_ONCE = 16
_ABORT_SECONDS = 10.0


@dataclass(frozen=True)
class Clients:
    """obstore's store objects for one bucket, which differ in their HTTP settings only.

    ``read`` cuts a reply that goes quiet. ``write`` does not, because the same timer also runs while a body is sent.
    ``multipart`` retries by itself: obstore keeps the parts of an upload to itself, so nobody above it could.
    """

    read: Any
    write: Any
    multipart: Any


@dataclass(frozen=True)
class Traits:
    """What differs between the stores behind obstore.

    ``to_path`` and ``to_key`` turn a key into obstore's path and back. ``bulk_delete``: one request deletes many keys
    and a missing one is no error. ``explains_head``: a refused HEAD is worth a GET, whose reply has a body that gives
    the reason. ``tagged``: every object has an ETag, so a reply without one is none of an object. ``pages``: a listing
    comes in key order and can go on after a key; otherwise it is taken as one page.
    """

    to_path: Callable[[str], str] = str
    to_key: Callable[[str], str] = str
    bulk_delete: bool = False
    explains_head: bool = False
    tagged: bool = False
    pages: bool = True


class ObstoreStore(ObjectStore):
    """One bucket (or root) through obstore. One try per call; keys must be plain (:mod:`.route`).

    ``connect`` makes the clients before the first request, in a thread; it raises when there are no credentials.
    ``renew`` looks credentials up anew and tells whether they may be others; it may block.
    """

    def __init__(
        self,
        url: str,
        connect: Callable[[], Clients],
        traits: Traits,
        *,
        renew: Callable[[], bool] | None = None,
    ) -> None:
        self.url = url
        self._connect = connect
        self._traits = traits
        self._renew = renew
        self._connected: Clients | None = None

    async def head(self, key: str) -> ObjectMeta:
        clients = await self._clients()
        try:
            meta = await obstore.head_async(clients.read, self._path(key))
        except OBSTORE_ERRORS as e:
            raise await self._head_error(e, clients, key) from e
        self._check_tag(meta, b"", "head", key)
        return _meta(key, meta)

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if start == end:
            return b""
        clients = await self._clients()
        options: GetOptions = {"range": (start, end)}
        if (tag := match_tag(version)) is not None:
            options["if_match"] = tag
        try:
            reply = await obstore.get_async(clients.read, self._path(key), options=options)
            data = await reply.bytes_async()
        except OBSTORE_ERRORS as e:
            raise self._error(e, "get", key, bound=version is not None) from e
        url = self._url_of(key)
        if version is not None:
            check_version(_meta(key, reply.meta), version, url=url)
        elif reply.meta["size"] < end:
            raise Changed("the object is shorter than the range that was asked for", url=url)
        check_range(reply.range, len(data), (start, end), url=url)
        return data

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        clients = await self._clients()
        try:
            reply = await obstore.get_async(clients.read, self._path(key))
            data = await reply.bytes_async()
        except OBSTORE_ERRORS as e:
            raise self._error(e, "get", key) from e
        self._check_tag(reply.meta, data, "get", key)
        meta = _meta(key, reply.meta)
        check_range((0, meta.size), len(data), (0, meta.size), url=self._url_of(key))
        return meta, data

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        clients = await self._clients()
        folder = self._path(prefix[: prefix.rfind("/") + 1]).strip("/") or None
        try:
            if delimiter:
                found = await obstore.list_with_delimiter_async(clients.read, folder)
                return self._listing(prefix, found["objects"], found["common_prefixes"]), None
            pages = obstore.list(clients.read, folder, offset=token, chunk_size=_LIST_PAGE)
            if not self._traits.pages:
                return self._listing(prefix, [o async for page in pages for o in page]), None
            page: Sequence[Any] = await anext(pages, [])
        except OBSTORE_ERRORS as e:
            raise self._error(e, "list", prefix) from e
        last = page[-1]["path"] if len(page) == _LIST_PAGE else None
        return self._listing(prefix, page), last

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        clients = await self._clients()
        pieces = as_pieces(data)
        mode: Any = "create" if if_none_match else {"e_tag": if_match} if if_match is not None else "overwrite"
        try:
            result = await obstore.put_async(
                clients.write, self._path(key), pieces or b"", mode=mode, use_multipart=False
            )
        except OBSTORE_ERRORS as e:
            raise self._error(e, "put", key) from e
        size = sum(piece.nbytes for piece in pieces)
        return ObjectMeta(key, size, etag=result["e_tag"], version_id=result["version"])

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        clients = await self._clients()
        source = Parts(parts)
        upload = asyncio.ensure_future(
            obstore.put_async(
                clients.multipart,
                self._path(key),
                source,
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=concurrency,
            )
        )
        try:
            result = await asyncio.shield(upload)
        except OBSTORE_ERRORS as e:
            if source.error is not None:
                raise source.error from None
            raise self._error(e, "put", key) from e
        except asyncio.CancelledError:
            # obstore aborts an upload whose source fails, but not one whose future is cancelled.
            source.stop()
            await asyncio.wait({upload}, timeout=_ABORT_SECONDS)
            raise
        finally:
            await cancel_all([upload])
        return ObjectMeta(key, source.size, etag=result["e_tag"], version_id=result["version"])

    async def delete(self, keys: Sequence[str]) -> None:
        clients = await self._clients()
        if self._traits.bulk_delete and len(keys) > 1:
            try:
                await obstore.delete_async(clients.write, [self._path(key) for key in keys])
            except OBSTORE_ERRORS as e:
                raise self._error(e, "delete", keys[0]) from e
        else:
            await all_of([partial(self._delete_one, clients, key) for key in keys], at_once=_DELETES_AT_ONCE)

    async def renew(self) -> bool:
        if self._renew is None or not await asyncio.to_thread(self._renew):
            return False
        self._connected = None  # the new one has none of the old one's tokens
        return True

    async def close(self) -> None:
        self._connected = None

    async def _delete_one(self, clients: Clients, key: str) -> None:
        try:
            await obstore.delete_async(clients.write, self._path(key))
        except OBSTORE_ERRORS as e:
            error = self._error(e, "delete", key)
            if not isinstance(error, NotFound):
                raise error from e

    async def _clients(self) -> Clients:
        if self._connected is None:
            if not RUNTIME.start():
                raise Unavailable(
                    "obstore does not work in a process that was forked from one that used it",
                    url=self.url,
                    hint="start worker processes with spawn or forkserver",
                )
            self._connected = await asyncio.to_thread(self._connect)
        return self._connected

    def _path(self, key: str) -> str:
        return self._traits.to_path(key)

    def _url_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _error(self, error: BaseException, doing: str, key: str, *, bound: bool = False) -> StoreError:
        return error_for(refusal_of(error), doing, url=self._url_of(key), bound=bound)

    def _check_tag(self, reply: Any, body: Buffer, doing: str, key: str) -> None:
        if self._traits.tagged and reply["e_tag"] is None:
            raise error_for(refusal_without_tag(memoryview(body)), doing, url=self._url_of(key))

    async def _head_error(self, error: BaseException, clients: Clients, key: str) -> StoreError:
        """The reason of a refused HEAD, which has no body to give one: that of a GET of the first byte."""
        refusal = refusal_of(error)
        if self._traits.explains_head and refusal.status is not None and refusal.status < 500:
            try:
                await obstore.get_async(clients.read, self._path(key), options={"range": (0, 1)})
            except OBSTORE_ERRORS as e:
                why = refusal_of(e)
                if why.status == refusal.status:
                    refusal = why
        return error_for(refusal, "head", url=self._url_of(key))

    def _listing(self, prefix: str, objects: Sequence[Any], folders: Sequence[str] = ()) -> Listing:
        """What of a page, which obstore gives for a whole folder, is wanted; sorted."""
        metas = (_meta(self._traits.to_key(o["path"]), o) for o in objects)
        prefixes = (self._traits.to_key(path) + "/" for path in folders)
        return Listing(
            tuple(sorted((meta for meta in metas if meta.key.startswith(prefix)), key=lambda meta: meta.key)),
            tuple(sorted(p for p in prefixes if p.startswith(prefix))),
        )


def _meta(key: str, reply: Any) -> ObjectMeta:
    return ObjectMeta(
        key,
        reply["size"],
        etag=reply["e_tag"],
        version_id=reply["version"],
        modified=reply["last_modified"].timestamp(),
    )
