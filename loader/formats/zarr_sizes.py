"""What a compressed chunk of a zarr store declares of itself, checked before a codec believes it.

Codecs of C libraries take the sizes in a chunk's header as they are: for how much to allocate, and some for how far to
read. zstd, blosc and lz4 chunks are checked by their headers; gzip, zlib, bz2 and lzma, which declare nothing, are
counted through where they could grow to more than :data:`_LARGE`.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from .abc import Bytes
from .magic import is_skippable

_LARGE = 256 << 20
_RATIO = 1032
"""No deflate stream grows more."""
_STEP = 1 << 20
_FIRST = 512
_LZMA_MEMORY = 512 << 20
_FREE_BLOCKS = 1 << 20
_LEAST_BLOCK = 256
_RLE = 1


class Suspect(ValueError):
    """A chunk whose header cannot be right, or codecs that could make anything of one."""


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


CHECKS: dict[str, Callable[[Bytes, int], None]] = {
    "zstd": _zstd,
    "blosc": _blosc,
    "lz4": _lz4,
    "gzip": _deflate,
    "zlib": _deflate,
    "bz2": _bzip2,
    "lzma": _lzma,
}
"""By a codec's name: ``check(chunk, most)``."""
