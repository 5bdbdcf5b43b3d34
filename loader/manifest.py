"""The manifest: a data set's shards with sizes, versions and sample counts, complete before the first batch.

Counts come from where they are cheapest: an MDS index, a token file's size, else from indexing the mapped shard (the
client fetches the next ones meanwhile). All is bound to the versions that the listing saw: a shard that has changed
since is ``Changed`` when it is opened.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.errors import DataError, EmptyDataset, FormatError, UnknownFormat
from cachefs.hashing import name_digest
from cachefs.shard import ObjectStat

from .buffers import IndexCache, OpenShard, open_mapped
from .formats import Format, Mds, WebDataset, detect, resolve
from .reader import DataWarning
from .sources import Source, find_shards

if TYPE_CHECKING:
    from cachefs.client import Client

Int64s: TypeAlias = npt.NDArray[np.int64]
OnError: TypeAlias = Literal["raise", "skip"]

_AHEAD = 16
"""Shards that are asked for ahead of the one that is being indexed."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """A data set at one moment. Immutable; picklable; O(shards) memory.

    ``counts`` (samples) and ``sizes`` (bytes as stored) have shape ``(shards,)``, in listing order. ``digest`` names
    the data set in a state: relative names, sizes, counts, options of the format, and the versions of remote shards.
    ``damaged`` holds the error of each shard that could not be indexed and therefore counts as empty
    (``on_error="skip"``).
    """

    shards: tuple[ObjectStat, ...]
    counts: Int64s
    sizes: Int64s
    raw_sizes: Int64s | None
    format: Format
    digest: str
    damaged: dict[int, DataError]
    skipped: int
    """Entries in the shards that belong to no sample (tar members without a key)."""

    def stat(self, number: int) -> ObjectStat:
        return self.shards[number]

    def samples(self, number: int) -> int:
        return int(self.counts[number])

    def unpacked(self, number: int) -> int | None:
        return None if self.raw_sizes is None else int(self.raw_sizes[number])

    @property
    def total(self) -> int:
        """Samples in the data set."""
        return int(self.counts.sum())

    def to_bytes(self) -> bytes:
        """All of it as msgpack, for :meth:`from_bytes`; of the format only the name."""
        return msgspec.msgpack.encode(
            _Wire(
                shards=[(stat.url, stat.size, stat.version) for stat in self.shards],
                counts=self.counts.tolist(),
                raw_sizes=None if self.raw_sizes is None else self.raw_sizes.tolist(),
                format=self.format.name,
                digest=self.digest,
                damaged=[
                    (number, type(e).__name__, e.what, e.url, e.offset, e.hint) for number, e in self.damaged.items()
                ],
                skipped=self.skipped,
            )
        )

    @classmethod
    def from_bytes(cls, raw: bytes, format: Format | None) -> Manifest:
        """What :meth:`to_bytes` wrote. ``format`` as the user gave it, else the one named is taken as it comes."""
        wire = msgspec.msgpack.decode(raw, type=_Wire)
        chosen = format if format is not None else resolve(wire.format)
        assert chosen is not None  # a name was written
        return cls(
            shards=tuple(ObjectStat(*shard) for shard in wire.shards),
            counts=np.array(wire.counts, dtype=np.int64),
            sizes=np.array([size for _, size, _ in wire.shards], dtype=np.int64),
            raw_sizes=None if wire.raw_sizes is None else np.array(wire.raw_sizes, dtype=np.int64),
            format=chosen,
            digest=wire.digest,
            damaged={
                number: _ERRORS.get(name, DataError)(what, url=url, offset=offset, hint=hint)
                for number, name, what, url, offset, hint in wire.damaged
            },
            skipped=wire.skipped,
        )


class _Wire(msgspec.Struct):
    shards: list[tuple[str, int, str]]
    counts: list[int]
    raw_sizes: list[int] | None
    format: str
    digest: str
    damaged: list[tuple[int, str, str, str | None, int | None, str | None]]
    skipped: int


_ERRORS: dict[str, type[DataError]] = {kind.__name__: kind for kind in (FormatError, UnknownFormat)}


def build_manifest(
    source: Source, client: Client, *, format: Format | None, on_error: OnError, indexes: IndexCache
) -> Manifest:
    """List the shards of ``source`` and count their samples. Sample indexes made on the way go to ``indexes``.

    ``format=None``: the first shard that is not blank decides for all. Raises ``EmptyDataset`` if there is no sample,
    and, unless ``on_error="skip"``, the first damaged shard's ``FormatError``.
    """
    found = find_shards(source, client, format)
    shards = found.stats
    counts = np.zeros(len(shards), dtype=np.int64)
    damaged: dict[int, DataError] = {}
    notes: list[str] = []
    skipped = 0
    if found.mds is not None:
        format = Mds()
        counts[:] = [row.samples for row in found.mds]
    else:
        if format is None:
            format = _detect(shards, client, on_error)
        ahead = _Ahead(shards, client)
        for number, stat in enumerate(shards):
            try:
                known = format.count(stat.size, stat.url)
                if known is None:
                    ahead.reach(number)
                    with _opened(client, stat, format) as shard:
                        known = len(shard.index)
                        skipped += shard.index.skipped
                        notes += [f"{stat.url}: {note}" for note in shard.index.notes]
                        indexes.put(number, shard.index)
            except DataError as e:
                if on_error == "raise":
                    raise
                damaged[number] = e
                known = 0
            counts[number] = known
    _warn(notes, damaged)
    if not counts.any():
        raise EmptyDataset(f"no sample in {len(shards)} shard(s), the first is {shards[0].url}")
    sizes = np.array([stat.size for stat in shards], dtype=np.int64)
    raw = None if found.mds is None else np.array([row.raw_bytes for row in found.mds], dtype=np.int64)
    return Manifest(shards, counts, sizes, raw, format, _digest(shards, counts, format), damaged, skipped)


def _detect(shards: tuple[ObjectStat, ...], client: Client, on_error: OnError) -> Format:
    first: DataError | None = None
    for stat in shards:
        try:
            with client.open(stat.url, version=stat.version, size=stat.size) as shard:
                found = detect(np.frombuffer(shard.view(), np.uint8), stat.url)
        except DataError as e:
            if on_error == "raise":
                raise
            first = first or e
        else:
            if found is not None:
                return found
    if first is not None:
        raise first
    return WebDataset()  # all are blank, as empty tars are


class _opened:
    """An open shard for the length of a ``with`` block."""

    def __init__(self, client: Client, stat: ObjectStat, format: Format) -> None:
        self._shard = open_mapped(client, stat.url, format, version=stat.version, size=stat.size)

    def __enter__(self) -> OpenShard:
        return self._shard

    def __exit__(self, *_: Any) -> None:
        self._shard.close()


class _Ahead:
    """Asks the client for the shards that come next, each once, a window at a time."""

    def __init__(self, shards: tuple[ObjectStat, ...], client: Client) -> None:
        self._shards = shards
        self._client = client
        self._asked = 0

    def reach(self, number: int) -> None:
        if number + _AHEAD // 2 >= self._asked:
            self._client.prefetch(self._shards[self._asked : number + _AHEAD])
            self._asked = max(self._asked, min(number + _AHEAD, len(self._shards)))


def _warn(notes: list[str], damaged: dict[int, DataError]) -> None:
    if damaged:
        first = next(iter(damaged.values()))
        warnings.warn(f"{len(damaged)} damaged shard(s) count as empty, the first: {first}", DataWarning, stacklevel=4)
    if notes:
        more = f" (and {len(notes) - 1} more notes on other shards)" if len(notes) > 1 else ""
        warnings.warn(notes[0] + more, DataWarning, stacklevel=4)


def _digest(shards: tuple[ObjectStat, ...], counts: Int64s, format: Format) -> str:
    """See :class:`Manifest`. Local versions are left out: a copy of the same files is the same data set."""
    urls = [stat.url for stat in shards]
    root = _common_start(min(urls), max(urls)).rpartition("/")[0]
    parts = [f"data set 1 {format.name} {format.identity()}"]
    for stat, count in zip(shards, counts.tolist(), strict=True):
        version = stat.version if "://" in stat.url else ""
        parts.append(f"{stat.url[len(root) :]}\0{stat.size}\0{version}\0{count}")
    return name_digest(*parts)


def _common_start(a: str, b: str) -> str:
    """What two texts begin with alike; of the least and the greatest of many it is what all begin with."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
