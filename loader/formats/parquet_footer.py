"""A Parquet file's footer: its row groups and columns, checked against the file and against each other.

It is read here and not by Arrow's library, which allocates by what a footer declares, and ends the process over some
damaged ones. What is checked: where the columns' bytes lie, how many values they hold, and what they decompress to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from cachefs.errors import FormatError

from .abc import Bytes, Ready
from .arrow_schema import Field, image_fields
from .packed import MOST
from .thrift import Reader, Wanted

MAGIC = b"PAR1"
_TAIL = 64 << 10
_MOST_ROWS = 1 << 31
_DEEPEST = 64

_COLUMN: Wanted = {3: None, 5: None, 6: None, 7: None, 9: None, 11: None}
_GROUP: Wanted = {1: {1: None, 3: _COLUMN}, 3: None}
_ELEMENT: Wanted = {1: None, 3: None, 4: None, 5: None, 6: None, 10: {}}
_FILE: Wanted = {2: _ELEMENT, 3: None, 4: _GROUP, 5: {1: None, 2: None}, 8: {}}
"""The numbers of the fields that are read, as ``parquet.thrift`` gives them."""

_BYTE_ARRAY = 6
_REPEATED = 2


class Chunk(NamedTuple):
    """One column's pages in one row group: bytes ``start .. end``. ``column``: the field it belongs to."""

    column: str
    start: int
    end: int


class Group(NamedTuple):
    """One row group. ``offset``: of its first byte; ``size``: of its columns when decompressed."""

    rows: int
    offset: int
    size: int
    chunks: tuple[Chunk, ...]


class Footer(NamedTuple):
    """What is read of a footer. ``names``: of the fields, in order; ``images``: which of them are images."""

    names: tuple[str, ...]
    images: frozenset[str]
    groups: tuple[Group, ...]


class _Leaf(NamedTuple):
    """A column of the file. ``column``: the field it belongs to; ``repeated``: whether it may have more values."""

    column: str
    repeated: bool


def read_footer(data: Bytes, url: str, ready: Ready) -> Footer:
    """The footer of a mapped file, of which only these last bytes are asked for. Raises ``FormatError``."""
    size = len(data)
    ready(max(size - _TAIL, 0), size)
    tail = data[-8:].tobytes()
    if tail[4:] == b"PARE":
        raise FormatError("an encrypted Parquet file, which is not read", url=url, offset=0)
    if size < 12 or tail[4:] != MAGIC:
        raise FormatError("the footer of a Parquet file is missing: cut off or damaged", url=url, offset=size)
    start = size - 8 - int.from_bytes(tail[:4], "little")
    if start < len(MAGIC):
        raise FormatError("a footer that is longer than the file", url=url, offset=size - 8)
    ready(start, size)
    try:
        return _parsed(Reader(data[start : size - 8].tobytes()).struct(_FILE), start)
    # what is missing is a KeyError, what is of another kind than it must be a TypeError, AttributeError or IndexError
    except (ValueError, LookupError, TypeError, AttributeError) as e:
        what = f"{e} is missing" if isinstance(e, KeyError) else str(e)
        raise FormatError(f"the footer is damaged: {what}", url=url, offset=start) from e


def _parsed(document: dict[int, Any], end: int) -> Footer:
    if 8 in document:
        raise ValueError("it is encrypted, which is not read")
    leaves: list[_Leaf] = []
    fields = _fields(document[2], leaves)
    names = tuple(field.name for field in fields)
    if len(set(names)) < len(names):
        raise ValueError(f"two columns are called {next(name for name in names if names.count(name) > 1)!r}")
    groups = tuple(_group(group, number, leaves, end) for number, group in enumerate(document[4]))
    total = sum(group.rows for group in groups)
    if total != document[3]:
        raise ValueError(f"{document[3]} rows, but {total} in the row groups")
    notes = {item.get(1): item.get(2) for item in document.get(5, [])}
    return Footer(names, image_fields(fields, notes.get(b"huggingface")), groups)


def _fields(elements: list[dict[int, Any]], leaves: list[_Leaf]) -> list[Field]:
    """The fields of the top level; their columns are added to ``leaves``."""
    rest = iter(elements)
    root = next(rest, None)
    if root is None:
        raise ValueError("a schema without a root")
    fields = [_field(rest, leaves, None, False, 0) for _ in range(min(root.get(5, 0), len(elements)))]
    if next(rest, None) is not None or len(fields) != root.get(5, 0):
        raise ValueError("a schema of other size than its root says")
    return fields


def _field(rest: Iterator[dict[int, Any]], leaves: list[_Leaf], top: str | None, repeated: bool, deep: int) -> Field:
    element = next(rest, None)
    if element is None or deep > _DEEPEST:
        raise ValueError("a schema of other size than it says")
    name = element[4].decode()
    top = name if top is None else top
    repeated = repeated or element.get(3) == _REPEATED
    count = element.get(5, 0)
    if not count:
        leaves.append(_Leaf(top, repeated))
        return Field(name, element.get(1) == _BYTE_ARRAY and 6 not in element and 10 not in element, ())
    parts = [_field(rest, leaves, top, repeated, deep + 1).name for _ in range(count)]
    return Field(name, False, () if repeated else tuple(parts))


def _group(described: dict[int, Any], number: int, leaves: list[_Leaf], end: int) -> Group:
    rows = described[3]
    columns = described[1]
    if not 0 <= rows <= _MOST_ROWS or len(columns) != len(leaves):
        raise ValueError(f"row group {number} has {rows} rows and {len(columns)} columns of {len(leaves)}")
    chunks = []
    size = 0
    for column, leaf in zip(columns, leaves, strict=True):
        where = f"column {leaf.column!r} of row group {number}"
        if 1 in column:
            raise ValueError(f"{where} lies in another file")
        if 3 not in column:
            raise ValueError(f"{where} is encrypted, which is not read")
        described_column = column[3]
        values, raw, stored = (described_column[key] for key in (5, 6, 7))
        start, dictionary = described_column[9], described_column.get(11, 0)
        start = dictionary if 0 < dictionary < start else start
        if rows and not (len(MAGIC) <= start <= start + stored <= end):
            raise ValueError(f"{where} lies outside the file: bytes {start} to {start + stored}")
        if not (values == rows or (leaf.repeated and rows <= values <= _MOST_ROWS)):
            raise ValueError(f"{where} has {values} values for {rows} rows")
        if not 0 <= raw <= MOST:
            raise ValueError(f"{where} decompresses to {raw} bytes, more than {MOST}")
        size += raw
        chunks.append(Chunk(leaf.column, start, start + stored))
    return Group(rows, min((chunk.start for chunk in chunks), default=0), size, tuple(chunks))
