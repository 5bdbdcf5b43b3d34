"""What an Arrow expression consists of: the fields that it reads, its values, and a digest that tells it from others.

Arrow's library has no public way to look into an expression, but writes one down to send it elsewhere (pickling does):
as a file in its IPC format whose schema's metadata is the tree, in order (``call``, ``field_ref``, ``literal``, ...,
and ``end`` of each call), and whose only row holds the values and options that the tree names by the column's number.
Its text serves people alone: it tells neither types nor where a value ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from cachefs.errors import ConfigError
from cachefs.hashing import name_digest

from .arrow_messages import Table

Expression: TypeAlias = Any
"""``pyarrow.compute.Expression``; its library is not imported for its name."""

_MAGIC_BYTES = 8
_PREFIX_BYTES = 8
_HEADER, _METADATA, _KEY, _VALUE = 2, 2, 0, 1  # slots of the flatbuffers Message, Schema and KeyValue
_COMPARISONS = ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "is_in", "is_null", "is_valid")
_COMPARED = frozenset((*_COMPARISONS, "invert", "and", "or", "and_kleene", "or_kleene"))


class Parts(NamedTuple):
    """``fields``: the names of those it reads, of nested ones the outermost; ``digest``: of the tree, with the types
    and values in it; ``comparable``: whether it does nothing but compare fields with values, none of which is a NaN, so
    that what it gives for many values follows from the least and the greatest."""

    fields: tuple[str, ...]
    digest: str
    comparable: bool


def is_expression(value: Any) -> bool:
    """Whether this is an expression of Arrow's, without importing its library."""
    kind = type(value)
    return kind.__name__ == "Expression" and kind.__module__.partition(".")[0] == "pyarrow"


def listed(filters: list[Any]) -> Expression:
    """The expression that a list of tuples (name, operator, value), or a list of such lists, stands for. Raises
    ``ConfigError`` for any other."""
    import pyarrow as pa
    from pyarrow.parquet import filters_to_expression

    try:
        return filters_to_expression(filters)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError, TypeError, IndexError) as e:
        raise ConfigError(
            f"where={filters!r} is no filter: {e}", hint="where=[('name', '==', value)], or pc.field('name') == value"
        ) from e


def parts_of(expression: Expression) -> Parts:
    """What the expression consists of. Raises ``ConfigError`` for one that Arrow cannot write down, as one that names a
    field by its number."""
    import pyarrow as pa

    try:
        written: pa.Buffer = expression.__reduce__()[1][0]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        text = " ".join(str(expression).split())
        if "FieldPath(" in text or "field_ref" in str(e):
            raise ConfigError(f"where={text} names a field by its number", hint="name it: pc.field('name')") from e
        raise ConfigError(
            f"where={text} cannot be written down: {e}", hint="use a function: loader.Where(function, fields=[...])"
        ) from e
    with pa.ipc.open_file(written) as file:
        values = file.get_batch(0).columns if file.num_record_batches else []
    fields: dict[str, None] = {}
    tree: list[Any] = []
    comparable = True
    depth = left = 0  # of a nested field, how many names it has, and how many of them follow
    for key, value in _metadata(written):
        if key == "nested_field_ref":
            depth = left = int(value)
        elif key == "field_ref":
            if left in (0, depth):
                fields[value] = None
            left = max(left - 1, 0)
        if key in ("literal", "options"):
            column = values[int(value)]
            plain = list(_plain(column))
            comparable &= not any(isinstance(part, float) and math.isnan(part) for part in plain)
            tree.append((key, str(column.type), plain))
        else:
            comparable &= key != "call" or value in _COMPARED
            tree.append((key, value))
    return Parts(tuple(fields), name_digest(repr(tree)), comparable)


def _metadata(written: Any) -> Iterator[tuple[str, str]]:
    """The metadata of the file's schema, in order; the library's own view of it leaves out what has the same key."""
    message = memoryview(written)[_MAGIC_BYTES:]
    size = int.from_bytes(message[4:_PREFIX_BYTES], "little")
    schema = Table.root(message[_PREFIX_BYTES : _PREFIX_BYTES + size]).table(_HEADER)
    for pair in [] if schema is None else schema.tables(_METADATA):
        yield pair.raw(_KEY).decode(), pair.raw(_VALUE).decode("utf-8", "surrogateescape")


def _plain(column: Any) -> Iterator[Any]:
    """The values of a column, flat, with the lengths of what is nested: numbers, texts and bytes. Times are numbers,
    those that Python's do not hold as well."""
    import pyarrow as pa
    from pyarrow import types

    kind = column.type
    if isinstance(column, pa.ExtensionArray):
        column, kind = column.storage, column.storage.type
    if types.is_dictionary(kind):
        column, kind = column.dictionary_decode(), kind.value_type
    yield column.is_valid().to_pylist()
    if types.is_struct(kind):
        for part, values in zip(kind, column.flatten(), strict=True):
            yield part.name
            yield from _plain(values)
    elif types.is_list(kind) or types.is_large_list(kind):
        yield column.value_lengths().to_pylist()
        yield from _plain(column.flatten())
    elif types.is_temporal(kind) and not types.is_interval(kind):
        yield from column.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    else:
        yield from column.to_pylist()
