"""What the rest of nearflash asks of an object store.

One :class:`ObjectStore` serves one bucket (or one file-system root) with one set of credentials. Keys are taken as
they stand (see :mod:`.url`). All methods are coroutines and may be called concurrently from one event loop; an
instance belongs to the loop and the process that made it. Backends translate every failure into
:mod:`cachefs.errors` and nothing else: ``NotFound, Denied, Throttled, Changed, PreconditionFailed, Unavailable,
Corrupt``. A backend does one try; retries, resuming and limits are built on top (:mod:`.retry`), so that there is one
policy whichever backend serves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Buffer


@dataclass(frozen=True)
class ObjectMeta:
    """One object at one version. ``size`` in bytes; ``etag`` as the store gives it (quotes included), else ``None``.

    ``modified`` is the store's time stamp in seconds since the epoch (0 where it gives none).
    """

    key: str
    size: int
    etag: str | None = None
    version_id: str | None = None
    modified: float = 0.0

    @property
    def version(self) -> str:
        """What tells this content from another under the same key: ETag, else version id, else size and time."""
        return self.etag or self.version_id or f"{self.size}-{self.modified:.6f}"


@dataclass(frozen=True)
class Listing:
    """One page of a listing: objects, and, with a delimiter, the common prefixes (each ending in ``/``)."""

    objects: tuple[ObjectMeta, ...]
    prefixes: tuple[str, ...] = ()


class ObjectStore(ABC):
    """One bucket or root of an object store. See the module's text for threading and errors."""

    url: str
    """``scheme://bucket``, for messages."""

    @abstractmethod
    async def head(self, key: str) -> ObjectMeta:
        """Size and version of one object, without a listing. Raises ``NotFound``."""

    @abstractmethod
    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        """Bytes ``[start, end)`` of one version, as one buffer owned by the caller.

        ``0 <= start <= end <= size``; an empty range makes no request. With ``version`` the reply must come from that
        version (If-Match where the store has it, else compared): otherwise ``Changed``. A reply of another length or
        range is ``Corrupt``.
        """

    async def get_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], *, version: ObjectMeta | None = None
    ) -> list[Buffer]:
        """Several ranges of one version; the default asks for them one after the other."""
        return [await self.get_range(key, start, end, version=version) for start, end in ranges]

    @abstractmethod
    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        """A small object whole, with the version that the bytes are of."""

    async def list(self, prefix: str, *, delimiter: bool = False) -> AsyncGenerator[Listing, None]:
        """Pages of all objects whose key starts with ``prefix`` (a string prefix, not a folder), in the store's order.

        With ``delimiter`` only those up to the next ``/``, plus the common prefixes. Zero-byte folder markers (keys
        that end in ``/``) are listed as objects; callers that want data skip them.
        """
        token: str | None = None
        while True:
            page, token = await self.list_page(prefix, delimiter=delimiter, token=token)
            yield page
            if token is None:
                return

    @abstractmethod
    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        """One page of :meth:`list`, and the token that asks for the next one; ``None`` after the last.

        The same token may be used again: a page that failed is asked for anew, and the listing goes on from there.
        """

    @abstractmethod
    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        """Write one object in one request; atomic.

        ``if_none_match``: only if there is no such key; ``if_match``: only over that ETag. Otherwise
        ``PreconditionFailed``. The reply may be lost (``Unavailable``): the caller reads back.
        """

    @abstractmethod
    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        """Write one large object part by part (each but the last ≥ 5 MiB); visible only when whole.

        An error from ``parts`` or the store aborts the upload before it is raised.
        """

    @abstractmethod
    async def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; a missing key is not an error."""

    async def renew(self) -> bool:
        """Look up the credentials anew; whether they may be others now. For the retry layer."""
        return False

    async def close(self) -> None:  # noqa: B027 - most backends hold nothing to release
        """Release connections. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
