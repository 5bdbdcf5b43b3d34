"""The daemon's side of the origin: one store client per bucket and credentials, and what it said about objects."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..clock import Clock
from ..config import Origin
from ..errors import Changed, ConfigError, NotFound, StoreError
from ..objstore.abc import Listing, ObjectMeta, ObjectStore
from ..objstore.url import ObjectUrl
from .singleflight import SingleFlight
from .transfers import Lane, Transfers

if TYPE_CHECKING:
    from typing_extensions import Buffer

HEAD_TTL = 10.0
"""Seconds for which an object's version counts as known, so that many openings at once ask the origin once."""
_HEADS = 10_000
_BUCKETS = 64
_VERSION_CHARS = 1024

Opener = Callable[[ObjectUrl, Origin], ObjectStore]


@dataclass(frozen=True)
class Access:
    """How one client reaches its object store, with what is derived from it once per client.

    ``identity`` tells clients that may share a store client; ``endpoint`` is part of the name of a cache entry.
    """

    origin: Origin
    identity: str
    endpoint: str

    @classmethod
    def by(cls, origin: Origin) -> Access:
        return cls(origin, origin.identity(), (origin.endpoint or origin.preset or "").rstrip("/"))


class Bucket:
    """One bucket reached with one set of credentials. Belongs to one event loop. ``with`` counts as a user of it."""

    def __init__(self, store: ObjectStore, lane: Lane, clock: Clock) -> None:
        self.store = store
        self.lane = lane
        self.users = 0
        """Leases, fills and requests that hold it; it is closed only at 0."""
        self._clock = clock
        self._heads: OrderedDict[str, tuple[ObjectMeta, float]] = OrderedDict()
        self._asking: SingleFlight[ObjectMeta] = SingleFlight()

    def __enter__(self) -> Bucket:
        self.users += 1
        return self

    def __exit__(self, *error: object) -> None:
        self.users -= 1

    async def head(self, target: ObjectUrl, *, fresh: bool = False) -> ObjectMeta:
        """Size and version of an object, remembered for :data:`HEAD_TTL` unless ``fresh``.

        Raises ``NotFound``, which says so where the key is a prefix of others ("a directory").
        """
        found = self._heads.get(target.key)
        if found is not None and not fresh and self._clock.monotonic() < found[1]:
            return found[0]
        return await self._asking.do(target.key, lambda: self._ask(target))

    async def bind(self, target: ObjectUrl, version: str | None, size: int | None) -> ObjectMeta:
        """What to hold requests to, for the version that a caller was told of; ``Changed`` if it is another by now.

        An ETag and a size as a listing gives them need no request: the reads themselves are conditional on them. An
        object of no bytes is never read, so the origin is asked about it.
        """
        if version is not None and len(version) > _VERSION_CHARS:
            raise ConfigError(f"a version of {len(version)} bytes is none that a store gives", url=str(target))
        if version is not None and size and version.startswith(('"', 'W/"')):
            return ObjectMeta(target.key, size, etag=version)
        meta = await self.head(target)
        if _differs(meta, version, size):
            meta = await self.head(target, fresh=True)
        if _differs(meta, version, size):
            raise Changed("the object is no longer the version that was listed", url=str(target), hint="list it again")
        return meta

    def forget(self, key: str) -> None:
        """The object turned out to be another one than was remembered."""
        self._heads.pop(key, None)

    async def get_range(self, target: ObjectUrl, meta: ObjectMeta, start: int, end: int) -> Buffer:
        """Bytes ``[start, end)`` of that version."""
        try:
            return await self.store.get_range(target.key, start, end, version=meta)
        except Changed:
            self.forget(target.key)
            raise

    def list(self, target: ObjectUrl, *, delimiter: bool) -> AsyncIterator[Listing]:
        """Pages of the folder ``target`` (see ``Client.list``)."""
        return self.store.list(_folder(target.key), delimiter=delimiter)

    async def _ask(self, target: ObjectUrl) -> ObjectMeta:
        try:
            meta = await self.store.head(target.key)
        except NotFound as e:
            self.forget(target.key)
            if await self._is_prefix(target):
                what = "is a prefix (a directory) with objects under it, not an object"
                raise NotFound(what, url=str(target), hint="name an object, or list it") from e
            raise
        self._heads[target.key] = (meta, self._clock.monotonic() + HEAD_TTL)
        self._heads.move_to_end(target.key)
        if len(self._heads) > _HEADS:
            self._heads.popitem(last=False)
        return meta

    async def _is_prefix(self, target: ObjectUrl) -> bool:
        """Whether there are objects below the key. Only makes a message better, so a refusal counts as no."""
        try:
            async for page in self.store.list(_folder(target.key), delimiter=True):
                if page.objects or page.prefixes:
                    return True
        except StoreError:
            return False
        return False


@dataclass(frozen=True)
class Source:
    """Where the bytes of one version of one object come from."""

    bucket: Bucket
    target: ObjectUrl
    meta: ObjectMeta


class Origins:
    """Buckets by (scheme and bucket, identity of the origin); idle ones beyond a bound are closed."""

    def __init__(self, opener: Opener, transfers: Transfers, parallel: int, clock: Clock) -> None:
        self._opener = opener
        self._transfers = transfers
        self._parallel = parallel
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str], Bucket] = OrderedDict()

    def bucket(self, target: ObjectUrl, access: Access) -> Bucket:
        """The bucket of a URL as this client reaches it; use it within ``with``, or count yourself as a user.

        Raises :class:`ConfigError` for a scheme nobody serves.
        """
        key = (target.root, access.identity)
        found = self._buckets.get(key)
        if found is None:
            store = self._opener(target.with_key(""), access.origin)
            found = self._buckets[key] = Bucket(store, self._transfers.lane(self._parallel), self._clock)
        self._buckets.move_to_end(key)
        return found

    async def close_idle(self) -> None:
        """Close the least recently used buckets beyond a bound that nobody uses."""
        surplus = max(0, len(self._buckets) - _BUCKETS)
        await self._close([k for k, b in self._buckets.items() if not b.users and b.lane.idle][:surplus])

    async def close(self) -> None:
        """Close all. Idempotent."""
        await self._close(list(self._buckets))

    async def _close(self, keys: list[tuple[str, str]]) -> None:
        """Close buckets, all of them even if one fails. Nobody can get hold of one once closing has begun."""
        buckets = [self._buckets.pop(key) for key in keys]
        for bucket in buckets:
            self._transfers.remove(bucket.lane)
        for outcome in await asyncio.gather(*(bucket.store.close() for bucket in buckets), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def _folder(key: str) -> str:
    return key if not key or key.endswith("/") else key + "/"


def _differs(meta: ObjectMeta, version: str | None, size: int | None) -> bool:
    return (version is not None and meta.version != version) or (size is not None and meta.size != size)
