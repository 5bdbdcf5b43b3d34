"""Which MDS encoding a value gets, and how it is encoded. The other way round is :mod:`loader.formats.mds_columns`.

====================================  =================================================================================
Python, numpy                         encoding
====================================  =================================================================================
``bytes``, 1-D ``uint8`` array        ``bytes``
``{bytes, path}``, an HF image        ``bytes``: the file; its path is left out
``str``                               ``str``
``int``                               ``int`` (int64); ``str_int`` where one of the first samples needs more
``float``                             ``float64``
``Decimal``                           ``str_decimal``
numpy number                          its dtype: ``uint8`` .. ``float64``
array of such numbers                 ``ndarray:<dtype>`` with a shape for each value; ``ndarray`` for several dtypes
``bool``, ``None``, list, dict        ``json``, and so is a column whose first samples mix numbers, text and these
====================================  =================================================================================

MDS has no null and no missing field: ``None`` needs a ``json`` column, and a sample that lacks a column is refused. In
lists and dicts numpy numbers and arrays become JSON's numbers and lists; bytes are refused there.
"""

from __future__ import annotations

import json
import operator
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

from ..formats.mds_columns import DTYPES, make_column
from .abc import as_bytes, image_bytes

Encode = Callable[[Any], "bytes | memoryview"]

_DTYPE_CODES = {name: code for code, name in DTYPES.items()}
_INT64 = range(-(1 << 63), 1 << 63)
_JSON_ABLE = frozenset({"int", "str_int", "float64", "str", "json"})
_DEEPEST = 200


def choose(values: Sequence[Any]) -> str:
    """The encoding that all these values fit. Raises ``ValueError``."""
    kinds = {_encoding_of(value) for value in values}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds == {"int", "str_int"}:
        return "str_int"
    if kinds <= _JSON_ABLE:
        return "json"
    if all(kind.startswith("ndarray:") for kind in kinds):
        return "ndarray"
    if any(value is None for value in values):
        there = ", ".join(sorted(kinds - {"json"})) or "json"
        raise ValueError(f"null in a column of {there}: MDS has nulls in JSON only")
    raise ValueError(f"values of several kinds in one column: {', '.join(sorted(kinds))}")


def _encoding_of(value: Any) -> str:
    if image_bytes(value) is not None:
        return "bytes"
    if value is None or isinstance(value, bool | np.bool_ | list | tuple | dict):
        return "json"
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.str_ | np.bytes_):
        if as_bytes(value) is not None:
            return "bytes"
        name = value.dtype.newbyteorder("=").name
        if name not in _DTYPE_CODES:
            raise ValueError(f"MDS has no place for numpy values of dtype {value.dtype}")
        return f"ndarray:{name}" if value.ndim else name
    if isinstance(value, int):
        return "int" if value in _INT64 else "str_int"
    for kind, encoding in ((float, "float64"), (str, "str"), (Decimal, "str_decimal")):
        if isinstance(value, kind):
            return encoding
    if as_bytes(value) is not None:
        return "bytes"
    raise ValueError(f"MDS has no place for a {type(value).__name__}")


def encoder(encoding: str) -> Encode:
    """What turns a value into the bytes of a column; it raises ``ValueError`` for one that the column cannot hold.

    Raises ``ValueError`` for an encoding that is not known or that is not written.
    """
    make_column("", encoding)  # the reader has to know it
    base, _, rest = encoding.partition(":")
    if base == "ndarray":
        dtype, _, shape = rest.partition(":")
        fixed = tuple(int(n) for n in shape.split(",")) if shape else None
        return lambda value: _array(value, dtype or None, fixed)
    if base in _DTYPE_CODES:
        return lambda value: _number(value, np.dtype(base).newbyteorder("<"))
    try:
        return _ENCODERS[encoding]
    except KeyError:
        raise ValueError(f"columns of the encoding {encoding!r} are not written") from None


def _bytes(value: Any) -> bytes | memoryview:
    raw = image_bytes(value) if isinstance(value, dict) else as_bytes(value)
    if raw is None:
        raise ValueError(f"a {type(value).__name__} in a column of bytes")
    return raw


def _str(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} in a column of text")
    return value.encode()


def _int(value: Any) -> bytes:
    number = _whole(value)
    if number not in _INT64:
        raise ValueError(f"{number} does not fit into 64 bits")
    return struct.pack("<q", number)


def _whole(value: Any) -> int:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise ValueError(f"a {type(value).__name__} in a column of whole numbers")
    return operator.index(value)


def _number(value: Any, dtype: np.dtype[Any]) -> bytes:
    if isinstance(value, bool | np.bool_) or not (
        isinstance(value, int | float | np.number) or (isinstance(value, np.ndarray) and value.ndim == 0)
    ):
        raise ValueError(f"a {type(value).__name__} in a column of {dtype.name}")
    try:
        with np.errstate(all="ignore"):
            cast = np.asarray(value).astype(dtype)
            same = bool(cast == value) or (value != value and cast != cast)
    except (OverflowError, TypeError) as e:
        raise ValueError(f"{value!r} does not fit into {dtype.name}") from e
    if not same:
        raise ValueError(f"{value!r} does not fit into {dtype.name}")
    return cast.tobytes()


def _array(value: Any, dtype: str | None, shape: tuple[int, ...] | None) -> bytes:
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        raise ValueError(f"a {type(value).__name__} in a column of arrays")
    name = value.dtype.newbyteorder("=").name
    if name not in _DTYPE_CODES or name != (dtype or name):
        raise ValueError(f"an array of {value.dtype} in a column of {dtype or 'arrays'}")
    if shape is not None and value.shape != shape:
        raise ValueError(f"an array of shape {value.shape} in a column of shape {shape}")
    head = b"" if dtype else bytes([_DTYPE_CODES[name]])
    if shape is None:
        head += _shape(value.shape)
    return head + np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<")).tobytes()


def _shape(shape: tuple[int, ...]) -> bytes:
    width = next(w for w in range(4) if max(shape) < 1 << (8 << w))
    if len(shape) > 32:
        raise ValueError(f"an array of {len(shape)} dimensions")
    return bytes([len(shape) << 2 | width]) + np.array(shape, f"<u{1 << width}").tobytes()


def _json(value: Any) -> bytes:
    return json.dumps(json_value(value), ensure_ascii=False).encode()


def json_value(value: Any, depth: int = 0) -> Any:
    """The value as JSON holds it and gives it back equal (tuples come back as lists). Raises ``ValueError``."""
    if depth > _DEEPEST:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.bool_ | np.number):
        return value.item()
    if isinstance(value, np.ndarray) and depth and value.dtype.kind in "biuf" and as_bytes(value) is None:
        return value.tolist()
    if isinstance(value, list | tuple):
        return [json_value(item, depth + 1) for item in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"JSON has no place for a key that is a {type(key).__name__}")
        return {key: json_value(item, depth + 1) for key, item in value.items()}
    what = "bytes" if as_bytes(value) is not None else f"a {type(value).__name__}"
    raise ValueError(f"JSON has no place for {what}")


def _text_of(kind: type | tuple[type, ...], what: str) -> Encode:
    def encode(value: Any) -> bytes:
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"a {type(value).__name__} in a column of {what}")
        return str(value).encode()

    return encode


_ENCODERS: dict[str, Encode] = {
    "bytes": _bytes,
    "jpeg": _bytes,
    "png": _bytes,
    "str": _str,
    "int": _int,
    "str_int": lambda value: str(_whole(value)).encode(),
    "str_float": _text_of(float, "floats"),
    "str_decimal": _text_of(Decimal, "decimals"),
    "json": _json,
}
