"""A Parquet file's footer: its row groups and columns, checked against the file and against each other.

It is read here and not by Arrow's library, which allocates by what a footer declares, and ends the process over some
damaged ones. What is checked: where the columns' bytes lie, how many values they hold, and what they decompress to.

A footer may describe hundreds of row groups, each with as many columns, where a part of the shard is one of them. So
:func:`read_footer` only notes where each row group is described; :func:`read_group` reads that of one, and
:func:`alone` makes the footer of a file that holds no other, for Arrow's library.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Bytes, Ready
from .arrow_schema import Field, image_fields
from .packed import MOST
from .thrift import Reader, Wanted

MAGIC = b"PAR1"
_TAIL = 64 << 10
_LARGEST = 256 << 20
_MOST_ROWS = 1 << 31
_MOST_GROUPS = 1 << 20
_MOST_COLUMNS = 1 << 18
_MOST_NOTES = 1 << 16
_DEEPEST = 64
_REMEMBERED = (32 << 10, 16 << 20)
"""Sizes of the footers that are remembered by their bytes: each part of a shard begins with the same one."""

_COLUMN: Wanted = {3: None, 4: None, 5: None, 6: None, 7: None, 9: None, 11: None}
_CHUNK: Wanted = {1: None, 3: _COLUMN}
_ELEMENT: Wanted = {1: None, 2: None, 3: None, 4: None, 5: None, 6: None, 10: {}}
_NOTE: Wanted = {1: None, 2: None}
"""The numbers of the fields that are read, as ``parquet.thrift`` gives them."""

_BYTE_ARRAY, _FIXED = 6, 7
_REPEATED = 2
_WIDEST = 32
"""Bytes of the widest number that Arrow makes of others: a decimal of 256 bits."""


class Leaf(NamedTuple):
    """A column of the file. ``column``: the field it belongs to; ``repeated``: whether it may have more values than
    rows; ``width``: the bytes that a value takes when it is decoded, 0 where each takes its own; ``path``: of names."""

    column: str
    repeated: bool
    width: int
    path: str


class Chunk(NamedTuple):
    """One column's pages in one row group: bytes ``start .. end``, which decompress to ``raw``."""

    start: int
    end: int
    raw: int
    values: int
    codec: int


class Footer(NamedTuple):
    """What is read of a footer. ``names``: of the fields, in order; ``images``: which of them are images; ``leaves``:
    the columns; ``counts``: the row groups' rows; ``spans``: the bytes of the file that describe them, ``(n, 2)``;
    ``place``: where the footer itself lies, and in it what :func:`alone` replaces."""

    names: tuple[str, ...]
    images: frozenset[str]
    leaves: tuple[Leaf, ...]
    counts: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64]
    place: Place


class Place(NamedTuple):
    """Bytes of the file: of the footer, and in it of the number of rows and of the list of row groups."""

    start: int
    end: int
    rows: tuple[int, int]
    groups: tuple[int, int]


def read_footer(data: Bytes, url: str, ready: Ready) -> Footer:
    """The footer of a mapped file, of which only these last bytes are asked for. Raises ``FormatError``."""
    size = len(data)
    ready(max(size - _TAIL, 0), size)
    tail = data[-8:].tobytes()
    if tail[4:] == b"PARE":
        raise FormatError("an encrypted Parquet file, which is not read", url=url, offset=0)
    if size < 12 or tail[4:] != MAGIC:
        raise FormatError("the footer of a Parquet file is missing: cut off or damaged", url=url, offset=size)
    length = int.from_bytes(tail[:4], "little")
    start = size - 8 - length
    if start < len(MAGIC) or length > _LARGEST:
        what = "longer than the file" if start < len(MAGIC) else f"of {length} bytes, more than {_LARGEST}"
        raise FormatError(f"a footer that is {what}", url=url, offset=size - 8)
    ready(start, size)
    with _telling("the footer", url, start):
        buffer = data[start : size - 8].tobytes()
        remembers = _REMEMBERED[0] <= length <= _REMEMBERED[1]
        return _parsed_once(buffer, start) if remembers else _parsed(buffer, start)


