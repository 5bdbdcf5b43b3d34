"""The manifest: a data set's shards with sizes, versions and sample counts.

Counts come from where they are cheapest: an MDS index, a token file's size, else from indexing the mapped shard. All is
bound to the versions that the listing saw: a shard that has changed since is ``Changed`` when it is opened.

A data set is **progressive** if its counts have to be found by indexing and it is large (:data:`LEAST_SHARDS` shards,
or :data:`LEAST_BYTES`): its shards are counted while it is read (``loader.tally``), so that the first batch comes after
the first shards. All others are counted before the first batch, which lets their lanes be cut by samples. Which kind a
data set is follows from its listing and its format alone, never from what is known at the moment, since the order and
the digest differ: those of a progressive one do not look at counts, not even once all are known.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, CountsUnknown, DataError, EmptyDataset, FormatError, UnknownFormat
from cachefs.hashing import name_digest
from cachefs.shard import ObjectStat

from .buffers import IndexCache
from .counting import OnError, Row, choose_format, count_shards
from .formats import Format, Tokens
from .formats.derived import View, under
from .formats.listing import MOST_SAMPLES
from .formats.registry import KINDS
from .layouts import Found
from .reader import DataWarning
from .sources import Source, find_shards

if TYPE_CHECKING:
    from cachefs.client import Client

Int64s: TypeAlias = npt.NDArray[np.int64]

LEAST_SHARDS: Final = 64
LEAST_BYTES: Final = 4 << 30
"""From this size on, or this many shards, a data set without known counts is counted while it is read."""


@dataclass(frozen=True, eq=False)
class Manifest:
    """A data set at one moment. Immutable; picklable; O(shards) memory.

    ``counts`` (samples; -1 where a progressive data set's shard is not counted yet) and ``sizes`` (bytes as stored)
    have shape ``(shards,)``, in listing order. ``digest`` names the data set in a state: relative names, sizes, counts
    (unless it is progressive), options of the format, and the versions of remote shards. ``damaged`` holds the error of
    each shard that could not be indexed and therefore counts as empty (``on_error="skip"``).
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
    part_numbers: Int64s | None = None
    """Which part of its object each shard is, ``-1`` for a whole one; ``None`` where all are whole."""
    progressive: bool = False
    """Whether it is of the kind that is counted while it is read (see the module's text)."""

    def part(self, number: int) -> int | None:
        """Which part of its object the shard is; ``None``: all of it."""
        if self.part_numbers is None or self.part_numbers[number] < 0:
            return None
        return int(self.part_numbers[number])

    def stat(self, number: int) -> ObjectStat:
        return self.shards[number]

    def samples(self, number: int) -> int:
        return int(self.counts[number])

    def unpacked(self, number: int) -> int | None:
        return None if self.raw_sizes is None else int(self.raw_sizes[number])

    @property
    def total(self) -> int:
        """Samples in the data set. Raises ``CountsUnknown`` while shards are not counted."""
        if not self.complete:
            raise CountsUnknown(
                f"{int((self.counts < 0).sum())} of {len(self.counts)} shards are not counted yet: there is no length",
                hint="count() counts them, estimated_len() does without",
            )
        return int(self.counts.sum())

    @property
    def complete(self) -> bool:
        """Whether every shard is counted."""
        return not bool((self.counts < 0).any())

    def to_bytes(self) -> bytes:
        """All of it as msgpack, for :meth:`from_bytes`."""
        return msgspec.msgpack.encode(
            _Wire(
                shards=[(os.fsencode(stat.url), stat.size, stat.version) for stat in self.shards],
                counts=self.counts.tolist(),
                sizes=self.sizes.tolist(),
                raw_sizes=None if self.raw_sizes is None else self.raw_sizes.tolist(),
                format=self.format.name,
                options=self.format.options(),
                derived=derivation(self.format),
                parts=None if self.part_numbers is None else self.part_numbers.tolist(),
                digest=self.digest,
                damaged=[
                    (number, type(e).__name__, e.what, e.url, e.offset, e.hint) for number, e in self.damaged.items()
                ],
                skipped=self.skipped,
                progressive=self.progressive,
            )
        )

    @classmethod
    def from_bytes(cls, raw: bytes, format: Format | None = None, views: Sequence[View] = ()) -> Manifest:
        """What :meth:`to_bytes` wrote. ``format`` as the user gave it, else the one that is named; ``views`` as well.

        Raises ``ValueError`` for anything else, ``ConfigError`` where its samples were counted under other views.
        """
        wire = msgspec.msgpack.decode(raw, type=_Wire)
        lengths = {
            len(part) for part in (wire.shards, wire.counts, wire.sizes, wire.raw_sizes, wire.parts) if part is not None
        }
        if len(lengths) != 1 or not wire.shards or wire.format not in KINDS:
            raise ValueError("not a manifest")
        if any(number >= len(wire.shards) for number, *_ in wire.damaged):
            raise ValueError("it names damaged shards that it does not have")
        # leave to run code that a file chooses is given by the user of this process, never by a file
        options = {name: value for name, value in wire.options.items() if name != "allow_pickle"}
        try:
            named = KINDS[wire.format].from_options(options)
        except ConfigError as e:
            raise ValueError(str(e)) from e
        chosen = under(views, named if format is None else format.completed(named))
        if derivation(chosen) != wire.derived:
            raise ConfigError(
                f"its samples were counted under {wire.derived or 'no filter or packing'}, "
                f"not under {derivation(chosen) or 'none'}",
                hint="open the data set with the same where= and packing=, or save its manifest without them",
            )
        return cls(
            shards=tuple(ObjectStat(os.fsdecode(url), size, version) for url, size, version in wire.shards),
            counts=np.array(wire.counts, dtype=np.int64),
            sizes=np.array(wire.sizes, dtype=np.int64),
            raw_sizes=None if wire.raw_sizes is None else np.array(wire.raw_sizes, dtype=np.int64),
            format=chosen,
            digest=wire.digest,
            damaged={
                number: _ERRORS.get(name, DataError)(what, url=url, offset=offset, hint=hint)
                for number, name, what, url, offset, hint in wire.damaged
            },
            skipped=wire.skipped,
            part_numbers=None if wire.parts is None else np.array(wire.parts, dtype=np.int64),
            progressive=wire.progressive,
        )


_Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_OrMinusOne: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]


