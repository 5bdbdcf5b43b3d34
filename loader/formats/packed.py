"""Compressed shards: the whole shard is decompressed into private memory before it is indexed.

Samples are then views into that memory instead of into the mapped file. The output is bounded while it grows, so a
damaged or hostile stream cannot take more memory than ``limit`` (or :data:`MOST`).
"""

from __future__ import annotations

import bz2
import zlib

import numpy as np

from cachefs.errors import FormatError

from .abc import Bytes

GZIP = b"\x1f\x8b\x08"
ZSTD = b"\x28\xb5\x2f\xfd"
BZ2 = b"BZh"
MOST = 8 << 30
"""Bytes; the largest shard that is decompressed where its size is not known beforehand."""
_STEP = 1 << 20
_FIRST = 512


def unpack(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """What a gzip, Zstandard or bzip2 file holds, told by its first bytes; other data as it is."""
    head = data[:4].tobytes()
    if head.startswith(GZIP):
        return gunzip(data, url, limit)
    if head.startswith(ZSTD):
        return unzstd(data, url, limit)
    return unbz2(data, url, limit) if head.startswith(BZ2) else data


def is_zlib(head: bytes) -> bool:
    """Whether these can be the first bytes of a zlib stream (RFC 1950): two bytes, which other data may have too."""
    return len(head) >= 2 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0


def gunzip(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All members of a gzip file, one after the other, their CRCs checked. Zeros behind the last one are padding."""
    return _inflate(data, url, limit, 31, "gzip member")


def unzlib(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All zlib streams of a file (RFC 1950), their checksums checked. Zeros behind the last one are padding."""
    return _inflate(data, url, limit, 15, "zlib stream")


def _inflate(data: Bytes, url: str, limit: int | None, wbits: int, what: str) -> Bytes:
    most = MOST if limit is None else limit
    source = data.data
    out = bytearray()
    at = 0
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
                    step = min(2 * step, _STEP)
                part = stream.decompress(chunk, _STEP)
                if not (part or chunk or stream.eof):
                    raise FormatError(f"the {what} that starts at byte {member} is cut off", url=url, offset=at)
                out += part
                chunk = stream.unconsumed_tail
                _check(len(out), most, url)
        except zlib.error as e:
            raise FormatError(f"the {what} that starts here is damaged: {e}", url=url, offset=member) from e
        at -= len(stream.unused_data)
    return np.frombuffer(out, np.uint8)


def unbz2(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All streams of a bzip2 file, one after the other, their CRCs checked. Zeros behind the last one are padding."""
    most = MOST if limit is None else limit
    source = data.data
    out = bytearray()
    at = 0
    while at < len(source):
        if source[at] == 0 and not data[at:].any():
            break
        stream = bz2.BZ2Decompressor()
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
                            f"the bzip2 stream that starts at byte {member} is cut off", url=url, offset=at
                        )
                out += stream.decompress(chunk, _STEP)
                _check(len(out), most, url)
        except OSError as e:
            raise FormatError(f"the bzip2 stream that starts here is damaged: {e}", url=url, offset=member) from e
        at -= len(stream.unused_data)
    return np.frombuffer(out, np.uint8)


def unzstd(data: Bytes, url: str, limit: int | None = None) -> Bytes:
    """All frames of a Zstandard file, one after the other."""
    import zstandard

    most = MOST if limit is None else limit
    out = bytearray()
    try:
        size = zstandard.frame_content_size(data.data[:18])
        _check(max(size, 0), most, url)
        with zstandard.ZstdDecompressor().stream_reader(data.data, read_across_frames=True) as stream:
            while part := stream.read(_STEP):
                out += part
                _check(len(out), most, url)
    except zstandard.ZstdError as e:
        raise FormatError(f"the Zstandard stream is damaged: {e}", url=url, offset=0) from e
    if len(out) < size or (limit is not None and len(out) != limit):
        wanted = limit if limit is not None else size
        raise FormatError(f"decompresses to {len(out)} bytes, not to {wanted}: cut off or another file", url=url)
    return np.frombuffer(out, np.uint8)


def _check(size: int, most: int, url: str) -> None:
    if size > most:
        raise FormatError(f"decompresses to more than {most} bytes", url=url, hint="write smaller shards")
