"""Object stores for tests: one in memory that keeps every key exactly, and one that does wrong what it is told to."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from ..clock import SYSTEM_CLOCK, Clock
from ..errors import Changed, NotFound, PreconditionFailed, StoreError
from ..objstore.abc import Listing, ObjectMeta, ObjectStore
from ..objstore.buffers import as_pieces
from .rules import FaultPlan

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")


class DictStore(ObjectStore):
    """Objects in a dictionary: exact keys, versions, conditional writes, small listing pages. One try per call."""

    def __init__(self, url: str = "mem://bucket", *, page: int = 3) -> None:
        self.url = url
        self.objects: dict[str, tuple[ObjectMeta, bytes]] = {}
        self._page = page
        self._versions = itertools.count(1)

    def keep(self, key: str, data: bytes) -> ObjectMeta:
        """Store an object at once, for setting up a test."""
        number = next(self._versions)
        meta = ObjectMeta(key, len(data), etag=f'"{number}"', modified=float(number))
        self.objects[key] = (meta, data)
        return meta

    async def head(self, key: str) -> ObjectMeta:
        return self._find(key)[0]

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if start == end:
            return b""
        meta, data = self._find(key)
        if version is not None and meta.version != version.version:
            raise Changed("the object is no longer the version that was opened", url=self._url_of(key))
        if end > meta.size:
            raise Changed("the object is shorter than the range that was asked for", url=self._url_of(key))
        return data[start:end]

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        return self._find(key)

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        items: dict[str, ObjectMeta | None] = {}
        for key in sorted(self.objects):
            if key.startswith(prefix):
                head, slash, _ = key[len(prefix) :].partition("/")
                if delimiter and slash:
                    items[f"{prefix}{head}/"] = None
                else:
                    items[key] = self.objects[key][0]
        names = [name for name in items if token is None or name > token]
        page = names[: self._page]
        found = [(name, items[name]) for name in page]
        listing = Listing(tuple(m for _, m in found if m is not None), tuple(n for n, m in found if m is None))
        return listing, page[-1] if len(names) > len(page) else None

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        there = self.objects.get(key)
        if (if_none_match and there is not None) or (
            if_match is not None and (there is None or there[0].etag != if_match)
        ):
            raise PreconditionFailed("the object is not in the state that the write requires", url=self._url_of(key))
        return self.keep(key, b"".join(as_pieces(data)))

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        pieces = [bytes(part) async for part in parts]
        return self.keep(key, b"".join(pieces))

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def _find(self, key: str) -> tuple[ObjectMeta, bytes]:
        try:
            return self.objects[key]
        except KeyError:
            raise NotFound("no such object", url=self._url_of(key)) from None

    def _url_of(self, key: str) -> str:
        return f"{self.url}/{key}"


@dataclass(frozen=True)
class Misstep:
    """What a :class:`FaultyStore` does wrong with one call.

    ``latency``: seconds before anything happens. ``hang``: nothing ever happens. ``error``: raised instead of the
    call; with ``after`` the call is carried out first (a lost reply).
    """

    error: StoreError | None = None
    after: bool = False
    latency: float = 0.0
    hang: bool = False


@dataclass(frozen=True)
class StoreCall:
    """One call that a :class:`FaultyStore` has seen. ``method``: ``head, get, list, put`` or ``delete``."""

    method: str
    key: str
    start: int = 0
    end: int = 0
    time: float = field(default=0.0, compare=False)


class FaultyStore(ObjectStore):
    """Passes calls on to ``inner``, except for what ``plan`` says; ``calls`` records them as they arrive.

    Owns ``inner`` and closes it; ``closed`` counts how often.
    """

    def __init__(self, inner: ObjectStore, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.url = inner.url
        self.plan: FaultPlan[Misstep] = FaultPlan()
        self.calls: list[StoreCall] = []
        self.running = 0
        self.most_running = 0
        self.closed = 0
        self.renewed = 0
        self._inner = inner
        self._clock = clock

    async def head(self, key: str) -> ObjectMeta:
        return await self._do(StoreCall("head", key), lambda: self._inner.head(key))

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        call = StoreCall("get", key, start, end)
        return await self._do(call, lambda: self._inner.get_range(key, start, end, version=version))

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        return await self._do(StoreCall("get", key), lambda: self._inner.get(key))

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        return await self._do(
            StoreCall("list", prefix), lambda: self._inner.list_page(prefix, delimiter=delimiter, token=token)
        )

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        return await self._do(
            StoreCall("put", key),
            lambda: self._inner.put(key, data, if_none_match=if_none_match, if_match=if_match),
        )

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        return await self._do(
            StoreCall("put", key), lambda: self._inner.put_multipart(key, parts, concurrency=concurrency)
        )

    async def delete(self, keys: Sequence[str]) -> None:
        await self._do(StoreCall("delete", keys[0] if keys else ""), lambda: self._inner.delete(keys))

    async def renew(self) -> bool:
        self.renewed += 1
        return True

    async def close(self) -> None:
        self.closed += 1
        await self._inner.close()

    async def _do(self, call: StoreCall, carry_out: Callable[[], Awaitable[T]]) -> T:
        self.calls.append(StoreCall(call.method, call.key, call.start, call.end, self._clock.monotonic()))
        step = self.plan.choose(call) or Misstep()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if step.latency:
                await self._clock.asleep(step.latency)
            if step.hang:
                await asyncio.get_running_loop().create_future()
            if step.error is not None and not step.after:
                raise step.error
            result = await carry_out()
            if step.error is not None:
                raise step.error
            return result
        finally:
            self.running -= 1
