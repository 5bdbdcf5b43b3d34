"""Values that take no bytes: how many of them a column may hold.

A list says how long it is, and where its items are nulls, empty structs or runs of one value, nothing in the file is as
long as that. A few hundred bytes would else be lists of billions of items, each an object once it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MOST_OF_NOTHING = 1 << 20
_RUN = 64
"""Values that a run stands for on average, however many there are."""


def check_weight(column: Any) -> None:
    """Raise ``ValueError`` where a ``pyarrow.Array`` that has been validated holds more of them than it has rows, and
    more than a million."""
    _check(column, max(len(column), _MOST_OF_NOTHING))


def _check(column: Any, most: int) -> None:
    for child in _children(column):
        if len(child) > most and _weightless(child, len(child)):
            raise ValueError(f"{len(child)} values of the type {child.type}, which take no bytes")
        _check(child, most)


def _weightless(column: Any, count: int) -> bool:
    import pyarrow as pa

    kind, types = column.type, pa.types
    if isinstance(column, pa.ExtensionArray):
        return _weightless(column.storage, count)
    if types.is_run_end_encoded(kind):
        return bool(count > _RUN * len(column.run_ends))
    return bool(
        types.is_null(kind)
        or (types.is_fixed_size_binary(kind) and kind.byte_width == 0)
        or (types.is_fixed_size_list(kind) and kind.list_size == 0)
        or (types.is_struct(kind) and kind.num_fields == 0)
    )


def _children(column: Any) -> Iterator[Any]:
    import pyarrow as pa

    kind, types = column.type, pa.types
    if isinstance(column, pa.ExtensionArray):
        yield column.storage
    elif types.is_struct(kind) or types.is_union(kind):
        for k in range(kind.num_fields):
            yield column.field(k)
    elif types.is_map(kind):
        yield column.keys
        yield column.items
    elif types.is_dictionary(kind):
        yield column.dictionary
    elif types.is_nested(kind) or types.is_run_end_encoded(kind):  # lists of all kinds
        yield column.values
