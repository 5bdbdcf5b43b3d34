"""How many rows of a column chunk may be decoded at once: what its pages can at most become in memory.

Arrow's library allocates what a page declares, and a few bytes may declare a lot: a dictionary's one long value again
and again, strings that begin as the one before does, a run of nulls in lists. So the pages' headers are walked first:
what each declares must fit the bytes that are there, and how long a value can become bounds the rows. The encodings
that a footer names are not asked: the decoder does not ask them either.
"""

from __future__ import annotations

from typing import Any

from .abc import Bytes
from .parquet_footer import Chunk, Leaf
from .thrift import Reader, Wanted

ROWS = 1 << 16
"""That are decoded at a time, where nothing speaks against it."""
_HEADERS = (1 << 10, 64 << 10, 16 << 20)
"""Bytes that are taken for a page's header: it says by itself where it ends, and holds statistics of any length."""
_SLACK = 128
"""Bytes that old writers' chunks are longer than they say, and that a page of next to nothing may declare."""
_MOST_RATIOS = {0: 1, 1: 22, 2: 1032, 5: 255, 6: 1 << 15, 7: 255}
"""How many bytes one byte decompresses to at most: plain, Snappy, gzip, LZ4, Zstandard, raw LZ4. Brotli knows none."""

_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_PREFIXES = 7
_PAGE: Wanted = {1: None, 2: None, 3: None, 5: {1: None, 2: None}, 8: {1: None, 4: None}}


def rows_at_once(data: Bytes, chunk: Chunk, leaf: Leaf, most: int) -> int:
    """So few that they take no more than half of ``most`` bytes, if one does not. Raises ``ValueError`` for pages that
    declare what cannot be."""
    if leaf.repeated and chunk.values * max(leaf.width, 4) > most:
        raise ValueError(f"{chunk.values} values take more than {most} bytes")
    longest = max(_longest(data, chunk), leaf.width)
    return max(min(ROWS, most // 2 // longest), 1)


def _longest(data: Bytes, chunk: Chunk) -> int:
    """The bytes that one value may take beyond its share of the pages."""
    end = min(chunk.end + _SLACK, len(data))
    ratio = _MOST_RATIOS.get(chunk.codec)
    longest: int = 1
    at, left = chunk.start, chunk.values
    while left > 0 and at < chunk.end:
        page, size = _header(data, at, end)
        kind, raw, stored = page[1], page[2], page[3]
        at += size + stored
        if stored < 0 or at > end:
            raise ValueError(f"a page of {stored} bytes that does not fit its column")
        if raw < 0 or (ratio is not None and raw > stored * ratio + _SLACK):
            raise ValueError(f"a page of {stored} bytes declares that it decompresses to {raw}")
        if kind == _DICTIONARY:
            longest = max(longest, raw)
        elif kind in (_DATA, _DATA_V2):
            head = page[5] if kind == _DATA else page[8]
            values, encoding = head[1], head[2 if kind == _DATA else 4]
            if not 0 <= values <= left:
                raise ValueError(f"a page of {values} values where {left} are due")
            left -= values
            if encoding == _PREFIXES:
                longest = max(longest, raw)
    return longest


def _header(data: Bytes, at: int, end: int) -> tuple[dict[int, Any], int]:
    """A page's header, and its size."""
    for most in _HEADERS:
        reader = Reader(data[at : min(at + most, end)].tobytes())
        try:
            return reader.struct(_PAGE), reader.at
        except ValueError:
            if most >= end - at or most == _HEADERS[-1]:
                raise
    raise AssertionError("unreachable")
