"""One column of Arrow memory as a cheap function from a row's number to its value.

pyarrow makes an object for each cell that it is asked for; here a column is looked at once, and a cell is then an index
into a numpy array, a slice of the values' memory, or a ``str`` of one. Every access is bounded by numpy, whatever the
offsets say.

What values become: numbers and booleans numpy scalars of the column's type; times ``numpy.datetime64`` and
``timedelta64`` in the column's unit (UTC where it has a zone); binary a 1-D ``uint8`` view, fixed-size binary too; text
``str``; lists of numbers a 1-D view, or, where one of its items is null, a list; other lists lists; structs ``dict``;
maps lists of pairs; decimals ``Decimal``; null ``None``. Values that several cells may share (of a dictionary, a run, a
union, a list view, a view of bytes) are copies where they can be written into.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from .arrow_flat import (
    Cells,
    Get,
    array_cells,
    binary_cells,
    flat_values,
    nullable,
    offsets_of,
    some_null,
    spans,
    text_cells,
    validity,
    view_cells,
)
from .arrow_memory import bits, memory, numbers

_TABLE_MOST = 1 << 16


def cells_of(column: Any) -> Cells:
    """The cells of a ``pyarrow.Array`` that has been validated in full. Raises ``ValueError`` for a type without."""
    import pyarrow as pa

    kind = column.type
    types = pa.types
    if isinstance(column, pa.ExtensionArray):
        return _extension(column)
    flat = flat_values(column)
    if flat is not None:
        return array_cells(column, flat)
    if types.is_boolean(kind):
        return array_cells(column, bits(column.buffers()[1], column.offset, len(column)).view(np.bool_))
    if types.is_null(kind):
        return Cells(lambda i: None)
    if types.is_string(kind) or types.is_large_string(kind):
        return text_cells(column)
    if types.is_binary(kind) or types.is_large_binary(kind):
        return binary_cells(column)
    if types.is_fixed_size_binary(kind):
        width = kind.byte_width
        flat = memory(column.buffers()[1])[column.offset * width :][: len(column) * width]
        return array_cells(column, flat.reshape(len(column), width), mutable=True)
    if types.is_dictionary(kind):
        return _dictionary(column)
    if types.is_struct(kind):
        return _struct(column)
    if types.is_map(kind):
        return _map(column)
    if types.is_list(kind) or types.is_large_list(kind):
        return _list(column)
    if types.is_fixed_size_list(kind):
        return _fixed_list(column)
    return _rare(column)


def _rare(column: Any) -> Cells:
    import pyarrow as pa

    kind = column.type
    types = pa.types
    if types.is_decimal(kind) or types.is_interval(kind):
        return Cells(lambda i: column[i].as_py())  # of fixed width: nothing in memory says where to read
    if kind in (pa.string_view(), pa.binary_view()):
        return view_cells(column, text=kind == pa.string_view())
    if isinstance(column, pa.ListViewArray | pa.LargeListViewArray):
        return _list_view(column)
    if types.is_union(kind):
        return _union(column)
    if types.is_run_end_encoded(kind):
        ends = column.run_ends.to_numpy(zero_copy_only=False).astype(np.int64)
        get = _unshared(cells_of(column.values))
        base = column.offset
        return Cells(lambda i: get(int(np.searchsorted(ends, base + i, "right"))), mutable=True)
    raise ValueError(f"values of the type {kind} are not read")


def _dictionary(column: Any) -> Cells:
    values = cells_of(column.dictionary)
    at = numbers(column.buffers()[1], np.dtype(column.type.index_type.to_pandas_dtype()), column.offset, len(column))
    place = at.data
    if not values.mutable and len(column.dictionary) <= _TABLE_MOST:
        table = [values.get(i) for i in range(len(column.dictionary))]
        whole = values.array[at] if values.array is not None and column.null_count == 0 else None
        valid = validity(column)
        if valid is None:
            return Cells(lambda i: table[place[i]], whole)
        return Cells(lambda i: table[place[i]] if valid[i] else None)
    get = _unshared(values)
    return nullable(column, lambda i: get(place[i]), mutable=values.mutable)


def _struct(column: Any) -> Cells:
    parts = [(column.type.field(k).name, cells_of(column.field(k))) for k in range(column.type.num_fields)]
    gets = [(name, part.get) for name, part in parts]
    return nullable(column, lambda i: {name: get(i) for name, get in gets}, mutable=True)


def _list(column: Any) -> Cells:
    import pyarrow as pa

    at = offsets_of(column, pa.types.is_large_list(column.type))
    values = cells_of(column.values)
    run = _run(column.values, values)
    both = spans(at)
    many = some_null(lambda rows: [run(a, b) for a, b in both(rows)], validity(column))
    cells = replace(nullable(column, lambda i: run(at[i], at[i + 1]), mutable=True), many=many)
    if values.array is None or column.null_count or not len(column):
        return cells
    size = at[1] - at[0]
    if not (np.diff(np.asarray(at)) == size).all():
        return cells
    rows = values.array[at[0] : at[0] + size * len(column)]
    return replace(cells, stacked=rows.reshape(len(column), size, *rows.shape[1:]))


def _list_view(column: Any) -> Cells:
    first, count = (part.to_numpy(zero_copy_only=False).tolist() for part in (column.offsets, column.sizes))
    run = _run(column.values, cells_of(column.values), shared=True)
    return nullable(column, lambda i: run(first[i], first[i] + count[i]), mutable=True)


def _run(child: Any, values: Cells, *, shared: bool = False) -> Callable[[int, int], Any]:
    """Neighbouring values of a list's child as one array where they are numbers and none is null, else as a list."""
    get = _unshared(values) if shared else values.get
    whole = values.array
    if whole is not None:
        return (lambda a, b: whole[a:b].copy()) if shared else (lambda a, b: whole[a:b])
    flat = flat_values(child)
    if flat is not None:
        valid = bits(child.buffers()[0], child.offset, len(child)).tobytes()

        def some(a: int, b: int) -> Any:
            if 0 in valid[a:b]:
                return [get(j) for j in range(a, b)]
            return flat[a:b].copy() if shared else flat[a:b]

        return some
    return lambda a, b: [get(j) for j in range(a, b)]


