"""The data set that a command looks at: its shards, its format, and how its samples are counted and read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachefs.errors import ConfigError, MissingField

from ..buffers import IndexCache
from ..counting import Row, choose_format, count_parts, count_shards
from ..decode import Decode, DecodeOption
from ..formats import Format
from ..opening import OpenShard, open_mapped
from ..sample import Sample
from ..sources import find_shards

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from cachefs.client import Client, ObjectStat

_SLICE = 32
"""Shards that are counted between two steps of the bar."""
_AHEAD = 8


@dataclass(frozen=True)
class DataSet:
    """A listed data set. ``counts``: samples of each shard as an index beside them says; ``None``: there is none."""

    url: str
    client: Client
    stats: tuple[ObjectStat, ...]
    format: Format
    counts: tuple[int, ...] | None
    raw_sizes: tuple[int, ...] | None

    @classmethod
    def find(cls, url: str, format: Format | None, client: Client) -> DataSet:
        """List it. The first shard whose bytes tell a format decides for all, unless the user named one."""
        found = find_shards(url, client, format)
        chosen = choose_format(found, format, client, "skip")
        return cls(url, client, found.stats, chosen, found.counts, found.raw_sizes)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return sum(stat.size for stat in self.stats)

    def rows(self, advance: Callable[[int], None], *, use_index: bool = True, strict: bool = False) -> list[Row]:
        """All shards, or their parts, with their counts; a damaged one has an error, which ``strict`` raises."""
        if self.counts is not None and use_index:
            return [Row(stat, count) for stat, count in zip(self.stats, self.counts, strict=True)]
        rows: list[Row] = []
        for start in range(0, len(self.stats), _SLICE):
            some = self.stats[start : start + _SLICE]
            rows += count_shards(some, self.format, self.client, "raise" if strict else "skip", IndexCache(0))
            advance(sum(stat.size for stat in some))
        return rows

    def counted_by(self, rows: Sequence[Row]) -> str:
        """In words, what the counts come from."""
        if self.counts is not None:
            return "an index beside the shards"
        if any(row.part >= 0 for row in rows):
            return "the shards' own footers"
        first = self.stats[0]
        if not rows or rows[0].error is None:
            return "reading the shards" if self.format.count(first.size, first.url) is None else "the shards' sizes"
        return "reading the shards"

    def parts(self, number: int) -> Sequence[int | None]:
        """What a shard is opened as: its parts, or ``None`` for all of it."""
        stat = self.stats[number]
        counts = count_parts(self.client, stat, self.format)
        return (None,) if counts is None else range(len(counts))

    def open(self, number: int, part: int | None) -> OpenShard:
        """Open a shard, or one of its parts; to be closed."""
        stat = self.stats[number]
        unpacked = None if self.raw_sizes is None else self.raw_sizes[number]
        return open_mapped(
            self.client, stat.url, self.format, version=stat.version, size=stat.size, unpacked=unpacked, part=part
        )

    def prefetch(self, number: int) -> None:
        """Ask for the shards that come next."""
        if number % _AHEAD == 0:
            self.client.prefetch(self.stats[number : number + 2 * _AHEAD])

    def opened(self, number: int) -> Iterator[OpenShard]:
        """A shard, part by part, each closed before the next."""
        for part in self.parts(number):
            shard = self.open(number, part)
            try:
                yield shard
            finally:
                shard.close()

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Reader:
    """Reads samples as a data set with these ``fields`` would. ``choice``: ``decode=``, except that with ``None`` a
    field that a data set refuses to decode (a pickle) stays bytes, so that it can be looked at."""

    decode: Decode
    fields: frozenset[str] | None
    lenient: bool

    @classmethod
    def of(cls, format: Format, choice: DecodeOption, fields: Sequence[str] | None) -> Reader:
        names = None if fields is None else frozenset(map(format.canonical, fields))
        return cls(Decode(choice, format.canonical), names, choice is None)

    def __call__(self, shard: OpenShard, i: int) -> Sample:
        """Sample ``i``. Raises ``DataError`` for one that is damaged or lacks a field."""
        sample = self._read(shard, i)
        for name in self.fields or ():
            if name not in sample:
                present = ", ".join(sorted(shard.read(i)))
                hint = f"fields present: {present}"
                raise MissingField(f"sample {i} has no field {name!r}", url=shard.url, hint=hint)
        try:
            self.decode(sample, shard, i)
        except ConfigError:
            if not self.lenient:
                raise
            sample = self._read(shard, i)
            for name in list(sample):
                one = Sample({name: sample[name]})
                with suppress(ConfigError):
                    self.decode(one, shard, i)
                    sample[name] = one[name]
        return sample

    def _read(self, shard: OpenShard, i: int) -> Sample:
        return shard.read(i, self.fields)
