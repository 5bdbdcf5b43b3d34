"""What a compressed chunk declares of itself, checked before a codec believes it.

Codecs of C libraries take the sizes in a chunk's header as they are: for how much to allocate, and some for how far to
read. zstd, blosc and lz4 chunks are checked by their headers; gzip, zlib, bz2 and lzma, which declare nothing, are
counted through where they could grow to more than :data:`_LARGE`. In a shard every inner chunk is checked, by the
shard's index. Codecs of other packages are on their own.
"""

from __future__ import annotations

import bz2
import lzma
import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from .abc import Bytes

_SLACK = 1 << 16
_LARGE = 256 << 20
_RATIO = 1032
"""No deflate stream grows more."""
_STEP = 1 << 20
_ABSENT = np.uint64(2**64 - 1)
_FILTERS_SHRINK = 16


class Suspect(ValueError):
    """A chunk whose header cannot be right."""


Check = Callable[[Bytes], None]


def guard_of(document: dict[str, Any], chunk: tuple[int, ...], itemsize: int, most: int) -> Check:
    """The check of an array's chunks; it raises :class:`Suspect`. ``most``: bytes that no chunk may decode to more of;
    ``itemsize`` 0: values have no fixed size."""
    if document.get("zarr_format") == 2:
        filters = document.get("filters")
        steps = [*(filters if isinstance(filters, list) else []), document.get("compressor")]
        names = [str(step.get("id")) for step in steps if isinstance(step, dict)]
        return _by_name(names[-1] if names else "", _bound(chunk, itemsize, most, filtered=len(names) > 1))
    codecs = document.get("codecs")
    return _chain(codecs if isinstance(codecs, list) else [], chunk, itemsize, most)


def _bound(chunk: tuple[int, ...], itemsize: int, most: int, *, filtered: bool) -> int:
    if itemsize == 0:
        return most
    return min(math.prod(chunk) * itemsize * (_FILTERS_SHRINK if filtered else 1) + _SLACK, most)


def _chain(codecs: list[Any], chunk: tuple[int, ...], itemsize: int, most: int) -> Check:
    """The check of a chunk that these codecs made; the last one is the outermost."""
    names = [_name(codec) for codec in codecs]
    tail = 0
    while names and names[-1] in ("crc32c", "numcodecs.crc32c"):
        names.pop()
        tail += 4
    if not names:
        return _nothing
    last = codecs[len(names) - 1]
    if names[-1] == "sharding_indexed":
        return _Sharded(last, chunk, itemsize, most, tail)
    filtered = any(name.startswith("numcodecs.") for name in names[:-1])
    check = _by_name(names[-1].removeprefix("numcodecs."), _bound(chunk, itemsize, most, filtered=filtered))
    return check if not tail else lambda data: check(data[: max(len(data) - tail, 0)])


class _Sharded:
    """Checks a shard: its index first, if it is stored as is usual, then every chunk in it."""

    def __init__(self, codec: dict[str, Any], shard: tuple[int, ...], itemsize: int, most: int, tail: int) -> None:
        options = codec.get("configuration")
        options = options if isinstance(options, dict) else {}
        inner = tuple(n for n in options.get("chunk_shape") or () if type(n) is int and n > 0)
        index = [_name(c) for c in options.get("index_codecs") or ()]
        known = len(inner) == len(shard) and index in (["bytes"], ["bytes", "crc32c"])
        self._chunks = math.prod(a // b for a, b in zip(shard, inner, strict=True)) if known else -1
        self._crc = 4 * (len(index) - 1)
        self._at_start = options.get("index_location") == "start"
        self._tail = tail
        inner_codecs = options.get("codecs")
        self._check = _chain(inner_codecs if isinstance(inner_codecs, list) else [], inner, itemsize, most)

    def __call__(self, data: Bytes) -> None:
        if self._chunks < 0:
            return
        data = data[: max(len(data) - self._tail, 0)]
        size = len(data)
        table = 16 * self._chunks
        if table + self._crc > size:
            raise Suspect(f"{size} bytes are too few for the index of a shard of {self._chunks} chunks")
        raw = data[:table] if self._at_start else data[size - table - self._crc : size - self._crc]
        places = raw.view("<u8").reshape(-1, 2)
        starts, lengths = places[(places != _ABSENT).any(axis=1)].T
        if ((starts > size) | (lengths > size - np.minimum(starts, np.uint64(size)))).any():
            raise Suspect(f"the shard's index points past its {size} bytes")
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            self._check(data[start : start + length])


def _name(codec: Any) -> str:
    if isinstance(codec, dict):
        codec = codec.get("name")
    return codec if isinstance(codec, str) else ""


def _nothing(data: Bytes) -> None:
    pass


def _by_name(name: str, most: int) -> Check:
    check = _CHECKS.get(name)
    return _nothing if check is None else lambda data: check(data, most)


def _zstd(data: Bytes, most: int) -> None:
    import zstandard

    try:
        size = zstandard.frame_content_size(data.data[:18])
        if size >= 0:
            _compare(size, most)
            return
        with zstandard.ZstdDecompressor().stream_reader(data.data) as stream:
            total = 0
            while part := stream.read(_STEP):
                total += len(part)
                _compare(total, most)
    except zstandard.ZstdError as e:
        raise Suspect(f"the Zstandard frame is damaged: {e}") from e


def _blosc(data: Bytes, most: int) -> None:
    if len(data) < 16:
        raise Suspect(f"{len(data)} bytes are too few for a blosc header")
    size, block, stored = data[4:16].view("<i4").tolist()
    if stored != len(data):
        raise Suspect(f"the blosc header declares {stored} bytes, there are {len(data)}")
    if size < 0 or block < 0 or (size > 0 and block == 0):
        raise Suspect(f"the blosc header declares {size} bytes in blocks of {block}")
    _compare(size, most)


def _lz4(data: Bytes, most: int) -> None:
    if len(data) < 4:
        raise Suspect(f"{len(data)} bytes are too few for an lz4 header")
    _compare(int(data[:4].view("<u4")[0]), most)


def _deflate(data: Bytes, most: int) -> None:
    if len(data) * _RATIO > max(most, _LARGE):
        _count(_Deflate, data, most)


def _bzip2(data: Bytes, most: int) -> None:
    _count(bz2.BZ2Decompressor, data, most)


def _lzma(data: Bytes, most: int) -> None:
    _count(lzma.LZMADecompressor, data, most)


class _Deflate:
    """zlib or gzip with the face of the other decompressors."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=47)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, chunk: bytes | memoryview, most: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail or chunk, most)


def _count(start: Callable[[], Any], data: Bytes, most: int) -> None:
    """Decompress without keeping anything. Damage ends it: the codec itself will say so."""
    total = at = 0
    stream = start()
    try:
        while at < len(data) or not (stream.eof or stream.needs_input):
            if stream.eof:  # another member may follow
                at -= len(stream.unused_data)
                stream = start()
            chunk = data.data[at : at + _STEP] if stream.needs_input else b""
            at += len(chunk)
            total += len(stream.decompress(chunk, _STEP))
            _compare(total, most)
    except (OSError, EOFError, lzma.LZMAError, zlib.error):
        return


def _compare(size: int, most: int) -> None:
    if size > most:
        raise Suspect(f"decompresses to {size} bytes, more than the {most} of a chunk")


_CHECKS: dict[str, Callable[[Bytes, int], None]] = {
    "zstd": _zstd,
    "blosc": _blosc,
    "lz4": _lz4,
    "gzip": _deflate,
    "zlib": _deflate,
    "bz2": _bzip2,
    "lzma": _lzma,
}