def _fixed_list(column: Any) -> Cells:
    size, base = column.type.list_size, column.offset
    child = column.values
    values = cells_of(child)
    if values.array is not None:
        rows = values.array[base * size : (base + len(column)) * size]
        return array_cells(column, rows.reshape(len(column), size, *rows.shape[1:]), mutable=True)
    run = _run(child, values)
    return nullable(column, lambda i: run((base + i) * size, (base + i + 1) * size), mutable=True)


def _map(column: Any) -> Cells:
    at = offsets_of(column, large=False)
    keys, items = cells_of(column.keys).get, cells_of(column.items).get
    return nullable(column, lambda i: [(keys(j), items(j)) for j in range(at[i], at[i + 1])], mutable=True)


def _union(column: Any) -> Cells:
    kind = column.type
    codes = column.type_codes.to_numpy().tolist()
    parts = {code: _unshared(cells_of(column.field(k))) for k, code in enumerate(kind.type_codes)}
    if kind.mode == "dense":
        at = column.offsets.to_numpy().tolist()
        return Cells(lambda i: parts[codes[i]](at[i]), mutable=True)
    return Cells(lambda i: parts[codes[i]](i), mutable=True)


def _extension(column: Any) -> Cells:
    """The storage; a fixed-shape tensor as an array of its shape."""
    import pyarrow as pa

    cells = cells_of(column.storage)
    if not isinstance(column.type, pa.FixedShapeTensorType):
        return cells
    shape, order = tuple(column.type.shape), column.type.permutation
    if cells.array is not None:
        rows = cells.array.reshape(len(column), *shape)
        return array_cells(column, rows if order is None else rows.transpose(0, *(k + 1 for k in order)), mutable=True)
    get = cells.get

    def tensor(i: int) -> Any:
        value = get(i)
        if not isinstance(value, np.ndarray):
            return value
        whole = value.reshape(shape)
        return whole if order is None else whole.transpose(order)

    return Cells(tensor, mutable=True)


def _unshared(cells: Cells) -> Get:
    """Values that no other cell shares memory with."""
    get = cells.get
    return (lambda i: _copied(get(i))) if cells.mutable else get


def _copied(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_copied(item) for item in value)
    return {name: _copied(item) for name, item in value.items()} if isinstance(value, dict) else value
