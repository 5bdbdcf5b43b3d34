"""The check of an array's chunks: none may decode to more than the array's metadata says.

What a compressed chunk declares of itself is checked before a codec believes it (:mod:`.zarr_sizes`); in a shard that
of every inner chunk, by the shard's index.

Only what a chunk's outermost codec makes of it is known beforehand, so one that compresses may stand nowhere else:
below checksums, which take nothing away, and above filters, which keep about the size. Codecs of other packages are on
their own.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .abc import Bytes
from .zarr_sizes import CHECKS, Suspect

_SLACK = 1 << 16
_ABSENT = np.uint64(2**64 - 1)
_FILTERS_SHRINK = 16
_SHARDS = "sharding_indexed"
_COMPRESS = frozenset((_SHARDS, "pcodec", "zfpy"))
"""More codecs that make anything of little, besides those of :data:`.zarr_sizes.CHECKS`."""
_KEEP_SIZE = frozenset(("bytes", "transpose", "vlen-utf8", "vlen-bytes"))
_CHECKSUMS = {"crc32c": "end", "crc32": "start", "adler32": "start", "fletcher32": "end", "jenkins_lookup3": "end"}
"""Codecs that add four bytes, and where unless they say otherwise."""

Check = Callable[[Bytes], None]


def guard_of(document: dict[str, Any], chunk: tuple[int, ...], itemsize: int, most: int) -> Check:
    """The check of an array's chunks; it raises :class:`Suspect`, as this does for codecs that nothing can bound.

    ``most``: bytes that no chunk may decode to more of; ``itemsize`` 0: values have no fixed size.
    """
    if document.get("zarr_format") == 2:
        entries = [*_listed(document.get("filters")), document.get("compressor")]
        codecs = [_of_version_2(entry) for entry in entries if entry is not None]
    else:
        codecs = _of_version_3(document.get("codecs"))
    return _chain(codecs, chunk, itemsize, most)


class _Codec(NamedTuple):
    """``checksum``: where it puts four bytes, ``start`` or ``end``; ``None``: it is none."""

    name: str
    options: dict[str, Any]
    checksum: str | None


def _of_version_2(entry: Any) -> _Codec:
    options = entry if isinstance(entry, dict) else {}
    name = options.get("id")
    return _codec(name if isinstance(name, str) else "", options, choice=True)


def _of_version_3(entries: Any) -> list[_Codec]:
    codecs = []
    for entry in _listed(entries):
        entry = entry if isinstance(entry, dict) else {"name": entry}
        name, options = entry.get("name"), entry.get("configuration")
        name = name if isinstance(name, str) else ""
        own = name.removeprefix("numcodecs.")  # what numcodecs has for version 2 may stand here too
        codecs.append(_codec(own, options if isinstance(options, dict) else {}, choice=own != name))
    return codecs


def _codec(name: str, options: dict[str, Any], *, choice: bool) -> _Codec:
    """``choice``: whether its options may say where a checksum is."""
    checksum = _CHECKSUMS.get(name)
    if choice and checksum is not None and options.get("location") in ("start", "end"):
        checksum = options["location"]
    return _Codec(name, options, checksum)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _bound(chunk: tuple[int, ...], itemsize: int, most: int, *, filtered: bool) -> int:
    if itemsize == 0:
        return most
    return min(math.prod(chunk) * itemsize * (_FILTERS_SHRINK if filtered else 1) + _SLACK, most)


def _chain(codecs: list[_Codec], chunk: tuple[int, ...], itemsize: int, most: int) -> Check:
    """The check of a chunk that these codecs made; the last one is the outermost."""
    codecs = list(codecs)
    start = tail = 0
    while codecs and codecs[-1].checksum is not None:
        if codecs.pop().checksum == "start":
            start += 4
        else:
            tail += 4
    if not codecs:
        return _nothing
    *inner, last = codecs
    for codec in inner:
        if codec.name in CHECKS or codec.name in _COMPRESS:
            raise Suspect(f"the codec {codec.name!r} within {last.name!r} may decompress to any size")
    filtered = any(codec.name not in _KEEP_SIZE for codec in inner)
    check: Check
    if last.name == _SHARDS:
        check = _Sharded(last.options, chunk, itemsize, most)
    else:
        check = _by_name(last, _bound(chunk, itemsize, most, filtered=filtered))
    return check if not start + tail else lambda data: check(data[start : max(len(data) - tail, start)])


class _Sharded:
    """Checks a shard: its index first, if it is stored as is usual, then every chunk in it."""

    def __init__(self, options: dict[str, Any], shard: tuple[int, ...], itemsize: int, most: int) -> None:
        inner = tuple(n for n in _listed(options.get("chunk_shape")) if type(n) is int and n > 0)
        codecs = _of_version_3(options.get("index_codecs", ["bytes", "crc32c"]))
        index = [codec.name for codec in codecs]
        if len(inner) != len(shard) or index not in (["bytes"], ["bytes", "crc32c"]):
            raise Suspect(f"the index of a shard in chunks of {inner}, made by {index}, is of no known size")
        self._chunks = math.prod(a // b for a, b in zip(shard, inner, strict=True))
        self._crc = 4 * (len(index) - 1)
        self._word = ">u8" if codecs[0].options.get("endian") == "big" else "<u8"
        self._at_start = options.get("index_location") == "start"
        self._check = _chain(_of_version_3(options.get("codecs")), inner, itemsize, most)

    def __call__(self, data: Bytes) -> None:
        size = len(data)
        table = 16 * self._chunks
        if table + self._crc > size:
            raise Suspect(f"{size} bytes are too few for the index of a shard of {self._chunks} chunks")
        raw = data[:table] if self._at_start else data[size - table - self._crc : size - self._crc]
        places = raw.view(self._word).reshape(-1, 2)
        starts, lengths = places[(places != _ABSENT).any(axis=1)].T
        if ((starts > size) | (lengths > size - np.minimum(starts, np.uint64(size)))).any():
            raise Suspect(f"the shard's index points past its {size} bytes")
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            self._check(data[start : start + length])


def _nothing(data: Bytes) -> None:
    pass


def _by_name(codec: _Codec, most: int) -> Check:
    if codec.name == "lzma" and codec.options.get("format", lzma.FORMAT_XZ) == lzma.FORMAT_RAW:
        raise Suspect("LZMA without a container may decompress to any size")
    check = CHECKS.get(codec.name)
    return _nothing if check is None else lambda data: check(data, most)
