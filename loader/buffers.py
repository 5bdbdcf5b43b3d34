"""Mapped shards: who owns the memory that samples point into, and how much of it is open at a time.

Ownership. ``Shard.view()`` gives a memoryview that owns a private, writable mapping; every array below is a view whose
base chain ends there, so a mapping lives as long as the last sample cut from it and nothing is ever unmapped by hand.
Closing a shard here gives back its lease and descriptors only. Compressed shards are decompressed to private memory,
with the same ownership.

Every pass over a data set uses a :class:`ShardPool` of its own, hence fresh mappings: what an earlier pass wrote into
its samples is never seen again.
"""

from __future__ import annotations

import mmap
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cachefs.errors import DataError, FormatError
from cachefs.objstore.url import parse_url

from .formats import Format, SampleIndex, WebDataset, detect
from .formats.abc import Bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from cachefs.client import Client, ObjectStat, Shard

INDEX_BYTES = 64 << 20
"""Memory for sample indexes that are kept beyond the shards now open, per process."""
PRIVATE_BYTES = 1 << 30
"""Memory for decompressed shards that are open at a time, per process; one is always allowed."""
_POPULATE_MOST = 256 << 20
_MADV_POPULATE_READ = 22


def map_shard(shard: Shard, *, whole: bool = False) -> Bytes:
    """All bytes of an open shard as one writable array over a fresh private mapping. Waits until they are there.

    ``whole``: all of it is about to be read in small pieces, so its pages are mapped now in one call.
    """
    view = shard.view()
    if whole and len(view) <= _POPULATE_MOST:
        _populate(view)
    return np.frombuffer(view, np.uint8)


def _populate(view: memoryview) -> None:
    """Map all pages for reading at once: a fault for each costs as much as copying a few kilobytes.

    Nothing depends on it: a kernel before 5.14 refuses, and then the pages are mapped when they are touched.
    """
    memory = view.obj
    if sys.platform == "linux" and isinstance(memory, mmap.mmap):
        with suppress(OSError):
            memory.madvise(_MADV_POPULATE_READ)


@dataclass
class OpenShard:
    """One shard ready to read: ``format.read(source, index, i, url)``."""

    url: str
    format: Format
    source: Any
    index: SampleIndex
    private_bytes: int
    """What it takes besides the mapping: its decompressed bytes."""
    handle: Shard
    decoders: dict[str, Callable[[Any], Any] | None] = field(default_factory=dict)
    """Memory of the decode step: what decodes each field of this shard."""

    def close(self) -> None:
        """Give back lease and descriptors; samples already handed out stay valid. Idempotent."""
        self.handle.close()


def open_mapped(
    client: Client,
    url: str,
    format: Format | None = None,
    *,
    version: str | None = None,
    size: int | None = None,
    index: SampleIndex | None = None,
    unpacked: int | None = None,
) -> OpenShard:
    """Open, map and index one shard.

    ``format=None``: the bytes decide. With ``index`` that is taken instead of a new one; ``unpacked``: its
    decompressed size, where that is known. Raises ``UnknownFormat``, ``FormatError``, or what the client raises.
    """
    handle = client.open(url, version=version, size=size)
    try:
        mapped = map_shard(handle, whole=format is not None and format.dense)
        if format is None:
            format = detect(mapped, url) or WebDataset()
        data = format.unpack(mapped, url, limit=unpacked)
        if index is None:
            index = format.index(data, url)
        private = 0 if data is mapped else data.nbytes
        shard = OpenShard(url, format, format.source(data, index), index, private, handle)
        if parse_url(url).is_local:
            shard.close()  # there is no lease to keep, and a descriptor saved
        return shard
    except BaseException:
        handle.close()
        raise


class IndexCache:
    """Sample indexes by shard number, the least recently used dropped beyond ``limit`` bytes. One process's own."""

    def __init__(self, limit: int = INDEX_BYTES) -> None:
        self._limit = limit
        self._held: OrderedDict[int, SampleIndex] = OrderedDict()
        self.nbytes = 0

    def get(self, number: int) -> SampleIndex | None:
        index = self._held.get(number)
        if index is not None:
            self._held.move_to_end(number)
        return index

    def put(self, number: int, index: SampleIndex) -> None:
        old = self._held.pop(number, None)
        self.nbytes += index.nbytes - (old.nbytes if old is not None else 0)
        self._held[number] = index
        while self.nbytes > self._limit:
            self.nbytes -= self._held.popitem(last=False)[1].nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        return (IndexCache, (self._limit,))  # a spawned worker indexes what it opens


class Shards(Protocol):
    """What a pool needs to know of a data set (:class:`loader.manifest.Manifest`)."""

    @property
    def format(self) -> Format: ...

    def stat(self, number: int) -> ObjectStat: ...

    def samples(self, number: int) -> int: ...

    def unpacked(self, number: int) -> int | None: ...


class ShardPool:
    """The open shards of one pass, by number; the least recently used is closed beyond ``capacity``.

    Belongs to one thread of one process. A shard that cannot be indexed fails with the same error each time.
    """

    def __init__(
        self,
        shards: Shards,
        client: Client,
        *,
        capacity: int,
        indexes: IndexCache,
        private_bytes: int = PRIVATE_BYTES,
    ) -> None:
        self._shards = shards
        self._client = client
        self._capacity = max(capacity, 1)
        self._private_limit = private_bytes
        self._private = 0
        self._indexes = indexes
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._failed: dict[int, DataError] = {}

    def again(self) -> ShardPool:
        """Another pool of the same shards, with maps of its own."""
        return ShardPool(
            self._shards,
            self._client,
            capacity=self._capacity,
            indexes=self._indexes,
            private_bytes=self._private_limit,
        )

    def get(self, number: int) -> OpenShard:
        """The shard, opened if it is not. Raises ``DataError`` for a damaged one, or what the client raises."""
        shard = self._open.get(number)
        if shard is None:
            return self._add(number)
        self._open.move_to_end(number)
        return shard

    def url(self, number: int) -> str:
        """A shard's URL, for messages."""
        return self._shards.stat(number).url

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        """Close all. Idempotent; samples already handed out stay valid."""
        while self._open:
            self._open.popitem()[1].close()
        self._private = 0

    def _add(self, number: int) -> OpenShard:
        if number in self._failed:
            raise self._failed[number].with_traceback(None)  # else each raise would add to the one before
        shards = self._shards
        try:
            stat = shards.stat(number)
            shard = open_mapped(
                self._client,
                stat.url,
                shards.format,
                version=stat.version,
                size=stat.size,
                index=self._indexes.get(number),
                unpacked=shards.unpacked(number),
            )
            if len(shard.index) != shards.samples(number):
                shard.close()
                raise FormatError(
                    f"holds {len(shard.index)} samples, the data set's index says {shards.samples(number)}",
                    url=shard.url,
                )
        except DataError as e:
            self._failed[number] = e
            raise
        self._indexes.put(number, shard.index)
        self._open[number] = shard
        self._private += shard.private_bytes
        while len(self._open) > self._capacity or (self._private > self._private_limit and len(self._open) > 1):
            _, old = self._open.popitem(last=False)
            self._private -= old.private_bytes
            old.close()
        return shard
