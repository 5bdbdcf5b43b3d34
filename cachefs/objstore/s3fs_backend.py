"""The exact S3 backend: keys exactly as they stand, through the client that s3fs sets up.

s3fs's own path methods strip and split paths, so the client's calls are used, with bucket and key apart. It costs a
few times the CPU time of obstore for a byte; listings about 60 µs a key.
"""

from __future__ import annotations

import asyncio
import io
from base64 import b64decode
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config import Origin
from ..errors import Corrupt, NearflashError, NotFound, PreconditionFailed, StoreError, Unavailable
from .abc import Listing, ObjectMeta, ObjectStore
from .buffers import as_pieces, check_range, check_version, match_tag, parse_content_range
from .credentials import CredentialSource
from .multipart import upload_parts
from .presets import Access
from .replies import Refusal, error_for, refusal_without_tag
from .s3fs_errors import S3FS_ERRORS, refusal_of
from .tasks import all_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

_DELETES_AT_ONCE = 16
_CONNECT_SECONDS = 5.0
_LONG_BODY = 1 << 20


class S3fsStore(ObjectStore):
    """One S3 bucket through s3fs's client. One try per call; belongs to the event loop of its first call."""

    def __init__(
        self,
        url: str,
        bucket: str,
        origin: Origin,
        access: Access,
        source: CredentialSource,
        connect: Callable[[], Awaitable[Any]],
    ) -> None:
        self.url = url
        self._bucket = bucket
        self._payer = {"RequestPayer": "requester"} if origin.requester_pays else {}
        self._sealed = _sealing(origin.sse_customer_key)
        self._access = access
        self._source = source
        self._connect = connect
        self._connected: Any = None
        self._former: Any = None
        self._connecting = asyncio.Lock()

    async def head(self, key: str) -> ObjectMeta:
        client = await self._client()
        try:
            reply = await client.head_object(**self._object(key))
        except S3FS_ERRORS as e:
            raise await self._head_error(e, client, key) from e
        self._check_tag(reply, b"", "head", key)
        return _meta(key, reply, reply["ContentLength"])

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if start == end:
            return b""
        client = await self._client()
        tag = match_tag(version)
        condition = {"IfMatch": tag} if tag is not None else {}
        url = self._url_of(key)
        try:
            reply = await client.get_object(**self._object(key), Range=f"bytes={start}-{end - 1}", **condition)
            async with reply["Body"] as body:
                span = parse_content_range(reply.get("ContentRange"))
                if reply["ResponseMetadata"]["HTTPStatusCode"] != 206 or span is None:
                    raise Corrupt("a wrong reply: not the range that was asked for", url=url, offset=start)
                if version is not None:
                    check_version(_meta(key, reply, span[2]), version, url=url)
                check_range(span[:2], reply["ContentLength"], (start, end), url=url)
                data: bytes = await body.read()
        except S3FS_ERRORS as e:
            raise self._error(e, "get", key, bound=version is not None) from e
        check_range(span[:2], len(data), (start, end), url=url)
        return data

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        client = await self._client()
        try:
            reply = await client.get_object(**self._object(key))
            async with reply["Body"] as body:
                data: bytes = await body.read()
        except S3FS_ERRORS as e:
            raise self._error(e, "get", key) from e
        self._check_tag(reply, data, "get", key)
        meta = _meta(key, reply, reply["ContentLength"])
        check_range((0, meta.size), len(data), (0, meta.size), url=self._url_of(key))
        return meta, data

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        client = await self._client()
        options = {"Delimiter": "/"} if delimiter else {}
        if token is not None:
            options["ContinuationToken"] = token
        try:
            reply = await client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **options, **self._payer)
        except S3FS_ERRORS as e:
            raise self._error(e, "list", prefix) from e
        page = Listing(
            tuple(_meta(o["Key"], o, o["Size"]) for o in reply.get("Contents", ())),
            tuple(p["Prefix"] for p in reply.get("CommonPrefixes", ())),
        )
        return page, reply["NextContinuationToken"] if reply.get("IsTruncated") else None

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        client = await self._client()
        condition = {"IfNoneMatch": "*"} if if_none_match else {"IfMatch": if_match} if if_match is not None else {}
        body = _body(as_pieces(data))
        try:
            reply = await client.put_object(**self._object(key), Body=_stream(body), **condition)
        except S3FS_ERRORS as e:
            error = self._error(e, "put", key)
            if isinstance(error, PreconditionFailed) and await self._holds(client, key, body):
                # aiohttp repeats a PUT whose connection broke before the reply: what the condition met may be what
                # the first one wrote.
                raise Unavailable("there is this very content already", url=error.url) from e
            raise error from e
        return _meta(key, reply, len(body))

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        client = await self._client()
        names = {"Bucket": self._bucket, "Key": key, **self._payer}
        try:
            begun = await client.create_multipart_upload(**names, **self._sealed)
        except S3FS_ERRORS as e:
            raise self._error(e, "put", key) from e
        names["UploadId"] = begun["UploadId"]

        async def send(number: int, pieces: Sequence[memoryview]) -> dict[str, Any]:
            try:
                reply = await client.upload_part(
                    **names, **self._sealed, PartNumber=number, Body=_stream(_body(pieces))
                )
            except S3FS_ERRORS as e:
                raise self._error(e, "put", key) from e
            return {"PartNumber": number, "ETag": reply["ETag"]}

        async def complete(sent: Sequence[dict[str, Any]]) -> dict[str, Any]:
            try:
                reply: dict[str, Any] = await client.complete_multipart_upload(
                    **names, MultipartUpload={"Parts": list(sent)}
                )
            except S3FS_ERRORS as e:
                raise self._error(e, "put", key) from e
            return reply

        async def abort() -> None:
            try:
                await client.abort_multipart_upload(**names)
            except S3FS_ERRORS as e:
                raise self._error(e, "delete", key) from e

        size, reply = await upload_parts(parts, send, complete, abort, concurrency=concurrency)
        return _meta(key, reply, size)

    async def delete(self, keys: Sequence[str]) -> None:
        client = await self._client()
        if self._access.bulk_delete and len(keys) > 1:
            names = [{"Key": key} for key in keys]
            try:
                reply = await client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": names, "Quiet": True}, **self._payer
                )
            except S3FS_ERRORS as e:
                raise self._error(e, "delete", keys[0]) from e
            for failed in reply.get("Errors", ()):
                refusal = Refusal(None, failed.get("Code"), failed.get("Message", ""))
                error = error_for(refusal, "delete", url=self._url_of(failed.get("Key", "")))
                if not isinstance(error, NotFound):
                    raise error
        else:
            await all_of([partial(self._delete_one, client, key) for key in keys], at_once=_DELETES_AT_ONCE)

    async def renew(self) -> bool:
        if not await asyncio.to_thread(self._source.renew, self.url):
            return False
        # Requests under way still use the client with the old keys; the one before that has none any more.
        client, self._former, self._connected = self._former, self._connected, None
        if client is not None:
            await client.close()
        return True

    async def close(self) -> None:
        clients = (self._former, self._connected)
        self._former = self._connected = None
        for client in clients:
            if client is not None:
                await client.close()

    async def _delete_one(self, client: Any, key: str) -> None:
        try:
            await client.delete_object(Bucket=self._bucket, Key=key, **self._payer)
        except S3FS_ERRORS as e:
            error = self._error(e, "delete", key)
            if not isinstance(error, NotFound):
                raise error from e

    async def _holds(self, client: Any, key: str, data: bytes) -> bool:
        try:
            reply = await client.get_object(**self._object(key))
            async with reply["Body"] as body:
                return bool(reply["ContentLength"] == len(data) and await body.read() == data)
        except S3FS_ERRORS as e:
            raise self._error(e, "get", key) from e

    async def _client(self) -> Any:
        async with self._connecting:
            if self._connected is None:
                try:
                    self._connected = await self._connect()
                except NearflashError:
                    raise  # some of ours are OSErrors and ValueErrors as well
                except S3FS_ERRORS as e:
                    raise self._error(e, "get", "") from e
        return self._connected

    def _object(self, key: str) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": key, **self._payer, **self._sealed}

    def _url_of(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _error(self, error: BaseException, doing: str, key: str, *, bound: bool = False) -> StoreError:
        return error_for(refusal_of(error), doing, url=self._url_of(key), bound=bound)

    def _check_tag(self, reply: Any, body: bytes, doing: str, key: str) -> None:
        if reply.get("ETag") is None:
            raise error_for(refusal_without_tag(memoryview(body)), doing, url=self._url_of(key))

    async def _head_error(self, error: BaseException, client: Any, key: str) -> StoreError:
        """The reason of a refused HEAD, which has no body to give one: that of a GET of the first byte."""
        refusal = refusal_of(error)
        if refusal.status is not None and refusal.status < 500:
            try:
                reply = await client.get_object(**self._object(key), Range="bytes=0-0")
                reply["Body"].close()
            except S3FS_ERRORS as e:
                why = refusal_of(e)
                if why.status == refusal.status:
                    refusal = why
        return error_for(refusal, "head", url=self._url_of(key))


def _sealing(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": b64decode(key)}


def _meta(key: str, reply: Any, size: int) -> ObjectMeta:
    modified = reply.get("LastModified")
    return ObjectMeta(
        key,
        size,
        etag=reply.get("ETag"),
        version_id=reply.get("VersionId"),
        modified=modified.timestamp() if modified is not None else 0.0,
    )


def _stream(data: bytes) -> bytes | io.BytesIO:
    """A long body as a stream (which shares its memory), so that sending it does not hold up the event loop."""
    return data if len(data) < _LONG_BODY else io.BytesIO(data)


def _body(pieces: Sequence[memoryview]) -> bytes:
    """One ``bytes``: the client takes no views. Not copied again where the one piece is a whole ``bytes``."""
    if len(pieces) == 1 and isinstance(pieces[0].obj, bytes) and pieces[0].nbytes == len(pieces[0].obj):
        return pieces[0].obj
    return b"".join(pieces)
