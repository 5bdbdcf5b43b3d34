"""Counting the samples of shards whose index nobody wrote: by their size, their parts, or by indexing them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from cachefs.errors import ConfigError, DataError
from cachefs.shard import ObjectStat

from .buffers import IndexCache
from .formats import Format, WebDataset, detect
from .formats.derived import Counts
from .layouts import Found
from .opening import ClientObjects, OpenShard, open_mapped, while_filling

if TYPE_CHECKING:
    from cachefs.client import Client

OnError: TypeAlias = Literal["raise", "skip"]

_MOST_SUFFIXES = 8
"""Kinds of names of which one file each is looked into before one format is believed to hold for all."""
_AHEAD = 16
"""Shards that are asked for ahead of the one that is being indexed."""


class Row(NamedTuple):
    """One shard of the manifest to be. ``-1`` is not known, or for ``part`` a whole object."""

    stat: ObjectStat
    samples: int
    raw: int = -1
    part: int = -1
    size: int = -1
    skipped: int = 0
    notes: tuple[str, ...] = ()
    error: DataError | None = None


def count_shards(
    shards: tuple[ObjectStat, ...], format: Format, client: Client, on_error: OnError, indexes: IndexCache
) -> list[Row]:
    """The shards, or their parts, with the counts that their sizes, footers or samples tell."""
    ahead = _Ahead(shards, client)
    rows: list[Row] = []
    for number, stat in enumerate(shards):
        try:
            known = format.count(stat.size, stat.url)
            if known is not None:
                rows.append(Row(stat, known))
                continue
            if not format.folder:
                ahead.reach(number)
            parts = count_parts(client, stat, format)
            if parts is not None:
                share = stat.size // max(len(parts), 1)
                notes = tuple(f"{stat.url}: {note}" for note in parts.notes) if isinstance(parts, Counts) else ()
                rows += [
                    Row(stat, count, part=part, size=share, notes=() if part else notes)
                    for part, count in enumerate(parts)
                ]
                continue
            with _opened(client, stat, format) as shard:
                index = shard.index
                notes = tuple(f"{stat.url}: {note}" for note in index.notes)
                indexes.put(len(rows), index)
                rows.append(Row(stat, len(index), skipped=index.skipped, notes=notes))
        except DataError as e:
            if on_error == "raise":
                raise
            rows.append(Row(stat, 0, error=e))
    return rows


def count_parts(client: Client, stat: ObjectStat, format: Format) -> Sequence[int] | None:
    """The sample counts of a shard's parts; ``None`` where it is read as one."""
    if not format.has_parts:
        return None  # nothing to ask
    counts, objects = while_filling(
        client, {stat.url: (stat.version, stat.size)}, lambda objects: format.parts(objects, stat.url)
    )
    objects.close()
    return counts


def choose_format(found: Found, format: Format | None, client: Client, on_error: OnError) -> Format:
    """The format of listed shards: what the user named, completed by what an index says, else what the bytes tell."""
    named = found.named(format)
    return named if named is not None else _detect_format(found.stats, client, on_error)


def _detect_format(shards: tuple[ObjectStat, ...], client: Client, on_error: OnError) -> Format:
    """The format that the first shard's bytes tell, if that of the first with another suffix is the same.

    One stray ``metadata.jsonl`` among tars would else decide for all of them, or be taken for a damaged tar.
    """
    by_suffix: dict[str, list[ObjectStat]] = {}
    for stat in shards:
        by_suffix.setdefault(_suffix(stat.url), []).append(stat)
    told: list[tuple[ObjectStat, Format]] = []
    first: DataError | None = None
    for some in list(by_suffix.values())[:_MOST_SUFFIXES]:
        try:
            found = _first_told(some, client, on_error)
        except DataError as e:
            if on_error == "raise":
                raise
            first = first or e
        else:
            if found is not None:
                told.append(found)
    for stat, format in told[1:]:
        if type(format) is not type(told[0][1]):
            raise ConfigError(
                f"files of several formats in one data set: {told[0][0].url} is {told[0][1].name}, "
                f"{stat.url} is {format.name}",
                hint=f"name those that are meant by a pattern, such as *{_suffix(stat.url)}",
            )
    if told:
        return told[0][1]
    if first is not None:
        raise first
    return WebDataset()  # all are blank, as empty tars are


def _first_told(shards: Sequence[ObjectStat], client: Client, on_error: OnError) -> tuple[ObjectStat, Format] | None:
    """The first shard that tells its format; ``None`` where all are blank."""
    first: DataError | None = None
    for stat in shards:
        known = {stat.url: (stat.version, stat.size)}
        try:
            kind, objects = while_filling(client, known, partial(_detected, stat.url))
            objects.close()
        except DataError as e:
            if on_error == "raise":
                raise
            first = first or e
        else:
            if kind is not None:
                return stat, kind
    if first is not None:
        raise first
    return None


def _suffix(url: str) -> str:
    return os.path.splitext(url)[1]


def _detected(url: str, objects: ClientObjects) -> Format | None:
    return detect(objects, url)


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
