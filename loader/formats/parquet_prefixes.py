"""What Parquet's strings that are told by the one before (``DELTA_BYTE_ARRAY``) become when they are decoded.

Each is the beginning of the one before, so many bytes of it, and a rest. The numbers of those bytes are kept together
before the rests, as differences packed in bits (``DELTA_BINARY_PACKED``); their sum says how much memory the decoder
will take, which may be a million times as much as the page.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .abc import Bytes
from .parquet_footer import Chunk
from .parquet_pages import DATA, DATA_V2, DICTIONARY, Page, pages
from .thrift import Reader

_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_LARGEST_BLOCK = 1 << 20
_WIDEST = 32


def decoded_size(data: Bytes, chunk: Chunk, most: int) -> int:
    """Bytes that the strings of a column in lists become at most; what is more than ``most`` is not added up. Raises
    ``ValueError``."""
    size = longest = 0
    for page in pages(data, chunk):
        if page.kind == DICTIONARY:
            longest = _longest(_values(data, page, chunk.codec), page.head[1])
        elif page.prefixed:
            size += page.raw + shared(_values(data, page, chunk.codec), page.head[1], most)
        else:
            size += page.raw + page.head[1] * longest
        if size > most:
            break
    return size


def _values(data: Bytes, page: Page, codec: int) -> bytes:
    """The page's values, behind its levels."""
    import pyarrow as pa

    start, raw = page.start, page.raw
    packed = codec != 0
    if page.kind == DATA_V2:
        levels = page.head[5] + page.head[6]
        if page.head[5] < 0 or page.head[6] < 0 or levels > min(raw, page.end - start):
            raise ValueError(f"levels of {levels} bytes that do not fit their page")
        start, raw = start + levels, raw - levels
        packed = packed and page.head.get(7, True)
    body = data[start : page.end].tobytes()
    if packed:
        if codec not in _CODECS:
            raise ValueError(f"strings in lists that share beginnings, compressed with codec {codec}")
        body = pa.decompress(body, raw, codec=_CODECS[codec], asbytes=True)
    at = 0
    for _ in range(2 if page.kind == DATA else 0):  # repetition and definition levels, each behind its size
        at += 4 + int.from_bytes(body[at : at + 4], "little")
    return body[at:]


def _longest(values: bytes, count: int) -> int:
    """The longest of so many strings, each behind its size."""
    longest = at = 0
    for _ in range(count):
        if at >= len(values):
            break
        size = int.from_bytes(values[at : at + 4], "little")
        longest = max(longest, size)
        at += 4 + size
    return longest


def shared(packed: bytes, values: int, most: int) -> int:
    """The sum of the numbers (``values`` at most) that ``packed`` begins with; what is more than ``most`` is not added
    up. Raises ``ValueError``."""
    reader = Reader(packed)
    block, parts, count, last = reader.varint(), reader.varint(), reader.varint(), reader.zigzag()
    if not (0 < block <= _LARGEST_BLOCK and 0 < parts <= block and block % parts == 0 and (block // parts) % 32 == 0):
        raise ValueError(f"numbers packed in blocks of {block} in {parts} parts")
    if count > values:
        raise ValueError(f"{count} strings where {values} are due")
    length = block // parts
    size, left = last, count - 1
    while left > 0 and size <= most:
        least = reader.zigzag()
        for width in reader.take(parts):
            if left <= 0 or size > most:
                break
            if width > _WIDEST:
                raise ValueError(f"lengths of {width} bits")
            numbers = last + np.cumsum(_unpacked(reader.take(length * width // 8), width, length)[:left] + least)
            if (numbers < 0).any():
                raise ValueError("a length below zero")
            size += int(numbers.sum())
            last = int(numbers[-1])
            left -= len(numbers)
    return size


def _unpacked(packed: bytes, width: int, count: int) -> Any:
    """``count`` numbers of ``width`` bits each, which fill these bytes."""
    if width == 0:
        return np.zeros(count, np.int64)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little").reshape(count, width)
    return bits.astype(np.int64) @ (1 << np.arange(width, dtype=np.int64))
