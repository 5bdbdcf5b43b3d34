"""An object store in memory whose every request a test can hold back, fail, or count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import Changed, NotFound
from ..hashing import name_digest
from ..objstore.abc import Listing, ObjectMeta, ObjectStore

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class Call:
    """One request that the store got: ``head``, ``get`` or ``list``, with the byte range of a get."""

    kind: str
    key: str
    start: int = 0
    end: int = 0


@dataclass
class ScriptedStore(ObjectStore):
    """Objects by key, readable only. ``calls`` records requests as they arrive.

    ``before`` is called with each request and may raise; ``gate`` holds all ranged reads while it is not set.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    url: str = "s3://bucket"
    calls: list[Call] = field(default_factory=list)
    before: Callable[[Call], None] = lambda call: None
    gate: asyncio.Event | None = None
    quoted: bool = True
    closed: bool = False

    def count(self, kind: str) -> int:
        return sum(call.kind == kind for call in self.calls)

    def meta(self, key: str) -> ObjectMeta:
        data = self.objects[key]
        etag = name_digest(data)
        return ObjectMeta(key, len(data), etag=f'"{etag}"' if self.quoted else etag)

    async def head(self, key: str) -> ObjectMeta:
        await self._arrive(Call("head", key))
        if key not in self.objects:
            raise NotFound("no such key", url=f"{self.url}/{key}")
        return self.meta(key)

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        await self._arrive(Call("get", key, start, end))
        if self.gate is not None:
            await self.gate.wait()
        if key not in self.objects:
            raise NotFound("no such key", url=f"{self.url}/{key}")
        if version is not None and version.version != self.meta(key).version:
            raise Changed("is another version now", url=f"{self.url}/{key}")
        return self.objects[key][start:end]

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        meta = await self.head(key)
        return meta, self.objects[key]

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        await self._arrive(Call("list", prefix))
        objects, prefixes = [], set()
        for key in sorted(self.objects):
            if key.startswith(prefix):
                head, sep, _ = key[len(prefix) :].partition("/")
                if delimiter and sep:
                    prefixes.add(prefix + head + "/")
                else:
                    objects.append(self.meta(key))
        return Listing(tuple(objects), tuple(sorted(prefixes))), None

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        raise NotImplementedError("this store is only read from")

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        raise NotImplementedError("this store is only read from")

    async def delete(self, keys: Sequence[str]) -> None:
        raise NotImplementedError("this store is only read from")

    async def close(self) -> None:
        self.closed = True

    async def _arrive(self, call: Call) -> None:
        self.calls.append(replace(call))
        self.before(call)
        await asyncio.sleep(0)
