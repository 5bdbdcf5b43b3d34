"""The ``index.json`` of an MDS data set, version 2: names, sizes and counts of all its shards.

It is input from outside: names that would leave its folder are refused, numbers are checked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, overload

from cachefs.errors import FormatError, UnknownFormat


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
