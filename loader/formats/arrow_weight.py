"""Values that take no bytes of their own: how many of them a column may hold.

A list says how long it is, and where its items are nulls, empty structs or runs of one value, nothing in the file is as
long as that. A few hundred bytes would else be lists of billions of items, each an object once it is read. And values
that many cells share (of a dictionary, a list view) may hold such cells themselves, so that each level multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .arrow_flat import flat_types
from .arrow_memory import numbers
from .packed import MOST

Sizes: TypeAlias = npt.NDArray[np.float64]
_MOST_OF_NOTHING = 1 << 20
_RUN = 64
"""Values that a run stands for on average, however many there are."""


def check_weight(column: Any) -> None:
    """Raise ``ValueError`` where a ``pyarrow.Array`` that has been validated holds more of them than it has rows, and
    more than a million; or where one cell is more than a shard may decompress to."""
    if column.type.id in flat_types():
        return
    _check(column, max(len(column), _MOST_OF_NOTHING))
    inner = list(_children(column))
    if any(map(_shares, inner)) or (
        _shares(column) and any(next(_children(child), None) is not None for child in inner)
    ):
        largest = _sizes(column).max(initial=0)
        if largest > MOST:
            raise ValueError(f"one value takes {largest:.3g} bytes, more than {MOST}")


def _shares(column: Any) -> bool:
    """Whether one value may be that of many cells, here or further inside."""
    import pyarrow as pa

    kind, types = column.type, pa.types
    return bool(
        types.is_dictionary(kind)
        or types.is_run_end_encoded(kind)
        or isinstance(column, pa.ListViewArray | pa.LargeListViewArray)
        or kind in (pa.string_view(), pa.binary_view())
        or (types.is_union(kind) and kind.mode == "dense")
        or any(map(_shares, _children(column)))
    )


def _sizes(column: Any) -> Sizes:
    """About the bytes that each cell takes when it is read."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, types = column.type, pa.types
    own: Sizes = np.full(len(column), 8.0)
    if isinstance(column, pa.ExtensionArray):
        return _sizes(column.storage)
    if types.is_dictionary(kind):
        shared = _sizes(column.dictionary)
        at = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        own += shared[at] if len(shared) else 0
        return own
    if types.is_run_end_encoded(kind):
        ends = column.run_ends.to_numpy(zero_copy_only=False).astype(np.int64)
        places = np.searchsorted(ends, column.offset + np.arange(len(column)), "right")
        own += _sizes(column.values)[places]
        return own
    if isinstance(column, pa.ListViewArray | pa.LargeListViewArray):
        first, count = (part.to_numpy(zero_copy_only=False) for part in (column.offsets, column.sizes))
        return own + _between(_sizes(column.values), first, first.astype(np.int64) + count)
    if types.is_fixed_size_list(kind):
        first = (np.arange(len(column)) + column.offset) * kind.list_size
        return own + _between(_sizes(column.values), first, first + kind.list_size)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        at = column.offsets.to_numpy(zero_copy_only=False)
        own += _between(_sizes(column.values), at[:-1], at[1:]) if len(column) else 0
        return own
    if types.is_struct(kind):
        return sum((_sizes(child) for child in _children(column)), own)
    if types.is_union(kind):
        return own + max(float(_sizes(child).max(initial=0)) for child in _children(column))
    if types.is_binary(kind) or types.is_large_binary(kind) or kind in (pa.string_view(), pa.binary_view()):
        viewed = kind in (pa.string_view(), pa.binary_view())
        own += _view_sizes(column) if viewed else pc.binary_length(column).fill_null(0).to_numpy()
    return own


def _view_sizes(column: Any) -> Any:
    described = numbers(column.buffers()[1], np.dtype("V16"), column.offset, len(column))
    return described.view(np.int32).reshape(-1, 4)[:, 0]


def _between(sizes: Sizes, first: Any, last: Any) -> Sizes:
    sums = np.concatenate([[0.0], np.cumsum(sizes)])
    found: Sizes = sums[last] - sums[first]
    return found


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
