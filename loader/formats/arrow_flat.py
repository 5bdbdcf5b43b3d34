"""Columns of Arrow memory that do not hold other columns: numbers, times, text and bytes, as :class:`Cells`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .arrow_memory import bits, memory, numbers

Get: TypeAlias = Callable[[int], Any]
Rows: TypeAlias = npt.NDArray[np.int64]
Many: TypeAlias = Callable[[Rows], "list[Any] | npt.NDArray[Any]"]
Span: TypeAlias = Callable[[int, int], "list[Any] | npt.NDArray[Any]"]

_INLINE = 12
"""Bytes of a value that fits its view."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A column. ``array``: all values as one array whose first axis is the row, where none is null and all are alike.

    ``mutable``: whether values can be written into. ``stacked``: as ``array``, where values only happen to be alike.
    ``many``: as ``get``, for many rows at once, where that is quicker: a list, or an array of objects. ``span``: the
    same of neighbours, from one row to before another.
    """

    get: Get
    array: npt.NDArray[Any] | None = None
    mutable: bool = False
    stacked: npt.NDArray[Any] | None = None
    many: Many | None = None
    span: Span | None = None


def array_cells(column: Any, values: npt.NDArray[Any], *, mutable: bool = False) -> Cells:
    """Cells that are the items of an array."""
    valid = validity(column)
    if valid is None:
        return Cells(values.__getitem__, values, mutable)
    many = some_null(lambda rows: list(values[rows]), valid)
    return Cells(lambda i: values[i] if valid[i] else None, None, mutable, None, many)


def flat_values(column: Any) -> npt.NDArray[Any] | None:
    """All values, those under nulls too, of a column of numbers or times; ``None`` for another."""
    import pyarrow as pa

    kind, types = column.type, pa.types
    number = _number_types().get(kind.id)
    if number is not None:
        return numbers(column.buffers()[1], number, column.offset, len(column))
    if types.is_timestamp(kind):
        stored = shown = np.dtype(f"M8[{kind.unit}]")
    elif types.is_duration(kind) or types.is_time64(kind):
        stored = shown = np.dtype(f"m8[{kind.unit}]")
    elif types.is_date64(kind):
        stored = shown = np.dtype("M8[ms]")
    elif types.is_date32(kind):
        stored, shown = np.dtype(np.int32), np.dtype("M8[D]")
    elif types.is_time32(kind):
        stored, shown = np.dtype(np.int32), np.dtype(f"m8[{kind.unit}]")
    else:
        return None
    return numbers(column.buffers()[1], stored, column.offset, len(column)).astype(shown, copy=False)


@cache
def _number_types() -> Mapping[int, np.dtype[Any]]:
    """What numpy calls Arrow's integers and floating-point numbers, by the type's number."""
    import pyarrow as pa

    names = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64")
    return {getattr(pa, name)().id: np.dtype(name) for name in names}


@cache
def flat_types() -> frozenset[int]:
    """The numbers of Arrow's types of numbers, texts and bytes whose cells share nothing and hold no others."""
    import pyarrow as pa

    others = (pa.bool_(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
    return frozenset((*_number_types(), *(kind.id for kind in others)))


@cache
def _bytes_types() -> Mapping[int, Any]:
    import pyarrow as pa

    return {pa.string().id: pa.binary(), pa.large_string().id: pa.large_binary()}


def bytes_of_texts(kind: Any) -> Any:
    """The type of bytes that texts of this type are stored as; ``None`` for what is no text of its own."""
    return _bytes_types().get(kind.id)


_WORTH_A_TAKE = 128
"""Texts, from which on a call of Arrow's library costs less than cutting them one by one."""


def text_cells(column: Any) -> Cells:
    import pyarrow as pa

    at = offsets_of(column, pa.types.is_large_string(column.type))
    chars = memory(column.buffers()[2]).data
    valid = validity(column)
    span, many = _texts(column, some_null(lambda rows: [str(chars[a:b], "utf-8") for a, b in both(rows)], valid))
    both = spans(at)
    if valid is None:
        return Cells(lambda i: str(chars[at[i] : at[i + 1]], "utf-8"), many=many, span=span)
    return Cells(lambda i: str(chars[at[i] : at[i + 1]], "utf-8") if valid[i] else None, many=many, span=span)


def _texts(column: Any, one_by_one: Many) -> tuple[Span, Many]:
    """Many texts, made by Arrow's library; where one is no UTF-8, as ``one_by_one`` has it (which raises)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    take = pc.get_function("array_take")

    def span(first: int, end: int) -> list[Any] | npt.NDArray[Any]:
        try:
            values: npt.NDArray[Any] = column.slice(first, end - first).to_numpy(zero_copy_only=False)
        except (UnicodeDecodeError, pa.ArrowException):
            return one_by_one(np.arange(first, end))
        return values

    def many(rows: Rows) -> list[Any] | npt.NDArray[Any]:
        if len(rows) < _WORTH_A_TAKE:
            return one_by_one(rows)
        try:
            values: npt.NDArray[Any] = take.call([column, pa.array(rows)]).to_numpy(zero_copy_only=False)
        except (UnicodeDecodeError, pa.ArrowException):
            return one_by_one(rows)
        return values

    return span, many


def binary_cells(column: Any) -> Cells:
    import pyarrow as pa

    at = offsets_of(column, pa.types.is_large_binary(column.type))
    payload = memory(column.buffers()[2])
    valid = validity(column)
    both = spans(at)
    many = some_null(lambda rows: [payload[a:b] for a, b in both(rows)], valid)
    if valid is None:
        return Cells(lambda i: payload[at[i] : at[i + 1]], None, True, None, many)
    return Cells(lambda i: payload[at[i] : at[i + 1]] if valid[i] else None, None, True, None, many)


def view_cells(column: Any, *, text: bool) -> Cells:
    """Cells of views: 16 bytes each that hold a short value themselves, or say where a longer one lies.

    Each is cut when it is asked for, since all of them may be the same megabyte.
    """
    _, described, *rest = column.buffers()
    views = numbers(described, np.dtype("V16"), column.offset, len(column))
    places = views.view(np.int32).reshape(-1, 4).data
    inline = views.view(np.uint8).reshape(-1, 16)
    buffers = [memory(buffer) for buffer in rest]

    def get(i: int) -> Any:
        size = places[i, 0]
        if size <= _INLINE:
            value = inline[i, 4 : 4 + size]
        else:
            first = places[i, 3]
            value = buffers[places[i, 2]][first : first + size]
        return str(value.data, "utf-8") if text else value.copy()

    return nullable(column, get, mutable=not text)


def nullable(column: Any, get: Get, *, mutable: bool) -> Cells:
    valid = validity(column)
    return Cells(get if valid is None else lambda i: get(i) if valid[i] else None, None, mutable)


def some_null(many: Many, valid: bytes | None) -> Many:
    """``many`` with ``None`` where a row is null."""
    if valid is None:
        return many
    holds = np.frombuffer(valid, np.bool_)

    def checked(rows: Rows) -> list[Any] | npt.NDArray[Any]:
        values = many(rows)
        for at in np.flatnonzero(~holds[rows]).tolist():
            values[at] = None
        return values

    return checked


def validity(column: Any) -> bytes | None:
    """One byte a row, 0 where it is null; ``None`` where none is."""
    if column.null_count == 0:
        return None
    return bits(column.buffers()[0], column.offset, len(column)).tobytes()


def offsets_of(column: Any, large: bool) -> memoryview:
    dtype = np.dtype(np.int64 if large else np.int32)
    return numbers(column.buffers()[1], dtype, column.offset, len(column) + 1 if len(column) else 0).data


def spans(at: memoryview) -> Callable[[Rows], Iterator[tuple[int, int]]]:
    """Many rows' first and last offsets."""
    offsets = np.asarray(at)
    return lambda rows: zip(offsets[rows].tolist(), offsets[rows + 1].tolist(), strict=True)
