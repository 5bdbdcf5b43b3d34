"""Where the items of one LitData chunk lie: :class:`LitIndex`, and the walk over a chunk's head that makes it.

A chunk is ``n`` (uint32), ``n + 1`` offsets (uint32), the items. It may be framed instead, for ``compression_level``
``"batch"``: a magic number, the items' offsets in what the frames decompress to, and a table of Zstandard frames, each
of several items. Rows of plain values may stand in an Arrow IPC file or stream behind the items, then told by a magic
number at the chunk's end; what is there is taken rather than the items, as litdata does.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, FormatError

from .abc import Bytes, SampleIndex
from .arrow import Arrow, ArrowIndex
from .litdata_leaves import Leaf, dtype_of, make_leaf
from .litdata_tree import Node, parse_tree
from .packed import MOST

FRAMED = b"LDFZ01\0\0"
ROWS = b"LDARW01\0"
VALUE = "value"
"""The field of items that are no dict."""
_U32 = np.dtype("<u4")
_FRAMED_HEAD = struct.Struct("<8sHHIII")
_FRAME = np.dtype([("first", "<u4"), ("items", "<u4"), ("at", "<u8"), ("packed", "<u4"), ("size", "<u4")])


class Field(NamedTuple):
    """One field of a sample: its first leaf among the item's, and how its leaves are nested."""

    name: str
    first: int
    node: Node


class Shape(NamedTuple):
    """What an index of the data set says of every item, with the user's options. Plain and hashable."""

    leaves: tuple[str, ...]
    tree: str | None
    wrap: str | None
    names: tuple[str, ...] | None
    allow_pickle: bool

    def fields(self) -> tuple[Field, ...]:
        """The fields of a sample. A dict has its own; of a tuple or list the user may name the parts."""
        try:
            root = parse_tree(self.tree)
        except ValueError as e:
            raise ConfigError(f"LitData(tree=...): {e}") from e
        if root.kind == "dict":
            names = tuple(str(key) for key in root.keys)
        elif self.names is None:
            return (Field(VALUE, 0, root),)
        else:
            names = self.names
        parts = (root,) if root.kind == "leaf" else root.children
        if len(names) != len(parts):
            raise ConfigError(f"LitData(names=...) has {len(names)} names, items have {len(parts)} parts")
        found = []
        first = 0
        for name, child in zip(names, parts, strict=True):
            found.append(Field(name, first, child))
            first += child.leaves
        return tuple(found)

    def decoders(self) -> tuple[Leaf, ...]:
        """Per leaf what decodes it; one that cannot be read raises :class:`RefusedLeaf` there."""
        return tuple(make_leaf(leaf, self.allow_pickle) for leaf in self.leaves)


