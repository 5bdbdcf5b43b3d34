"""The column encodings of MDS, version 2: how one value lies in its bytes.

Learned from the format's documentation and from files that mosaicml-streaming wrote. All numbers are little-endian.

===================  ==========================================================================================
``bytes``            as they are: a ``uint8`` view
``str``              UTF-8
``int``              int64, returned as ``int``
``uint8 .. float64`` one number, returned as a numpy scalar of that type
``str_int``, ...     a number written as text (``str_float``, ``str_decimal`` likewise): ``int``, ``float``, ``Decimal``
``ndarray[:t[:s]]``  an array view; a dtype or shape that the encoding does not fix stands in front of the values
``json``             the parsed object
``jpeg``, ``png``    the encoded image: a ``uint8`` view, kind ``jpg`` or ``png`` for decoding
``pil``              width, height, length of the mode (uint32 each), mode, pixels: a ``uint8`` view, kind ``pil``
``jpeg_array``       a list of ``uint8`` views, each an encoded image
``list[jpeg]``, ...  the same behind four bytes without a meaning (``list[png]``, ``list[pil]`` likewise)
``pkl``              any object: refused unless it is allowed, since unpickling runs code that the file chooses
===================  ==========================================================================================
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .abc import Bytes

Decode = Callable[[Bytes], Any]
Int64s = npt.NDArray[np.int64]
_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "float32",
        "float64",
    )
}
DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""Of arrays, by the codes that stand before them."""
_KINDS = {"jpeg": "jpg", "png": "png", "pil": "pil"}
_LISTS = {"jpeg_array": 0, "jpegarray": 0, "list[jpeg]": 4, "list[png]": 4, "list[pil]": 4}
"""Where in a value the number of the list's elements stands."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, its fixed size in bytes (``None``: each value says), and what ``decode`` makes of a value.

    ``decode`` raises ``ValueError`` for bytes that are no such value. ``kind`` as in :meth:`Format.kind`. ``array``: of
    arrays, the dtype and shape that the encoding fixes.
    """

    name: str
    size: int | None
    decode: Decode
    kind: str = ""
    array: ArrayKind | None = None


class ArrayKind(NamedTuple):
    """``None``: each value says."""

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None

    def runs(self, data: Bytes, begins: Int64s, ends: Int64s) -> Runs | None:
        """Where the items lie of the values in the bytes ``begins .. ends``; ``None`` unless all have one axis and one
        dtype, as far as they are such values."""
        if self.shape is not None:
            return self._plain(begins, ends)
        dtype, heads = self.dtype, begins
        if dtype is None:
            kinds = np.unique(data[begins[begins < ends]])
            if len(kinds) != 1 or int(kinds[0]) not in DTYPES:
                return None
            dtype, heads = _SCALARS[DTYPES[int(kinds[0])]], begins + 1
        whole = heads < ends
        codes = data[np.where(whole, heads, 0)].astype(np.int64)
        if (codes[whole] >> 2 != 1).any():
            return None
        starts = heads + 1 + (1 << (codes & 3))
        items, over = np.divmod(ends - starts, dtype.itemsize)
        good = whole & (items >= 0) & (over == 0)
        for width in (1, 2, 4, 8):
            some = np.flatnonzero(good & (1 << (codes & 3) == width))
            declared = data[heads[some, None] + 1 + np.arange(width)].view(f"<u{width}")[:, 0]
            good[some] = declared == items[some].astype(np.uint64)
        return Runs(np.where(good, starts, 0), np.where(good, items, -1), dtype)

    def _plain(self, begins: Int64s, ends: Int64s) -> Runs | None:
        """Of values without a head of their own."""
        if self.dtype is None or self.shape is None or len(self.shape) != 1:
            return None
        sizes = np.full(len(begins), self.shape[0], np.int64)
        return Runs(begins, np.where(ends - begins == sizes * self.dtype.itemsize, sizes, -1), self.dtype)


class _Bytes(ArrayKind):
    """Values that are bytes, however many."""

    def runs(self, data: Bytes, begins: Int64s, ends: Int64s) -> Runs | None:
        return Runs(begins, ends - begins, np.dtype(np.uint8))


BYTES = _Bytes(np.dtype(np.uint8), None)


class Runs(NamedTuple):
    """Arrays of one axis: the first byte of each, how many items it has (-1: it is none), and what they are."""

    starts: Int64s
    lengths: Int64s
    dtype: np.dtype[Any]