def read_group(data: Bytes, footer: Footer, number: int, url: str) -> npt.NDArray[np.int64]:
    """The columns of one row group, each as the numbers of a :class:`Chunk`. Raises ``FormatError``."""
    start, end = footer.spans[number].tolist()
    with _telling(f"row group {number} in the footer", url, start):
        return _chunks(data[start:end].tobytes(), int(footer.counts[number]), footer.leaves, footer.place.start)


def alone(data: Bytes, place: Place, span: tuple[int, int], rows: int) -> bytes:
    """A file's first and last bytes, with a footer as that of ``data`` whose only row group is the one described at
    ``span``."""
    groups = _ONE_STRUCT + data[span[0] : span[1]].tobytes()
    parts = []
    at = place.start
    for (first, last), new in sorted([(place.rows, _zigzag(rows)), (place.groups, groups)]):
        parts += [data[at:first].tobytes(), new]
        at = last
    footer = b"".join([*parts, data[at : place.end].tobytes()])
    return b"".join([MAGIC, footer, len(footer).to_bytes(4, "little"), MAGIC])


_ONE_STRUCT = b"\x1c"
"""How a list of one structure begins."""


def _zigzag(number: int) -> bytes:
    rest = 2 * number
    out = bytearray()
    while rest > 127:
        out.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*out, rest])


@contextmanager
def _telling(what: str, url: str, offset: int) -> Iterator[None]:
    """Whatever is wrong with what is read within is a ``FormatError``."""
    try:
        yield
    # what is missing is a KeyError, what is of another kind than it must be a TypeError, AttributeError or IndexError
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as e:
        why = f"{e} is missing" if isinstance(e, KeyError) else str(e)
        raise FormatError(f"{what} is damaged: {why}", url=url, offset=offset) from e


def _parsed(buffer: bytes, start: int) -> Footer:
    reader = Reader(buffer)
    document: dict[int, Any] = {}
    spans: list[tuple[int, int]] = []
    counts: list[int] = []
    at: dict[int, tuple[int, int]] = {}
    for number, kind in reader.fields():
        first = reader.at
        if number == 8:
            raise ValueError("it is encrypted, which is not read")
        if number in at:
            raise ValueError(f"it has its field {number} twice")
        if number == 2:
            document[2] = [reader.struct(_ELEMENT) for _ in range(reader.structs(kind, _MOST_COLUMNS))]
        elif number == 3:
            document[3] = reader.value(kind, None)
        elif number == 4:
            for _ in range(reader.structs(kind, _MOST_GROUPS)):
                begin = reader.at
                counts.append(_rows(reader, len(counts)))
                spans.append((begin, reader.at))
        elif number == 5:
            document[5] = [reader.struct(_NOTE) for _ in range(reader.structs(kind, _MOST_NOTES))]
        else:
            reader.skip(kind)
        at[number] = (start + first, start + reader.at)
    leaves: list[Leaf] = []
    fields = _fields(document[2], leaves)
    names = tuple(field.name for field in fields)
    if len(set(names)) < len(names):
        raise ValueError(f"two columns are called {next(name for name in names if names.count(name) > 1)!r}")
    if sum(counts) != document[3]:
        raise ValueError(f"{document[3]} rows, but {sum(counts)} in the row groups")
    notes = {item.get(1): item.get(2) for item in document.get(5, [])}
    return Footer(
        names,
        image_fields(fields, notes.get(b"huggingface")),
        tuple(leaves),
        _frozen(np.array(counts, dtype=np.int64)),
        _frozen(np.array(spans, dtype=np.int64).reshape(-1, 2) + start),
        Place(start, start + len(buffer), at[3], at[4]),
    )


