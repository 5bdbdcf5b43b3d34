"""The serializers of LitData: how one value (a leaf of an item) lies in its bytes.

Learned from litdata 0.2.76 and from files that it wrote.

=========================  ====================================================================================
``str``, ``text``          UTF-8
``int``, ``float``         int64 and float64, little-endian: ``int`` and ``float``
``bool``                   one byte
``bytes``                  as they are: a ``uint8`` view
``numpy``                  dtype's number, axes, shape (uint32 each, little-endian), values: an array view
``tensor``                 the same with a big-endian head and torch's numbers: an array view
``no_header_numpy:n``      values of the dtype with this number: a one-dimensional array view
``no_header_tensor:n``     the same with torch's numbers
``json``                   see :mod:`.litdata_nested`
``jpeg``, ``image:x``      the encoded image: a ``uint8`` view, kind ``jpg`` or ``x`` for decoding
``pil``                    as in MDS: a ``uint8`` view, kind ``pil``
``jpeg_array``             a list of ``uint8`` views, each an encoded image
``tifffile``, ``tiff``     the file: a ``uint8`` view, kind ``tiff``
``video:x``, ``audio:x``   the file: a ``uint8`` view (``file:x``, ``mesh:x``, ``nifti:x``, ``pdf``, ``graph`` likewise)
``pickle``                 any object: refused unless it is allowed, since unpickling runs code that the file chooses
=========================  ====================================================================================
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .abc import Bytes
from .litdata_nested import parse_nested
from .mds_columns import runs, unpickled

# fmt: off
_NUMPY = (
    "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128", "bool",
)
_TORCH = (
    "float32", "float32", "float64", "float64", "complex64", "complex64", "complex128", "complex128",
    "float16", "float16", "", "uint8", "int8", "int16", "int16", "int32", "int32", "int64", "int64", "bool", "uint16",
)
# fmt: on
_MOST_AXES = 32
_FILES = ("video", "audio", "file", "mesh", "nifti", "pdf", "graph")


@dataclass(frozen=True, slots=True)
class Leaf:
    """``decode`` raises ``ValueError`` for bytes that are no such value. ``kind`` as in :meth:`Format.kind`."""

    decode: Callable[[Bytes], Any]
    kind: str = ""


class RefusedLeaf(ValueError):
    """A leaf that is unknown, or not to be read, and why."""


def make_leaf(serializer: str, allow_pickle: bool) -> Leaf:
    """What an index's ``data_format`` names. Of one that is unknown or refused, ``decode`` raises ``RefusedLeaf``."""
    try:
        return _leaf(serializer, allow_pickle)
    except ValueError as e:
        return Leaf(_refuse(str(e)))


def _refuse(why: str) -> Callable[[Bytes], Any]:
    def decode(raw: Bytes) -> Any:
        raise RefusedLeaf(why)

    return decode


def _leaf(serializer: str, allow_pickle: bool) -> Leaf:
    base, _, rest = serializer.partition(":")
    if serializer in _PLAIN:
        return _PLAIN[serializer]
    if base in ("no_header_numpy", "no_header_tensor"):
        return Leaf(_values(dtype_of(serializer)))
    if base == "pickle" or serializer == "graph:pickle":
        if not allow_pickle:
            raise ValueError("holds pickles, which are refused: unpickling runs code that the file chooses")
        return Leaf(unpickled)
    if base == "image":
        return Leaf(_identity, rest or "jpg")
    if base in _FILES:
        return Leaf(_identity)
    raise ValueError(f"has the serializer {serializer!r}, which is not known")


def dtype_of(serializer: str) -> np.dtype[Any]:
    """The dtype that ``no_header_numpy:n`` or ``no_header_tensor:n`` names. ``ValueError``: none that is known."""
    base, _, number = serializer.partition(":")
    table = {"no_header_numpy": _NUMPY, "no_header_tensor": _TORCH}.get(base)
    if table is None or not (number.isascii() and number.isdigit()):
        raise ValueError(f"has the serializer {serializer!r}, which names no dtype")
    return _dtype(table, int(number))


def _dtype(table: tuple[str, ...], number: int) -> np.dtype[Any]:
    if number >= len(table) or not table[number]:
        raise ValueError(f"the dtype with the number {number} is not read")
    return np.dtype(table[number]).newbyteorder("<")


def _values(dtype: np.dtype[Any]) -> Callable[[Bytes], Any]:
    def decode(raw: Bytes) -> Any:
        if len(raw) % dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes are no whole number of {dtype} values")
        return raw.view(dtype)

    return decode


def _array(table: tuple[str, ...], order: str) -> Callable[[Bytes], Any]:
    def decode(raw: Bytes) -> Any:
        if len(raw) < 8:
            raise ValueError("the array's head is cut off")
        number, axes = struct.unpack_from(f"{order}2I", raw.data)
        begin = 8 + 4 * axes
        if axes > _MOST_AXES or begin > len(raw):
            raise ValueError(f"an array of {axes} axes does not fit into {len(raw)} bytes")
        dtype = _dtype(table, number)
        shape = struct.unpack_from(f"{order}{axes}I", raw.data, 8)
        if math.prod(shape) * dtype.itemsize != len(raw) - begin:
            raise ValueError(f"an array of shape {shape} and dtype {dtype} does not have {len(raw) - begin} bytes")
        return raw[begin:].view(dtype).reshape(shape)

    return decode


def _number(layout: str) -> Callable[[Bytes], Any]:
    number = struct.Struct(layout)

    def decode(raw: Bytes) -> Any:
        if len(raw) != number.size:
            raise ValueError(f"a number of {number.size} bytes has {len(raw)}")
        return number.unpack_from(raw.data)[0]

    return decode


def _identity(raw: Bytes) -> Bytes:
    return raw


def _text(raw: Bytes) -> str:
    return str(raw.data, "utf-8")


def _nested(raw: Bytes) -> Any:
    return parse_nested(raw.tobytes())


_PLAIN: dict[str, Leaf] = {
    "str": Leaf(_text),
    "text": Leaf(_text),
    "int": Leaf(_number("<q")),
    "float": Leaf(_number("<d")),
    "bool": Leaf(_number("<?")),
    "bytes": Leaf(_identity),
    "numpy": Leaf(_array(_NUMPY, "<")),
    "tensor": Leaf(_array(_TORCH, ">")),
    "json": Leaf(_nested),
    "jpeg": Leaf(_identity, "jpg"),
    "pil": Leaf(_identity, "pil"),
    "tifffile": Leaf(_identity, "tiff"),
    "tiff": Leaf(_identity, "tiff"),
    "jpeg_array": Leaf(runs),
}