class _Wire(msgspec.Struct):
    shards: list[tuple[bytes, _Whole, str]]  # a local name need not be UTF-8
    counts: list[Annotated[int, msgspec.Meta(ge=-1, le=MOST_SAMPLES)]]
    sizes: list[_Whole]
    raw_sizes: list[_OrMinusOne] | None
    format: str
    options: dict[str, Any]
    parts: list[_OrMinusOne] | None
    digest: str
    damaged: list[tuple[_Whole, str, str, str | None, int | None, str | None]]
    skipped: _Whole
    progressive: bool = False
    derived: str = ""


_ERRORS: dict[str, type[DataError]] = {kind.__name__: kind for kind in (FormatError, UnknownFormat)}


def build_manifest(
    source: Source,
    client: Client,
    *,
    format: Format | None,
    on_error: OnError,
    indexes: IndexCache,
    views: Sequence[View] = (),
) -> Manifest:
    """List the shards of ``source`` and count their samples, unless they are to be counted while they are read (see the
    module's text). Sample indexes made on the way go to ``indexes``.

    ``format=None``: the first shard that is not blank decides for all; its samples are then seen under ``views``, and
    what an index says of their number does not count. Raises ``EmptyDataset`` if there is no sample,
    and, unless ``on_error="skip"``, the first damaged shard's ``FormatError``.
    """
    found = find_shards(source, client, format)
    stored = choose_format(found, format, client, on_error)
    format = under(views, stored)
    told = found.counts if format is stored else None
    if told is None and is_progressive(found.stats, format):
        return _uncounted(found.stats, format)
    if told is not None:
        rows = [Row(stat, count) for stat, count in zip(found.stats, told, strict=True)]
    else:
        rows = count_shards(found.stats, format, client, on_error, indexes)
    if found.raw_sizes is not None and len(rows) == len(found.raw_sizes):  # else they are parts
        rows = [row._replace(raw=raw) for row, raw in zip(rows, found.raw_sizes, strict=True)]
    _check_counts((row.stat, row.samples) for row in rows)
    damaged = {number: row.error for number, row in enumerate(rows) if row.error is not None}
    _warn([note for row in rows for note in row.notes], damaged)
    shards = tuple(row.stat for row in rows)
    counts = np.array([row.samples for row in rows], dtype=np.int64)
    if not counts.any():
        raise EmptyDataset(
            f"no sample in {len(found.stats)} shard(s), the first is {found.stats[0].url}",
            hint=_too_short(found, format) or derivation(format) or None,
        )
    return Manifest(
        shards,
        counts,
        np.array([row.stat.size if row.size < 0 else row.size for row in rows], dtype=np.int64),
        np.array([row.raw for row in rows], dtype=np.int64) if rows[0].raw >= 0 else None,
        format,
        _digest(shards, counts, format),
        damaged,
        sum(row.skipped for row in rows),
        np.array([row.part for row in rows], dtype=np.int64) if any(row.part >= 0 for row in rows) else None,
    )