def make_column(name: str, encoding: str, allow_pickle: bool = False) -> Column:
    """The column for an encoding as the shard's header writes it. ``ValueError``: unknown or refused, in words."""
    base, _, rest = encoding.partition(":")
    if base in _SCALARS and not rest:
        dtype = _SCALARS[base]
        return Column(name, dtype.itemsize, lambda raw: raw.view(dtype)[0])
    if base == "int" and not rest:
        return Column(name, 8, lambda raw: int(raw.view("<i8")[0]))
    if base == "ndarray":
        return _array_column(name, encoding, rest)
    if base in _KINDS:
        return Column(name, None, _identity, _KINDS[base])
    if encoding == "bytes":
        return Column(name, None, _identity, array=BYTES)
    if encoding in _TEXTS:
        return Column(name, None, _TEXTS[encoding])
    if encoding in _LISTS:
        at = _LISTS[encoding]
        return Column(name, None, lambda raw: runs(raw[at:]))
    if base == "pkl" and allow_pickle:
        return Column(name, None, unpickled)
    if base == "pkl":
        raise ValueError(
            f"column {name!r} holds pickles, which are refused: unpickling runs code that the file chooses"
        )
    raise ValueError(f"column {name!r} has the encoding {encoding!r}, which is not known")


def _array_column(name: str, encoding: str, rest: str) -> Column:
    dtype_name, _, shape_text = rest.partition(":")
    if dtype_name and dtype_name not in _SCALARS:
        raise ValueError(f"column {name!r} has the encoding {encoding!r}, whose dtype is not known")
    dtype = _SCALARS[dtype_name] if dtype_name else None
    shape: tuple[int, ...] | None = None
    if shape_text:
        parts = shape_text.split(",")
        if not all(p.isascii() and p.isdigit() and len(p) < 19 for p in parts):
            raise ValueError(f"column {name!r} has the encoding {encoding!r}, whose shape is malformed")
        shape = tuple(int(p) for p in parts)
    size = dtype.itemsize * math.prod(shape) if dtype is not None and shape is not None else None

    def decode(raw: Bytes) -> Any:
        return _array(raw, dtype, shape)

    return Column(name, size, decode, array=ArrayKind(dtype, shape))


def _array(raw: Bytes, dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None) -> Any:
    at = 0
    if dtype is None:
        if len(raw) < 1 or int(raw[0]) not in DTYPES:
            raise ValueError("the array's dtype code is not known")
        dtype = _SCALARS[DTYPES[int(raw[0])]]
        at = 1
    if shape is None:
        if len(raw) <= at:
            raise ValueError("the array has no shape")
        code = int(raw[at])
        width = 1 << (code & 3)
        stop = at + 1 + (code >> 2) * width
        if stop > len(raw):
            raise ValueError("the array's shape is cut off")
        shape = tuple(raw[at + 1 : stop].view(f"<u{width}").tolist())
        at = stop
    if math.prod(shape) * dtype.itemsize != len(raw) - at or len(shape) > 32:
        raise ValueError(f"an array of shape {shape} and dtype {dtype} does not have {len(raw) - at} bytes")
    return raw[at:].view(dtype).reshape(shape)


def runs(raw: Bytes) -> list[Bytes]:
    """A list of byte strings: their number, their sizes (uint32 each), then the bytes."""
    count = int(raw[:4].view("<u4")[0]) if len(raw) >= 4 else 0
    begin = 4 + 4 * count
    if len(raw) < begin:
        raise ValueError("the list's sizes are cut off")
    sizes = raw[4:begin].view("<u4").tolist()
    if begin + sum(sizes) != len(raw):
        raise ValueError(f"the list's elements take {sum(sizes)} bytes, there are {len(raw) - begin}")
    ends = np.cumsum([begin, *sizes], dtype=np.int64).tolist()
    return [raw[start:end] for start, end in itertools.pairwise(ends)]


def unpickled(raw: Bytes) -> Any:
    """The object of a pickle, which the caller was asked to trust."""
    try:
        return pickle.loads(raw.data)  # noqa: S301  (only with allow_pickle)
    # a pickle may raise anything at all; whatever it is, the value is bad
    except Exception as e:
        raise ValueError(f"the pickle cannot be loaded: {type(e).__name__}: {' '.join(str(e).split())}") from e


def _identity(raw: Bytes) -> Bytes:
    return raw


def _json(raw: Bytes) -> Any:
    try:
        return json.loads(raw.tobytes())
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def _decimal(raw: Bytes) -> Decimal:
    try:
        return Decimal(_str(raw))
    except InvalidOperation:
        raise ValueError("not a decimal number") from None


def _str(raw: Bytes) -> str:
    return str(raw.data, "utf-8")


_TEXTS: dict[str, Decode] = {
    "str": _str,
    "json": _json,
    "str_int": lambda raw: int(_str(raw)),
    "str_float": lambda raw: float(_str(raw)),
    "str_decimal": _decimal,
}
