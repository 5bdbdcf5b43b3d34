"""The beginning of what a compressed file holds, without the rest of it."""

from __future__ import annotations

import bz2
import lzma
import zlib

from .magic import codec_of
from .packed import Bytes, xz_stream

_STEP = 1 << 20


def begins(data: Bytes, size: int) -> bytes:
    """The first ``size`` bytes of what a compressed file with a magic number holds; fewer where it is damaged."""
    out = bytearray()
    codec = codec_of(data)
    try:
        if codec == "zstd":
            import zstandard

            with zstandard.ZstdDecompressor().stream_reader(data.data, read_across_frames=True) as frames:
                try:
                    while len(out) < size and (part := frames.read(min(_STEP, size - len(out)))):
                        out += part
                except zstandard.ZstdError:
                    return bytes(out)
        elif codec == "gz":
            out += zlib.decompressobj(wbits=31).decompress(data.data, size)
        elif codec is not None:
            stream = bz2.BZ2Decompressor() if codec == "bz2" else xz_stream()
            at = 0
            while len(out) < size and not stream.eof and at < len(data):
                chunk = data.data[at : at + _STEP] if stream.needs_input else b""
                at += len(chunk)
                out += stream.decompress(chunk, size - len(out))
    except (zlib.error, lzma.LZMAError, OSError, EOFError):
        pass  # what came before the damage
    return bytes(out)
