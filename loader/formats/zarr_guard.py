"""What a compressed chunk declares of itself, checked before a codec believes it.

Codecs of C libraries take the sizes in a chunk's header as they are: for how much to allocate, and some for how far to
read. zstd, blosc and lz4 chunks are checked by their headers; gzip, zlib, bz2 and lzma, which declare nothing, are
counted through where they could grow to more than :data:`_LARGE`. In a shard every inner chunk is checked, by the
shard's index.

Only what a chunk's outermost codec makes of it is known beforehand, so one that compresses may stand nowhere else:
below checksums, which take nothing away, and above filters, which keep about the size. Codecs of other packages are on
their own.
"""

from __future__ import annotations

import bz2
import lzma
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .abc import Bytes
from .magic import is_skippable

_SLACK = 1 << 16
_LARGE = 256 << 20
_RATIO = 1032
"""No deflate stream grows more."""
_STEP = 1 << 20
_FIRST = 512
_LZMA_MEMORY = 512 << 20
_FREE_BLOCKS = 1 << 20
_LEAST_BLOCK = 256
_RLE = 1
_SHARDS = "sharding_indexed"
_ABSENT = np.uint64(2**64 - 1)
_FILTERS_SHRINK = 16


class Suspect(ValueError):
    """A chunk whose header cannot be right, or codecs that could make anything of one."""


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
        if codec.name in _CHECKS or codec.name in _COMPRESS:
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
    check = _CHECKS.get(codec.name)
    return _nothing if check is None else lambda data: check(data, most)


def _zstd(data: Bytes, most: int) -> None:
    """All frames of a chunk: libzstd decodes those behind the first as well."""
    import zstandard

    try:
        size = _declared(data.data, most)
        if size is not None:
            _compare(size, most)
            return
        with zstandard.ZstdDecompressor().stream_reader(data.data, read_across_frames=True) as stream:
            total = 0
            while part := stream.read(_STEP):
                total += len(part)
                _compare(total, most)
    except zstandard.ZstdError as e:
        raise Suspect(f"the Zstandard frame is damaged: {e}") from e


def _declared(frames: memoryview, most: int) -> int | None:
    """What Zstandard frames (RFC 8878) declare to hold together; ``None`` where one does not say."""
    import zstandard

    at = total = blocks = 0
    while at < len(frames):
        blocks += 1
        if is_skippable(frames[at : at + 4]):
            at += 8 + int.from_bytes(frames[at + 4 : at + 8], "little")
            continue
        head = frames[at : at + 18]
        size = zstandard.frame_content_size(head)
        if size < 0:
            return None
        total += size
        if total > most:
            break
        at += zstandard.frame_header_size(head)
        block = 0
        while not block & 1:
            blocks += 1
            if at >= len(frames):
                return total  # the codec itself will say so
            if blocks > _FREE_BLOCKS + most // _LEAST_BLOCK:
                raise Suspect(f"is cut in more than {blocks} blocks")
            block = int.from_bytes(frames[at : at + 3], "little")
            at += 3 + (1 if block >> 1 & 3 == _RLE else block >> 3)
        at += 4 * zstandard.get_frame_parameters(head).has_checksum
    return total


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
    _count(lambda: lzma.LZMADecompressor(memlimit=_LZMA_MEMORY), data, most)


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
    step = _FIRST
    try:
        while at < len(data) or not (stream.eof or stream.needs_input):
            if stream.eof:  # another member may follow, behind zeros
                at -= len(stream.unused_data)
                at += _zeros(data[at:])
                stream = start()
                step = _FIRST  # what is behind a member's end is copied
                continue
            chunk = data.data[at : at + step] if stream.needs_input else b""
            at += len(chunk)
            step = min(2 * step, _STEP)
            total += len(stream.decompress(chunk, _STEP))
            _compare(total, most)
    except lzma.LZMAError as e:
        if "emory" in str(e):
            raise Suspect(f"needs more than {_LZMA_MEMORY} bytes to be decompressed") from e
    except (OSError, EOFError, zlib.error):
        return


def _zeros(data: Bytes) -> int:
    """How many zeros the data begin with."""
    for at in range(0, len(data), _STEP):
        found = data[at : at + _STEP].nonzero()[0]
        if len(found):
            return at + int(found[0])
    return len(data)


def _compare(size: int, most: int) -> None:
    if size > most:
        raise Suspect(f"decompresses to {size} bytes, more than the {most} of a chunk")


_COMPRESS = frozenset((_SHARDS, "pcodec", "zfpy"))
"""More codecs that make anything of little, besides those of :data:`_CHECKS`."""
_KEEP_SIZE = frozenset(("bytes", "transpose", "vlen-utf8", "vlen-bytes"))
_CHECKSUMS = {"crc32c": "end", "crc32": "start", "adler32": "start", "fletcher32": "end", "jenkins_lookup3": "end"}
"""Codecs that add four bytes, and where unless they say otherwise."""
_CHECKS: dict[str, Callable[[Bytes, int], None]] = {
    "zstd": _zstd,
    "blosc": _blosc,
    "lz4": _lz4,
    "gzip": _deflate,
    "zlib": _deflate,
    "bz2": _bzip2,
    "lzma": _lzma,
}
