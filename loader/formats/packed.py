"""Compressed shards: the whole shard is decompressed into private memory before it is indexed.

Samples are then views into that memory instead of into the mapped file. The output is bounded while it grows, so a
damaged or hostile stream cannot take more memory than ``limit``, and no ``limit`` may be more than :data:`MOST`. Pieces
(members, streams, frames, blocks) that hold next to nothing cost time and no memory: there may not be many of those.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .magic import codec_of, is_skippable
from .varint import WireError, varint

Bytes: TypeAlias = npt.NDArray[np.uint8]
MOST = 8 << 30
"""Bytes; the largest shard that is decompressed."""
_FREE_PIECES = 1 << 20
_LEAST_PIECE = 256
_STEP = 1 << 20
_SLICE = 64 << 10
"""Bytes that zlib is given at a time: it copies what is left of them whenever its output is full."""
_FIRST = 512
_XZ_MEMORY = 128 << 20
_RLE = 1
_SNAPPY_MOST = (1 << 32) - 1
_SNAPPY_RATIO = 22
"""No Snappy block grows more: its densest element is 3 bytes that stand for 64."""


def unpacked(codec: str, data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """What ``data`` decompresses to with one of :data:`CODECS`; ``limit``: the size that it must have."""
    return CODECS[codec](data, url, limit)


def unpack(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """What a compressed file holds, told by its first bytes; other data as it is."""
    codec = codec_of(data)
    return data if codec is None else unpacked(codec, data, url, limit)


def gunzip(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All members of a gzip file, one after the other, their CRCs checked. Zeros behind the last one are padding."""
    return _inflate(data, url, limit, 31, "gzip member")


