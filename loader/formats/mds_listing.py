"""The ``index.json`` of an MDS data set, version 2: names, sizes, counts and digests of all its shards."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple, overload

import msgspec

from cachefs.errors import FormatError, UnknownFormat

from .abc import Bytes
from .listing import Count, Size, decoded, is_inside, tool_of
from .packed import CODECS


class _File(msgspec.Struct):
    basename: str
    bytes: Size


class _Shard(msgspec.Struct):
    format: str = ""
    samples: Count | None = None
    raw_data: _File | None = None
    zip_data: _File | None = None
    compression: str | None = None


class _Kinds(msgspec.Struct):
    format: Any = None


class _Index(msgspec.Struct):
    shards: list[_Shard]


class _Head(msgspec.Struct):
    shards: list[_Kinds]
    version: Any = None


class MdsListing(NamedTuple):
    """One shard: the names it may be stored under (compressed first), its samples, its size in bytes decompressed.

    ``codec``: what compresses it under its first name where it has two; ``None``: nothing.
    """

    names: tuple[str, ...]
    samples: int
    raw_bytes: int
    codec: str | None = None


@overload
def read_mds_index(raw: bytes, url: str) -> list[MdsListing]: ...
@overload
def read_mds_index(raw: bytes, url: str, *, optional: bool) -> list[MdsListing] | None: ...
def read_mds_index(raw: bytes, url: str, *, optional: bool = False) -> list[MdsListing] | None:
    """The shards an index lists, in order. ``optional``: ``None`` for JSON that is no MDS index.

    Raises ``FormatError`` for a damaged index, ``UnknownFormat`` for another tool's and for shards that are not MDS.
    """
    tool = tool_of(raw)
    if tool != "mds":
        if optional:
            return None
        if tool == "litdata":
            raise UnknownFormat("the index of a LitData data set, not of an MDS one", url=url)
        raise FormatError("no MDS index: not JSON that lists shards", url=url)
    head = decoded(raw, _Head, "MDS index", url)
    if head.version != 2:
        raise UnknownFormat(f"an index of version {head.version!r}; version 2 is read", url=url)
    for number, kind in enumerate(head.shards):
        if kind.format != "mds":
            raise UnknownFormat(
                f"shard {number} of the index has format {kind.format!r}, which is not read",
                url=url,
                hint="only mds is; write the data set with MDSWriter, or name JSONL shards with format='jsonl'",
            )
    shards = decoded(raw, _Index, "MDS index", url).shards
    return [_listing(shard, number, url) for number, shard in enumerate(shards)]


def _listing(shard: _Shard, number: int, url: str) -> MdsListing:
    raw_data, zip_data = shard.raw_data, shard.zip_data
    if raw_data is None or shard.samples is None:
        missing = "raw_data" if raw_data is None else "count of samples"
        raise FormatError(f"shard {number} of the index has no {missing}", url=url)
    codec = None
    names: tuple[str, ...] = (raw_data.basename,)
    if zip_data is not None:
        names = (zip_data.basename, raw_data.basename)
        codec = (shard.compression or "").partition(":")[0] or None
        if codec is not None and codec not in CODECS:
            raise UnknownFormat(
                f"shard {number} of the index is compressed with {shard.compression}, which is not read", url=url
            )
    for name in names:
        if not is_inside(name):
            raise FormatError(
                f"shard {number} of the index has the name {name!r}, which is not one inside its folder", url=url
            )
    return MdsListing(names, shard.samples, raw_data.bytes, codec)


class _Hashed(msgspec.Struct):
    basename: str
    hashes: dict[str, str] = {}


class _HashedShard(msgspec.Struct):
    raw_data: _Hashed | None = None
    zip_data: _Hashed | None = None


class _HashedIndex(msgspec.Struct):
    shards: list[_HashedShard]


def hashes(raw: bytes, url: str) -> dict[str, dict[str, str]]:
    """The digests that an index holds: by a file's name in the index's folder, by algorithm, in hexadecimal.

    Both the compressed and the raw file of a shard are in it; :func:`mismatch` compares.
    """
    found: dict[str, dict[str, str]] = {}
    for shard in decoded(raw, _HashedIndex, "MDS index", url).shards:
        for file in (shard.zip_data, shard.raw_data):
            if file is not None and file.hashes:
                found[file.basename] = file.hashes
    return found


def mismatch(data: Bytes, wanted: dict[str, str]) -> str | None:
    """The first algorithm of ``wanted`` whose digest the bytes do not have; ``None``: all that are known agree."""
    import xxhash

    for name, digest in wanted.items():
        if name in xxhash.algorithms_available:
            have = getattr(xxhash, name)(data).hexdigest()
        elif name in hashlib.algorithms_available and not name.startswith("shake_"):
            have = hashlib.new(name, data.data, usedforsecurity=False).hexdigest()
        else:
            continue  # one that this machine cannot compute says nothing
        if have != digest.lower():
            return name
    return None
