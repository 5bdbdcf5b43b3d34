"""Folders that mosaicml-streaming wrote: their ``index.json`` names all shards, with sizes and counts.

An index is input from outside: names that would leave its folder are refused, numbers are checked. Folders below the
given one may have indexes of their own (``split=`` of mosaicml-streaming): all of them are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cachefs.errors import ConfigError, NotFound

from ..formats import Mds
from ..formats.listing import INDEX
from ..formats.mds_listing import MdsListing, hashes, mismatch, read_mds_index
from .abc import Folder, Found, side_by_side

if TYPE_CHECKING:
    from cachefs.client import Client
    from cachefs.shard import ObjectStat

__all__ = ["INDEX", "MdsListing", "hashes", "mds_found", "mds_layout", "mismatch", "read_mds_index"]


def mds_layout(folder: Folder) -> Found | None:
    """A folder with MDS indexes, in it or in folders below it: all their shards, in order of the indexes' names."""
    if not (folder.format is None or isinstance(folder.format, Mds)):
        return None
    indexes = []
    for item in folder.named(INDEX):
        rows = read_mds_index(folder.read(item.url), item.url, optional=folder.format is None)
        if rows is not None:
            indexes.append((item.url, rows))
    indexes = _without_merged(indexes)
    if not indexes:
        return None
    return mds_found(indexes, dict(folder.by_url), folder.client, folder.format or Mds())


def _without_merged(indexes: list[tuple[str, list[MdsListing]]]) -> list[tuple[str, list[MdsListing]]]:
    """The indexes without those of folders whose shards an index further up names already (``merge_index``)."""
    covered: set[str] = set()
    for url, rows in indexes:
        folder = url.rpartition("/")[0]
        below = {name.rpartition("/")[0] for row in rows for name in row.names}
        covered |= {f"{folder}/{part}" for part in below if part}
    return [(url, rows) for url, rows in indexes if url.rpartition("/")[0] not in covered]


def mds_found(
    indexes: Sequence[tuple[str, Sequence[MdsListing]]],
    listed: dict[str, ObjectStat],
    client: Client,
    format: Mds | None = None,
) -> Found:
    """The shards of these indexes: the compressed file where it is there, else the raw one."""
    wanted: list[tuple[MdsListing, list[str]]] = []
    for index_url, rows in indexes:
        folder = index_url.rpartition("/")[0]
        wanted += [(row, [f"{folder}/{name}" for name in row.names]) for row in rows]
    missing = [pair for pair in wanted if not any(url in listed for url in pair[1])]
    for stat in side_by_side(lambda pair: _first_there(pair[1], client), missing):
        listed[stat.url] = stat
    chosen = [next(url for url in urls if url in listed) for _, urls in wanted]
    packed = {row.codec for (row, urls), url in zip(wanted, chosen, strict=True) if row.codec and url == urls[0]}
    return Found(
        tuple(listed[url] for url in chosen),
        _format(format or Mds(), packed, indexes[0][0]),
        tuple(row.samples for row, _ in wanted),
        tuple(row.raw_bytes for row, _ in wanted),
    )


def _format(format: Mds, packed: set[str], url: str) -> Mds:
    """The format with the codec that no shard's own bytes tell. A raw shard and those with a magic number need none."""
    untold = packed & Mds.UNTOLD
    if len(untold) > 1:
        raise ConfigError(f"shards compressed with {' and with '.join(sorted(untold))} in one data set", url=url)
    return replace(format, compression=untold.pop()) if untold else format


def _first_there(urls: Sequence[str], client: Client) -> ObjectStat:
    for url in urls[:-1]:
        try:
            return client.stat(url)
        except NotFound:
            continue
    return client.stat(urls[-1])
