"""The ``index.json`` of an MDS data set, version 2: names, sizes and counts of all its shards.

It is input from outside: names that would leave its folder are refused, numbers are checked.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from cachefs.errors import FormatError, NotFound, UnknownFormat

from ..formats import Mds
from .abc import Folder, Found

if TYPE_CHECKING:
    from cachefs.client import Client
    from cachefs.shard import ObjectStat

INDEX = "index.json"
_PARALLEL_STATS = 16


@dataclass(frozen=True, slots=True)
class MdsListing:
    """One shard: the names it may be stored under (compressed first), its samples, its size in bytes decompressed."""

    names: tuple[str, ...]
    samples: int
    raw_bytes: int


@overload
def read_mds_index(raw: bytes, url: str) -> list[MdsListing]: ...
@overload
def read_mds_index(raw: bytes, url: str, *, optional: bool) -> list[MdsListing] | None: ...
def read_mds_index(raw: bytes, url: str, *, optional: bool = False) -> list[MdsListing] | None:
    """The shards an index lists, in order. ``optional``: ``None`` for JSON that is no MDS index.

    Raises ``FormatError`` for a damaged index, ``UnknownFormat`` for another tool's.
    """
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError) as e:
        if optional:
            return None
        raise FormatError(f"not readable as JSON: {e}", url=url) from e
    if isinstance(document, dict) and "chunks" in document and "config" in document:
        raise UnknownFormat("the index of a LitData data set, which is not read by now", url=url)
    if not (isinstance(document, dict) and isinstance(document.get("shards"), list)):
        if optional:
            return None
        raise FormatError("no MDS index: it lists no shards", url=url)
    if document.get("version") != 2:
        raise UnknownFormat(f"an index of version {document.get('version')!r}; version 2 is read", url=url)
    return [_shard(item, number, url) for number, item in enumerate(document["shards"])]


def _shard(item: Any, number: int, url: str) -> MdsListing:
    where = f"shard {number} of the index"
    if not isinstance(item, dict):
        raise FormatError(f"{where} is not described", url=url)
    if item.get("format") != "mds":
        raise UnknownFormat(f"{where} has format {item.get('format')!r}; only mds is read by now", url=url)
    names = []
    sizes = []
    for part in ("zip_data", "raw_data"):
        data = item.get(part)
        if data is not None:
            name, size = (data.get("basename"), data.get("bytes")) if isinstance(data, dict) else (None, None)
            if not isinstance(name, str) or not _inside(name):
                raise FormatError(f"{where} has the name {name!r}, which is not one inside its folder", url=url)
            names.append(name)
            sizes.append(_whole(size, f"the size of {where}", url))
    compression = item.get("compression")
    packed = item.get("zip_data") is not None and compression
    if packed and str(compression).partition(":")[0] != "zstd":
        raise UnknownFormat(f"{where} is compressed with {compression}; only zstd is read by now", url=url)
    if item.get("raw_data") is None:
        raise FormatError(f"{where} has no raw_data", url=url)
    return MdsListing(tuple(names), _whole(item.get("samples"), f"the count of {where}", url), sizes[-1])


def _whole(value: Any, what: str, url: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"{what} is {value!r}, not a number", url=url)
    return value


def _inside(name: str) -> bool:
    parts = name.split("/")
    return "\\" not in name and "\0" not in name and all(part not in ("", ".", "..") for part in parts)


def mds_layout(folder: Folder) -> Found | None:
    """A folder with MDS indexes, in it or in folders below it: all their shards, in order of the indexes' names."""
    if not (folder.format is None or isinstance(folder.format, Mds)):
        return None
    indexes = []
    for item in folder.named(INDEX):
        rows = read_mds_index(folder.read(item.url), item.url, optional=folder.format is None)
        if rows is not None:
            indexes.append((item.url, rows))
    return mds_found(indexes, dict(folder.by_url), folder.client) if indexes else None


def mds_found(
    indexes: Sequence[tuple[str, Sequence[MdsListing]]], listed: dict[str, ObjectStat], client: Client
) -> Found:
    """The shards of these indexes: the compressed file where it is there, else the raw one."""
    wanted: list[tuple[MdsListing, list[str]]] = []
    for index_url, rows in indexes:
        folder = index_url.rpartition("/")[0]
        wanted += [(row, [f"{folder}/{name}" for name in row.names]) for row in rows]
    missing = [pair for pair in wanted if not any(url in listed for url in pair[1])]
    if missing:
        with ThreadPoolExecutor(max_workers=_PARALLEL_STATS) as pool:
            for stat in pool.map(lambda pair: _first_there(pair[1], client), missing):
                listed[stat.url] = stat
    return Found(
        tuple(next(listed[url] for url in urls if url in listed) for _, urls in wanted),
        Mds(),
        tuple(row.samples for row, _ in wanted),
        tuple(row.raw_bytes for row, _ in wanted),
    )


def _first_there(urls: Sequence[str], client: Client) -> ObjectStat:
    for url in urls[:-1]:
        try:
            return client.stat(url)
        except NotFound:
            continue
    return client.stat(urls[-1])