def unzlib(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All zlib streams of a file (RFC 1950), their checksums checked. Zeros behind the last one are padding."""
    return _inflate(data, url, limit, 15, "zlib stream")


def _inflate(data: Bytes, url: str, limit: int | None, wbits: int, what: str) -> Bytes:
    most = _bound(limit, url)
    source = data.data
    out = bytearray()
    at = pieces = 0
    while at < len(source):
        if source[at] == 0 and not data[at:].any():
            break
        stream = zlib.decompressobj(wbits=wbits)
        # zlib copies what is behind a member's end, so what it is given grows with the member
        member, step = at, _FIRST
        chunk: bytes | memoryview = b""
        try:
            while not stream.eof:
                if not chunk:
                    chunk = source[at : at + step]
                    at += len(chunk)
                    step = min(2 * step, _SLICE)
                part = stream.decompress(chunk, _STEP)
                if not (part or chunk or stream.eof):
                    raise FormatError(f"the {what} that starts at byte {member} is cut off", url=url, offset=at)
                out += part
                chunk = stream.unconsumed_tail
                _check(len(out), most, url)
        except zlib.error as e:
            raise FormatError(f"the {what} that starts here is damaged: {e}", url=url, offset=member) from e
        at -= len(stream.unused_data)
        pieces += 1
        _check_pieces(pieces, len(out), url, member)
    return _whole(out, limit, url)


def unbz2(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All streams of a bzip2 file, one after the other, their CRCs checked. Zeros behind the last one are padding."""
    return _streams(data, url, limit, bz2.BZ2Decompressor, "bzip2")


def unxz(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All streams of an xz file, one after the other, their checks checked. Zeros behind the last one are padding."""
    return _streams(data, url, limit, xz_stream, "xz")


def xz_stream() -> lzma.LZMADecompressor:
    """A decompressor of xz whose memory is bounded."""
    return lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)


def _streams(
    data: Bytes,
    url: str,
    limit: int | None,
    make: Callable[[], bz2.BZ2Decompressor] | Callable[[], lzma.LZMADecompressor],
    what: str,
) -> Bytes:
    most = _bound(limit, url)
    source = data.data
    out = bytearray()
    at = pieces = 0
    while at < len(source):
        if source[at] == 0 and not data[at:].any():
            break
        stream = make()
        member, step = at, _FIRST
        try:
            while not stream.eof:
                chunk: bytes | memoryview = b""
                if stream.needs_input:
                    chunk = source[at : at + step]
                    at += len(chunk)
                    step = min(2 * step, _STEP)
                    if not chunk:
                        raise FormatError(
                            f"the {what} stream that starts at byte {member} is cut off", url=url, offset=at
                        )
                out += stream.decompress(chunk, _STEP)
                _check(len(out), most, url)
        except (OSError, lzma.LZMAError) as e:
            raise FormatError(f"the {what} stream that starts here is damaged: {e}", url=url, offset=member) from e
        at -= len(stream.unused_data)
        pieces += 1
        _check_pieces(pieces, len(out), url, member)
    return _whole(out, limit, url)


def unzstd(data: Bytes, url: str, limit: int | None = None, *, most: int | None = None) -> Bytes:
    """All frames of a Zstandard file, one after the other. ``most``: a bound on the size, where only that is known."""
    import zstandard

    bound = _bound(limit if most is None else most, url)
    out = bytearray()
    try:
        size = zstandard.frame_content_size(data.data[:18])
        _check(max(size, 0), bound, url)
        with zstandard.ZstdDecompressor().stream_reader(data.data, read_across_frames=True) as stream:
            while part := stream.read(_STEP):
                out += part
                _check(len(out), bound, url)
    except zstandard.ZstdError as e:
        raise FormatError(f"the Zstandard stream is damaged: {e}", url=url, offset=0) from e
    if len(out) < size or _cut_off(data.data, len(out), url):
        raise FormatError("the Zstandard stream is cut off", url=url, offset=len(data))
    return _whole(out, limit, url)


def _cut_off(frames: memoryview, size: int, url: str) -> bool:
    """Whether Zstandard frames (RFC 8878) of ``size`` bytes end before their last block does: no decoder says so."""
    import zstandard

    at = pieces = 0
    while at < len(frames):
        pieces += 1
        _check_pieces(pieces, size, url, at)
        if is_skippable(frames[at : at + 4]):
            at += 8 + int.from_bytes(frames[at + 4 : at + 8], "little")
            continue
        head = frames[at : at + 18]
        try:
            checksum = zstandard.get_frame_parameters(head).has_checksum
        except zstandard.ZstdError:
            return True
        at += zstandard.frame_header_size(head)
        block = 0
        while not block & 1:
            if at + 3 > len(frames):
                return True
            pieces += 1
            block = int.from_bytes(frames[at : at + 3], "little")
            at += 3 + (1 if block >> 1 & 3 == _RLE else block >> 3)
            _check_pieces(pieces, size, url, at)
        at += 4 * checksum
    return at > len(frames)


def unbrotli(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """A Brotli stream. It has no checksum and no magic number."""
    import pyarrow as pa

    most = _bound(limit, url)
    out = bytearray()
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(data)), "brotli") as stream:
            while part := stream.read(_STEP):
                out += part
                _check(len(out), most, url)
    except OSError as e:
        raise FormatError(f"the Brotli stream is damaged: {_one_line(e)}", url=url, offset=0) from e
    return _whole(out, limit, url)


def unsnappy(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """A raw Snappy block, as ``snappy.compress`` writes it: no frames, no checksum, no magic number."""
    import pyarrow as pa

    most = _bound(limit, url)
    try:
        size, _ = varint(data.data, 0, min(len(data), 5))
    except WireError:
        size = -1
    if not 0 <= size <= min(_SNAPPY_RATIO * len(data), _SNAPPY_MOST):
        raise FormatError("no Snappy block: its size is damaged", url=url, offset=0)
    if limit is not None and size != limit:
        raise FormatError(f"decompresses to {size} bytes, not to {limit}: another file", url=url, offset=0)
    _check(size, most, url)
    if not size:
        return np.empty(0, np.uint8)
    try:
        out = pa.Codec("snappy").decompress(pa.py_buffer(data), decompressed_size=size)
    except (OSError, pa.ArrowException) as e:
        raise FormatError(f"the Snappy block is damaged: {_one_line(e)}", url=url, offset=0) from e
    return np.frombuffer(out, np.uint8)


Unpack = Callable[[Bytes, str, "int | None"], Bytes]
CODECS: dict[str, Unpack] = {
    "gz": gunzip,
    "bz2": unbz2,
    "xz": unxz,
    "zstd": unzstd,
    "br": unbrotli,
    "snappy": unsnappy,
}
"""By the names that MDS indexes use. Brotli and Snappy have no magic number: they are told by an index alone."""


def _whole(out: bytearray, limit: int | None, url: str) -> Bytes:
    if limit is not None and len(out) != limit:
        raise FormatError(f"decompresses to {len(out)} bytes, not to {limit}: cut off or another file", url=url)
    return np.frombuffer(out, np.uint8)


def _bound(declared: int | None, url: str) -> int:
    """The most that may come out, where an index declares so much (``None``: nothing)."""
    if declared is None:
        return MOST
    if declared > MOST:
        raise FormatError(
            f"is declared to decompress to {declared} bytes, {MOST} are the most", url=url, hint="write smaller shards"
        )
    return declared


def _check_pieces(pieces: int, size: int, url: str, offset: int) -> None:
    if pieces > _FREE_PIECES + size // _LEAST_PIECE:
        raise FormatError(f"{pieces} compressed pieces that hold {size} bytes in all", url=url, offset=offset)


def _check(size: int, most: int, url: str) -> None:
    if size > most:
        raise FormatError(f"decompresses to more than {most} bytes", url=url, hint="write smaller shards")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