def _frozen(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    numbers.flags.writeable = False  # parts share it
    return numbers


_parsed_once = lru_cache(maxsize=4)(_parsed)


def _rows(reader: Reader, number: int) -> int:
    """The rows of the row group that is described next."""
    rows = None
    for field, kind in reader.fields():
        if field == 1:
            reader.skip_structs(reader.structs(kind, _MOST_COLUMNS))
        elif field == 3:
            rows = reader.value(kind, None)
        else:
            reader.skip(kind)
    if not isinstance(rows, int) or not 0 <= rows <= _MOST_ROWS:
        raise ValueError(f"row group {number} has {rows} rows")
    return rows


def _fields(elements: list[dict[int, Any]], leaves: list[Leaf]) -> list[Field]:
    """The fields of the top level; their columns are added to ``leaves``."""
    rest = iter(elements)
    root = next(rest, None)
    if root is None:
        raise ValueError("a schema without a root")
    fields = [_field(rest, leaves, (), False) for _ in range(min(root.get(5, 0), len(elements)))]
    if next(rest, None) is not None or len(fields) != root.get(5, 0):
        raise ValueError("a schema of other size than its root says")
    return fields


def _field(rest: Iterator[dict[int, Any]], leaves: list[Leaf], above: tuple[str, ...], repeated: bool) -> Field:
    element = next(rest, None)
    if element is None or len(above) > _DEEPEST:
        raise ValueError("a schema of other size than it says")
    name = element[4].decode()
    path = (*above, name)
    repeated = repeated or element.get(3) == _REPEATED
    count = element.get(5, 0)
    if not count:
        leaves.append(Leaf(path[0], repeated, _width(element), ".".join(path)))
        return Field(name, element.get(1) == _BYTE_ARRAY and 6 not in element and 10 not in element, ())
    parts = [_field(rest, leaves, path, repeated).name for _ in range(count)]
    return Field(name, False, () if repeated else tuple(parts))


def _width(element: dict[int, Any]) -> int:
    kind = element[1]
    if kind == _BYTE_ARRAY:
        return 0
    return _WIDEST if kind != _FIXED else max(int(element[2]), _WIDEST)


def _chunks(buffer: bytes, rows: int, leaves: tuple[Leaf, ...], end: int) -> npt.NDArray[np.int64]:
    reader = Reader(buffer)
    chunks: list[Chunk] = []
    for number, kind in reader.fields():
        if number != 1:
            reader.skip(kind)
        elif chunks or reader.structs(kind, _MOST_COLUMNS) != len(leaves):
            raise ValueError(f"it has other columns than the {len(leaves)} of the schema")
        else:
            chunks = [_chunk(reader.struct(_CHUNK), leaf, rows, end) for leaf in leaves]
    if len(chunks) != len(leaves):
        raise ValueError("it has no columns")
    return np.array(chunks, dtype=np.int64).reshape(-1, len(Chunk._fields))


def _chunk(described: dict[int, Any], leaf: Leaf, rows: int, end: int) -> Chunk:
    where = f"column {leaf.column!r}"
    if 1 in described:
        raise ValueError(f"{where} lies in another file")
    if 3 not in described:
        raise ValueError(f"{where} is encrypted, which is not read")
    column = described[3]
    codec, values, raw, stored = (column[key] for key in (4, 5, 6, 7))
    start, dictionary = column[9], column.get(11, 0)
    start = dictionary if 0 < dictionary < start else start
    if rows and not (len(MAGIC) <= start <= start + stored <= end):
        raise ValueError(f"{where} lies outside the file: bytes {start} to {start + stored}")
    if not (values == rows or (leaf.repeated and rows <= values <= _MOST_ROWS)):
        raise ValueError(f"{where} has {values} values for {rows} rows")
    if not 0 <= raw <= MOST:
        raise ValueError(f"{where} decompresses to {raw} bytes, more than {MOST}")
    return Chunk(start, start + stored, raw, values, codec)
