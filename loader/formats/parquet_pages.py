"""How many rows of a column chunk may be decoded at once: what its pages can at most become in memory.

Arrow's library allocates what a page declares, and a few bytes may declare a lot: a dictionary's one long value again
and again, strings that begin as the one before does, a run of nulls in lists. So the pages' headers are walked first:
what each declares must fit the bytes that are there, and how long a value can become bounds the rows. The encodings
that a footer names are not asked: the decoder does not ask them either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

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

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
_HEADS = {DATA: 5, DICTIONARY: 7, DATA_V2: 8}
_PREFIXES = 7
_PAGE: Wanted = {
    1: None,
    2: None,
    3: None,
    5: {1: None, 2: None},
    7: {1: None},
    8: {1: None, 4: None, 5: None, 6: None, 7: None},
}


def rows_at_once(chunk: Chunk, leaf: Leaf, longest: int, most: int) -> int:
    """So few that they take no more than half of ``most`` bytes, where each has one value of ``longest`` bytes at most.
    Raises ``ValueError`` where all together must take more."""
    if leaf.repeated and chunk.values * max(leaf.width, 4) > most:
        raise ValueError(f"{chunk.values} values take more than {most} bytes")
    return max(min(ROWS, most // 2 // max(longest, leaf.width)), 1)


class Page(NamedTuple):
    """A dictionary's page or one of data: the numbers of its own header, and where its body lies."""

    kind: int
    head: dict[int, Any]
    raw: int
    start: int
    end: int

    @property
    def prefixed(self) -> bool:
        """Whether its values are told by how they differ from the one before."""
        return self.kind != DICTIONARY and bool(self.head[4 if self.kind == DATA_V2 else 2] == _PREFIXES)


def longest_value(data: Bytes, chunk: Chunk) -> int:
    """The bytes that one value may take beyond its share of the pages. Raises ``ValueError`` for pages that declare
    what cannot be."""
    return max([1, *(page.raw for page in pages(data, chunk) if page.kind == DICTIONARY or page.prefixed)])


def pages(data: Bytes, chunk: Chunk) -> Iterator[Page]:
    """The pages that values are told by. Raises ``ValueError``."""
    end = min(chunk.end + _SLACK, len(data))
    ratio = _MOST_RATIOS.get(chunk.codec)
    at, left = chunk.start, chunk.values
    while left > 0 and at < chunk.end:
        page, size = _header(data, at, end)
        try:
            kind, raw, stored = page[1], page[2], page[3]
            head = page[_HEADS[kind]] if kind in _HEADS else {1: 0}
            values = head[1]
        except KeyError as e:
            raise ValueError(f"a page whose header lacks its field {e}") from e
        start = at + size
        at = start + stored
        if stored < 0 or at > end:
            raise ValueError(f"a page of {stored} bytes that does not fit its column")
        if raw < 0 or (ratio is not None and raw > stored * ratio + _SLACK):
            raise ValueError(f"a page of {stored} bytes declares that it decompresses to {raw}")
        if kind != DICTIONARY:
            if not 0 <= values <= left:
                raise ValueError(f"a page of {values} values where {left} are due")
            left -= values
        if kind in _HEADS:
            yield Page(kind, head, raw, start, at)


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