def derivation(format: Format) -> str:
    """What is read of the samples that are stored; empty where that is these themselves."""
    return "" if format.base is format else format.identity()


def _too_short(found: Found, format: Format) -> str | None:
    """For windows of tokens: how much the longest shard has, and how much a sample needs."""
    if not isinstance(format, Tokens):
        return None
    longest = max(stat.size for stat in found.stats) // format.stored.itemsize
    return f"the longest has {longest} tokens, a sample needs {format.window}"


def is_progressive(shards: tuple[ObjectStat, ...], format: Format) -> bool:
    """Whether shards that no index tells the counts of are counted while they are read."""
    sizes = [stat.size for stat in shards]
    large = len(shards) >= LEAST_SHARDS or (len(shards) > 1 and sum(sizes) >= LEAST_BYTES)
    # formats with parts tell the counts of these in a footer or a header: there is no need to read the shard for it
    return large and not format.has_parts and any(format.count(stat.size, stat.url) is None for stat in shards)


def _uncounted(shards: tuple[ObjectStat, ...], format: Format) -> Manifest:
    counts = [-1 if (count := format.count(stat.size, stat.url)) is None else count for stat in shards]
    _check_counts(zip(shards, counts, strict=True))
    return Manifest(
        shards,
        np.array(counts, dtype=np.int64),
        np.array([stat.size for stat in shards], dtype=np.int64),
        None,
        format,
        _digest(shards, None, format),
        {},
        0,
        progressive=True,
    )


def _check_counts(counts: Iterable[tuple[ObjectStat, int]]) -> None:
    """A sample's id is its shard's number and its own in 64 bits, and all together are counted in as many."""
    for stat, count in counts:
        if count > MOST_SAMPLES:
            raise FormatError(f"holds {count} samples, {MOST_SAMPLES} are the most of one shard", url=stat.url)


def _warn(notes: list[str], damaged: dict[int, DataError]) -> None:
    if damaged:
        first = next(iter(damaged.values()))
        warnings.warn(f"{len(damaged)} damaged shard(s) count as empty, the first: {first}", DataWarning, stacklevel=4)
    if notes:
        more = f" (and {len(notes) - 1} more notes on other shards)" if len(notes) > 1 else ""
        warnings.warn(notes[0] + more, DataWarning, stacklevel=4)


def _digest(shards: tuple[ObjectStat, ...], counts: Int64s | None, format: Format) -> str:
    """See :class:`Manifest`. Local versions are left out: a copy of the same files is the same data set."""
    urls = [stat.url for stat in shards]
    root = _common_start(min(urls), max(urls)).rpartition("/")[0]
    kind = "data set 1" if counts is not None else "progressive data set 1"
    parts = [f"{kind} {format.name} {format.identity()}"]
    known = [""] * len(shards) if counts is None else [f"\0{count}" for count in counts.tolist()]
    for stat, count in zip(shards, known, strict=True):
        version = stat.version if "://" in stat.url else ""
        parts.append(f"{stat.url[len(root) :]}\0{stat.size}\0{version}{count}")
    return name_digest(*parts)


def _common_start(a: str, b: str) -> str:
    """What two texts begin with alike; of the least and the greatest of many it is what all begin with."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]
