"""``tf.train.Example`` messages read from their bytes, without TensorFlow and without a protobuf library.

The messages are those of ``tensorflow/core/example/example.proto`` and ``feature.proto``; the wire format is that of
the protobuf documentation ("Encoding"). An Example is a map from names to features; a feature is a list of byte
strings, of float32 or of int64 numbers. They become, under the feature's name:

==============  ====================================================================================
``float_list``  1-D ``float32`` array, a view of the record where it lies aligned there
``int64_list``  1-D ``int64`` array
``bytes_list``  ``list`` of ``uint8`` views of the record
==============  ====================================================================================

Always a list or an array, however many values it has: one value is a list of one, an empty list an empty one. A feature
without any list (no kind set) is absent, as it is for TensorFlow's own parser. Repeated and merged fields, numbers that
are not packed and unknown fields follow the protobuf rules; of a name that is there twice the last one counts.

On purpose different from protobuf: groups (unused since proto2) are refused, and so is a ``tf.train.SequenceExample``,
which protobuf would read as an Example that has lost its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .abc import Bytes
from .varint import LONGEST, WireError, varint

Value: TypeAlias = "npt.NDArray[np.float32] | npt.NDArray[np.int64] | list[Bytes]"

_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_BYTES, _FLOATS, _INTS = 1, 2, 3
_FEW = 24
"""Bytes; numbers that take fewer are read one by one, which is faster then."""


class _Field(NamedTuple):
    """One field as it lies in the message: its value is the bytes ``start .. end``, without their length."""

    number: int
    wire: int
    start: int
    end: int


def read_example(record: Bytes, wanted: frozenset[str] | None = None) -> dict[str, Value]:
    """The features, by name; with ``wanted`` only those. Raises :class:`WireError`."""
    raw = record.data
    out: dict[str, Value] = {}
    for number, wire, start, end in _fields(raw, 0, len(raw)):
        if wire != _SIZED:
            continue
        if number == 2:
            hint = "read the records as they are and decode them with decode={'record': f}"
            raise WireError("it looks like a tf.train.SequenceExample, which is not decoded", start, hint)
        if number == 1:
            for entry in _fields(raw, start, end):
                if entry.number == 1 and entry.wire == _SIZED:
                    _read_entry(record, raw, entry, wanted, out)
    return out


def _read_entry(
    record: Bytes, raw: memoryview, entry: _Field, wanted: frozenset[str] | None, out: dict[str, Value]
) -> None:
    name = ""
    features: list[tuple[int, int]] = []
    for number, wire, start, end in _fields(raw, entry.start, entry.end):
        if wire != _SIZED:
            continue
        if number == 1:
            try:
                name = str(raw[start:end], "utf-8")
            except UnicodeDecodeError:
                raise WireError("the name of a feature is no UTF-8", start) from None
        elif number == 2:
            features.append((start, end))
    if wanted is not None and name not in wanted:
        return
    value = _read_feature(record, raw, features)
    if value is None:
        out.pop(name, None)
    else:
        out[name] = value


def _read_feature(record: Bytes, raw: memoryview, parts: list[tuple[int, int]]) -> Value | None:
    kind = 0
    lists: list[tuple[int, int]] = []
    for first, last in parts:
        for number, wire, start, end in _fields(raw, first, last):
            if wire == _SIZED and number in (_BYTES, _FLOATS, _INTS):
                if number != kind:
                    kind = number
                    lists = []  # the kinds exclude each other: the last one stands
                lists.append((start, end))
    if not kind:
        return None
    values = [f for first, last in lists for f in _fields(raw, first, last) if f.number == 1]
    if kind == _BYTES:
        return [record[f.start : f.end] for f in values if f.wire == _SIZED]
    if kind == _FLOATS:
        return _floats(record, [f for f in values if f.wire in (_SIZED, _FIXED32)])
    return _ints(record, [f for f in values if f.wire in (_SIZED, _VARINT)])


def _floats(record: Bytes, values: list[_Field]) -> npt.NDArray[np.float32]:
    for value in values:
        if (value.end - value.start) % 4:
            raise WireError("a list of floats whose size is no multiple of 4", value.start)
    numbers: npt.NDArray[np.float32] = _joined(record, values).view("<f4")
    return numbers if numbers.flags.aligned else numbers.copy()


def _ints(record: Bytes, values: list[_Field]) -> npt.NDArray[np.int64]:
    raw = _joined(record, values)
    offset = values[0].start if values else 0
    if any(v.end > v.start and record[v.end - 1] >= 0x80 for v in values):
        raise WireError("a list of integers is damaged", offset)
    if len(raw) < _FEW:
        return np.array(_few(raw.tobytes(), offset), np.uint64).view(np.int64)
    ends = np.flatnonzero(raw < 0x80)
    if len(ends) == len(raw):
        return raw.astype(np.int64)
    starts = np.concatenate([[0], ends[:-1] + 1])
    sizes = ends - starts + 1
    if sizes.max() > LONGEST or (raw[ends[sizes == LONGEST]] > 1).any():
        raise WireError("a list of integers is damaged", offset)
    out = np.zeros(len(ends), np.uint64)
    for place in range(int(sizes.max())):
        has = np.flatnonzero(sizes > place)
        out[has] |= (raw[starts[has] + place] & 0x7F).astype(np.uint64) << np.uint64(7 * place)
    return out.view(np.int64)


def _few(raw: bytes, offset: int) -> list[int]:
    out = []
    at = 0
    while at < len(raw):
        try:
            value, at = varint(memoryview(raw), at, len(raw))
        except WireError as e:
            raise WireError("a list of integers is damaged", offset) from e
        out.append(value)
    return out


def _joined(record: Bytes, values: list[_Field]) -> npt.NDArray[Any]:
    if len(values) == 1:
        return record[values[0].start : values[0].end]
    return np.concatenate([record[:0], *(record[f.start : f.end] for f in values)])


def _fields(raw: memoryview, at: int, end: int) -> Iterator[_Field]:
    """The fields of the message in ``raw[at:end]``. Raises :class:`WireError` where one does not fit into it."""
    while at < end:
        begin = at
        tag = raw[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = varint(raw, at, end)
        wire = tag & 7
        if not 8 <= tag < 1 << 32:
            raise WireError("no field has this number", begin)
        size = 0
        if wire == _SIZED:
            size, at = varint(raw, at, end)
        elif wire == _VARINT:
            size = varint(raw, at, end)[1] - at
        elif wire == _FIXED32:
            size = 4
        elif wire == _FIXED64:
            size = 8
        else:
            raise WireError("a field of unknown type" if wire > _FIXED32 else "a group, which is not read", begin)
        if size > end - at:
            raise WireError(f"a field of {size} bytes where {end - at} are left", begin)
        yield _Field(tag >> 3, wire, at, at + size)
        at += size
