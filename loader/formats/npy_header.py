"""The header of NumPy's ``.npy`` format, versions 1.0 to 3.0: dtype, shape and order of one array.

It follows ``numpy.lib.format``. The header is Python text, evaluated as a literal and never as code; it may be as long
as numpy itself allows without being told to trust the file. What it declares is checked against the bytes that are
there before an array is made of them.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Bytes

MAGIC = b"\x93NUMPY"
LONGEST = 10_000
"""Bytes of a header that are evaluated; numpy's own limit."""
MOST = 12 + LONGEST
"""Bytes from a file's start within which its header must lie."""
_KEYS = {"descr", "fortran_order", "shape"}
_ENCODINGS = {1: "latin1", 2: "latin1", 3: "utf-8"}
_SIMPLE = re.compile(
    r"\{'descr': '([<>|=][a-zA-Z]\d{1,9}(?:\[[a-zA-Z]+\])?)', 'fortran_order': (True|False), "
    r"'shape': \(((?:\d{1,18}, ){0,31}(?:\d{1,18},?)?)\), \}[ \n]*"
)
_TRIES = 5
_LONG = re.compile(r"\b(\d+)L\b")
"""A number as Python 2 wrote it, which is no Python any more."""
_SURPRISES = (
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    MemoryError,
)
"""What evaluating a damaged header, or making a dtype of it, raises."""


class NpyHeader(NamedTuple):
    """``start``: bytes before the first value."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    start: int

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def nbytes(self) -> int:
        """Bytes that the values take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def array(self, data: Bytes) -> npt.NDArray[Any]:
        """The array over the bytes of the whole file; a view, and not always an aligned one."""
        flat = data[self.start : self.start + self.nbytes].view(self.dtype)
        return flat.reshape(self.shape[::-1]).T if self.fortran else flat.reshape(self.shape)


def read_header(data: Bytes, size: int, url: str, offset: int = 0, what: str = "the array") -> NpyHeader:
    """The header of a file of ``size`` bytes, of which ``data`` are at least the first :data:`MOST` (or all).

    ``offset``: where it lies in the shard, ``what``: its name, for messages. Raises ``FormatError`` unless the array
    takes exactly the rest of the file. An array of objects is not refused here: its values' size is not known.
    """
    fault = FormatError(f"{what} has a damaged NumPy header", url=url, offset=offset)
    head = data[:12].tobytes()
    if head[:6] != MAGIC or len(head) < 10:
        raise fault
    version = head[6]
    if version not in _ENCODINGS or head[7] != 0:
        raise FormatError(f"{what} has a NumPy header of version {version}.{head[7]}", url=url, offset=offset + 6)
    begin = 10 if version == 1 else 12
    length = int.from_bytes(head[8:begin], "little")
    if length > LONGEST or begin + length > len(data):
        raise FormatError(f"{what} has a NumPy header of {length} bytes: cut off or damaged", url=url, offset=offset)
    try:
        text = data[begin : begin + length].tobytes().decode(_ENCODINGS[version])
        fields = _fields(text)
        dtype = np.lib.format.descr_to_dtype(fields["descr"])
        complete = fields.keys() == _KEYS
    except _SURPRISES as e:
        raise fault from e
    if not complete:
        raise fault
    shape, fortran = fields["shape"], fields["fortran_order"]
    if not isinstance(fortran, bool) or not _is_shape(shape) or not isinstance(dtype, np.dtype):
        raise fault
    found = NpyHeader(dtype, shape, fortran, begin + length)
    if dtype.hasobject:
        return found
    if dtype.itemsize == 0 or dtype.subdtype is not None:
        raise FormatError(f"{what} declares values of no size", url=url, offset=offset)
    if found.start + found.nbytes != size:
        raise FormatError(
            f"{what} of shape {shape} and dtype {dtype} needs {found.nbytes} bytes, {size - found.start} follow",
            url=url,
            offset=offset + found.start,
            hint="it is cut off or damaged, or several arrays were saved into one file",
        )
    if found.rows > size:
        raise FormatError(f"{what} declares {found.rows} rows, all of them empty", url=url, offset=offset)
    return found


def _fields(text: str) -> Any:
    """The literal that a header is. Raises what ``ast.literal_eval`` raises.

    All but headers of structured arrays are read here: CPython 3.11 loses count of its own recursion when several
    threads, or a child that was forked meanwhile, parse Python, and says ``SystemError``.
    """
    simple = _SIMPLE.fullmatch(text)
    if simple is not None:
        descr, fortran, shape = simple.groups()
        numbers = tuple(int(n) for n in shape.replace(" ", "").split(",") if n)
        return {"descr": descr, "fortran_order": fortran == "True", "shape": numbers}
    for _ in range(_TRIES):
        try:
            return ast.literal_eval(text)
        except SyntaxError:
            text = _LONG.sub(r"\1", text)
        except SystemError:
            continue
    return ast.literal_eval(text)


def _is_shape(shape: Any) -> bool:
    whole = isinstance(shape, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    return whole and len(shape) <= 32 and math.prod(n for n in shape if n) < 1 << 62


def value_at(array: npt.NDArray[Any], i: int) -> Any:
    """Row ``i`` of an array as a sample's value.

    An array stays a view. A single number is a numpy scalar, so that its dtype is kept; a truth value, text and bytes
    are Python's own; a record is a ``dict``. Raises ``ValueError`` for text with code points that do not exist, of
    which numpy itself would make a broken ``str``.
    """
    if array.ndim > 1:
        return array[i]
    dtype = array.dtype
    if dtype.names is not None:
        return {name: value_at(array[name], i) for name in dtype.names}
    if dtype.kind == "U":
        codes = array[i : i + 1].astype(dtype.newbyteorder("<"), copy=False).tobytes()
        return codes.decode("utf-32-le", "surrogatepass").rstrip("\0")
    return array[i].item() if dtype.kind in "bS" else array[i]


def rows_of(array: npt.NDArray[Any], which: npt.NDArray[np.int64]) -> Any:
    """Some rows as a new array, or as a list of values where a tensor cannot hold them. Raises ``ValueError``."""
    if array.dtype.kind in "biufc":
        return array[which]
    chosen = array[which]
    return [value_at(chosen, i) for i in range(len(chosen))]
