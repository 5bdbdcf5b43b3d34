"""A Parquet file's footer: its row groups and columns, checked against the file and against each other.

Arrow's library parses the footer. What it then believes is checked here, because memory is allocated by it: where the
columns' bytes lie, how many values they hold, and what they decompress to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cachefs.errors import FormatError

from .abc import Bytes, Ready
from .arrow_schema import image_columns
from .packed import MOST

MAGIC = b"PAR1"
_TAIL = 64 << 10
_MOST_ROWS = 1 << 31


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
    """What is read of a footer. ``metadata``: pyarrow's; ``names``: of the fields, in order."""

    metadata: Any
    names: tuple[str, ...]
    images: frozenset[str]
    groups: tuple[Group, ...]


def read_footer(data: Bytes, url: str, ready: Ready) -> Footer:
    """The footer of a mapped file, of which only these last bytes are asked for. Raises ``FormatError``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

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
        metadata = pq.read_metadata(pa.BufferReader(pa.py_buffer(data)))
        schema = metadata.schema.to_arrow_schema()
        names = tuple(schema.names)
        groups = tuple(_groups(metadata, schema, start))
        images = image_columns(schema)
    # pyarrow raises OSError for what is no footer, its own errors and ValueError for what is no schema
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError, MemoryError) as e:
        raise FormatError(f"the footer is damaged: {e}", url=url, offset=start) from e
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"two columns are called {twice!r}", url=url, offset=start)
    return Footer(metadata, names, images, groups)


def _groups(metadata: Any, schema: Any, end: int) -> list[Group]:
    """Raises ``ValueError`` for a footer that contradicts itself or the file."""
    owners = [(field.name, _nested(field.type)) for field in schema for _ in range(_leaves(field.type))]
    if len(owners) != metadata.num_columns:
        raise ValueError(f"{metadata.num_columns} columns where the schema has {len(owners)}")
    groups = [_group(metadata.row_group(number), number, owners, end) for number in range(metadata.num_row_groups)]
    total = sum(group.rows for group in groups)
    if total != metadata.num_rows:
        raise ValueError(f"{metadata.num_rows} rows, but {total} in the row groups")
    return groups


def _group(described: Any, number: int, owners: list[tuple[str, bool]], end: int) -> Group:
    rows = described.num_rows
    if not 0 <= rows <= _MOST_ROWS or described.num_columns != len(owners):
        raise ValueError(f"row group {number} of {rows} rows and {described.num_columns} columns")
    chunks = []
    size = 0
    for k, (name, nested) in enumerate(owners):
        column = described.column(k)
        start = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            start = min(start, column.dictionary_page_offset) if column.dictionary_page_offset > 0 else start
        stop = start + column.total_compressed_size
        where = f"column {column.path_in_schema!r} of row group {number}"
        if rows and not (len(MAGIC) <= start <= stop <= end):
            raise ValueError(f"{where} lies outside the file: bytes {start} to {stop}")
        if column.num_values != rows and (not nested or column.num_values < rows):
            raise ValueError(f"{where} has {column.num_values} values for {rows} rows")
        if column.num_values > _MOST_ROWS or not 0 <= column.total_uncompressed_size <= MOST:
            raise ValueError(f"{where} declares {column.num_values} values in {column.total_uncompressed_size} bytes")
        size += column.total_uncompressed_size
        chunks.append(Chunk(name, start, stop))
    return Group(rows, min((chunk.start for chunk in chunks), default=0), size, tuple(chunks))


def _leaves(kind: Any) -> int:
    """How many columns of the file one field is stored as."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _leaves(kind.value_type)
    return sum(_leaves(kind.field(k).type) for k in range(kind.num_fields)) if kind.num_fields else 1


def _nested(kind: Any) -> bool:
    """Whether a field's columns may hold more values than there are rows."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return _nested(kind.storage_type)
    return bool(kind.num_fields)