@dataclass(slots=True)
class LitIndex(SampleIndex):
    """Item ``i`` lies at bytes ``offsets[i] .. offsets[i + 1]`` of the chunk, or of what its ``frames`` decompress to.

    ``rows``: where the chunk's rows stand in Arrow memory, which begins at ``rows_at``. ``block``: tokens in a sample
    of a chunk of tokens, 0: all of them are one; ``None``: items are no tokens.
    """

    shape: Shape
    offsets: npt.NDArray[np.int64]
    block: int | None = None
    frames: npt.NDArray[np.void] | None = None
    rows: ArrowIndex | None = None
    rows_at: int = 0

    def __len__(self) -> int:
        if self.block is None:
            return len(self.offsets) - 1
        return self.tokens // self.block if self.block else 1

    @property
    def tokens(self) -> int:
        """How many tokens the chunk holds."""
        return int(self.offsets[-1] - self.offsets[0]) // self.dtype.itemsize

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Of tokens."""
        return dtype_of(self.shape.leaves[0])

    @property
    def inflated(self) -> int:
        """The memory that decompressed frames take once all are read."""
        return 0 if self.frames is None else int(self.offsets[-1])

    @property
    def nbytes(self) -> int:
        frames = 0 if self.frames is None else self.frames.nbytes
        return self.offsets.nbytes + frames + (0 if self.rows is None else self.rows.nbytes) + 2000


def index_chunk(data: Bytes, url: str, shape: Shape, block: int | None) -> LitIndex:
    """Walk a chunk's head. Raises ``FormatError`` where it does not fit the chunk's bytes."""
    if data[: len(FRAMED)].tobytes() == FRAMED:
        return _framed(data, url, shape)
    size = len(data)
    if size < 8:
        raise FormatError(f"{size} bytes are too few for a LitData chunk", url=url, offset=0)
    count = int(data[:4].view(_U32)[0])
    table = 8 + 4 * count
    if table > size:
        raise FormatError(f"declares {count} items, for which its {size} bytes are too few", url=url, offset=0)
    offsets = data[4:table].view(_U32).astype(np.int64)
    _check_offsets(offsets, table, size, url, 4)
    if block is not None:
        return _tokens(LitIndex(shape, offsets, block), url)
    rows_at, end = _rows_span(data, int(offsets[-1]))
    if not end:
        return LitIndex(shape, offsets)
    rows = Arrow().index(data[rows_at:end], url)
    if len(rows) != count:
        raise FormatError(f"declares {count} items, its Arrow part has {len(rows)} rows", url=url, offset=0)
    return LitIndex(shape, offsets, rows=rows, rows_at=rows_at)


def _tokens(index: LitIndex, url: str) -> LitIndex:
    try:
        left = int(index.offsets[-1] - index.offsets[0]) % index.dtype.itemsize
    except ValueError as e:
        raise FormatError(f"the only leaf {e}", url=url) from e
    if left:
        raise FormatError(f"the tokens are no whole number of {index.dtype}", url=url, offset=int(index.offsets[0]))
    return index


def _rows_span(data: Bytes, after: int) -> tuple[int, int]:
    """Where Arrow memory stands behind the items; ``(0, 0)``: nowhere."""
    end = len(data) - len(ROWS) - 4
    if end < after or data[end + 4 :].tobytes() != ROWS:
        return 0, 0
    start = end - int(data[end : end + 4].view(_U32)[0])
    return (start, end) if start >= after else (0, 0)


def _framed(data: Bytes, url: str, shape: Shape) -> LitIndex:
    size = len(data)
    if size < _FRAMED_HEAD.size:
        raise FormatError(f"{size} bytes are too few for a framed LitData chunk", url=url, offset=0)
    _, version, _, count, _, frame_count = _FRAMED_HEAD.unpack_from(data.data)
    if version != 1:
        raise FormatError(f"a framed chunk of version {version}; version 1 is read", url=url, offset=8)
    table = _FRAMED_HEAD.size + 4 * (count + 1)
    begin = table + _FRAME.itemsize * frame_count
    if begin > size:
        raise FormatError(
            f"declares {count} items in {frame_count} frames, for which its {size} bytes are too few",
            url=url,
            offset=12,
        )
    offsets = data[_FRAMED_HEAD.size : table].view(_U32).astype(np.int64)
    _check_offsets(offsets, 0, MOST, url, _FRAMED_HEAD.size)
    frames = data[table:begin].view(_FRAME).copy()
    ends = np.cumsum(frames["items"], dtype=np.int64)
    if int(ends[-1] if frame_count else 0) != count or (frames["first"] != ends - frames["items"]).any():
        raise FormatError("the frames do not hold each item once", url=url, offset=table)
    outside = (frames["at"] < begin) | (frames["at"] > size) | (frames["packed"] > size - frames["at"])
    wrong = frames["size"] != offsets[ends] - offsets[frames["first"]]
    for bad, what in ((outside, "lies outside the chunk"), (wrong, "does not have the size of its items")):
        if bad.any():
            number = int(bad.argmax())
            raise FormatError(f"frame {number} {what}", url=url, offset=table + number * _FRAME.itemsize)
    return LitIndex(shape, offsets, frames=frames)


def _check_offsets(offsets: npt.NDArray[np.int64], least: int, most: int, url: str, at: int) -> None:
    falling = np.flatnonzero(np.diff(offsets) < 0)
    if len(falling):
        i = int(falling[0])
        raise FormatError(f"the offset of item {i + 1} lies before that of item {i}", url=url, offset=at + 4 * (i + 1))
    if offsets[0] < least or offsets[-1] > most:
        raise FormatError(
            f"the items should lie at bytes {offsets[0]} to {offsets[-1]}, the chunk has {least} to {most} for them: "
            "cut off or damaged",
            url=url,
            offset=at,
        )
