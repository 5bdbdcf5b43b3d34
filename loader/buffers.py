"""The open shards of a pass: how much is open at a time, and what is remembered of those that were.

Every pass over a data set uses a :class:`ShardPool` of its own, hence fresh mappings: what an earlier pass wrote into
its samples is never seen again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Protocol

from cachefs.errors import DataError, FormatError
from cachefs.forklock import ForkLock

from .formats import Format, SampleIndex
from .opening import OpenShard, open_mapped

if TYPE_CHECKING:
    from cachefs.client import Client, ObjectStat

INDEX_BYTES = 64 << 20
"""Memory for sample indexes that are kept beyond the shards now open, per process."""
PRIVATE_BYTES = 1 << 30
"""Memory for decompressed shards that are open at a time, per process; one is always allowed."""


def other_count(there: int, declared: int, url: str) -> FormatError:
    """The error for a shard that holds more or fewer samples than an index of the data set says."""
    return FormatError(
        f"holds {there} samples, the data set's index says {declared}",
        url=url,
        hint="write the index anew, or name the shards by a pattern, so that they are counted",
    )


class IndexCache:
    """Sample indexes by shard number, the least recently used dropped beyond ``limit`` bytes. One process's own, for
    any number of threads."""

    def __init__(self, limit: int = INDEX_BYTES) -> None:
        self._limit = limit
        self._lock = ForkLock()
        self._held: OrderedDict[int, SampleIndex] = OrderedDict()
        self.nbytes = 0

    def get(self, number: int) -> SampleIndex | None:
        with self._lock.of_this_process():
            index = self._held.get(number)
            if index is not None:
                self._held.move_to_end(number)
            return index

    def put(self, number: int, index: SampleIndex) -> None:
        with self._lock.of_this_process():
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

    def part(self, number: int) -> int | None: ...


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
        self.capacity = max(capacity, 1)
        self._private_limit = private_bytes
        self._private = 0
        self._indexes = indexes
        self._open: OrderedDict[int, OpenShard] = OrderedDict()
        self._failed: dict[int, DataError] = {}

    def again(self) -> ShardPool:
        """Another pool of the same shards, with maps of its own."""
        return type(self)(
            self._shards,
            self._client,
            capacity=self.capacity,
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
        try:
            shard = self._load(number, self._indexes.get(number))
        except DataError as e:
            self._failed[number] = e
            raise
        self._admit(number, shard)
        return shard

    def _load(self, number: int, index: SampleIndex | None) -> OpenShard:
        """Open a shard; touches nothing of the pool."""
        shards = self._shards
        stat = shards.stat(number)
        shard = open_mapped(
            self._client,
            stat.url,
            shards.format,
            version=stat.version,
            size=stat.size,
            index=index,
            unpacked=shards.unpacked(number),
            part=shards.part(number),
        )
        if len(shard.index) != shards.samples(number):
            shard.close()
            raise other_count(len(shard.index), shards.samples(number), shard.url)
        return shard

    def _admit(self, number: int, shard: OpenShard) -> None:
        """Take in a shard, and close those for which there is no room any more."""
        self._indexes.put(number, shard.index)
        self._open[number] = shard
        self._private += shard.private_bytes
        while len(self._open) > self.capacity or (self._private > self._private_limit and len(self._open) > 1):
            _, old = self._open.popitem(last=False)
            self._private -= old.private_bytes
            self._let_go(old)

    def _let_go(self, shard: OpenShard) -> None:
        shard.close()
