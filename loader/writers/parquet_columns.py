"""Which Arrow type a field gets in a Parquet file, and how its values become an array.

=====================================  ================================================================================
Python, numpy                          Arrow
=====================================  ================================================================================
``bytes``, 1-D ``uint8`` array         ``binary``
``str``, ``bool``                      ``string``, ``bool``
``int``; ``float``                     ``int64`` (``uint64`` if one of the first needs it; JSON text if neither holds
                                       all of these); ``double``, mixed too
``Decimal``, dates and times           what pyarrow makes of them
numpy number                           its own type
array                                  ``list`` of its type, one level an axis
list; dict                             ``list``; ``struct``, where all of the first samples have the same keys
dicts of other keys, mixed kinds       JSON text (``string``, the column's metadata says ``nearflash: json``)
``None``, and a field that is missing  null
=====================================  ================================================================================

A value that the column cannot hold as it is is refused: a dict is never given or robbed of a key.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .abc import as_bytes
from .mds_columns import json_value

if TYPE_CHECKING:
    import pyarrow as pa

JSON = "json"


@dataclass(frozen=True)
class ArrowColumn:
    """A column's Arrow type; ``text``: values become JSON text."""

    type: pa.DataType
    text: bool = False

    def array(self, values: Sequence[Any]) -> pa.Array:
        """Raises ``ValueError`` (pyarrow's errors are) or ``TypeError`` where a value does not fit."""
        import pyarrow as pa

        if self.text:
            return pa.array([None if v is None else _json(v) for v in values], self.type)
        return pa.array([_plain(value, self.type) for value in values], self.type)


def named(name: str) -> ArrowColumn:
    """The column that the user named: ``json`` or an Arrow type's name. Raises ``ValueError``."""
    import pyarrow as pa

    return ArrowColumn(pa.string(), text=True) if name == JSON else ArrowColumn(pa.type_for_alias(name))


def choose(values: Sequence[Any]) -> ArrowColumn:
    """The column that all these values fit. Raises ``ValueError``."""
    import pyarrow as pa

    there = [value for value in values if value is not None]
    kinds = {_kind(value) for value in there}
    if kinds <= {"int", "float"} and kinds:
        number = _number(there, kinds)
        return ArrowColumn(pa.string(), text=True) if number is None else ArrowColumn(number)
    if not kinds:
        return ArrowColumn(pa.null())
    if len(kinds) == 1:
        (kind,) = kinds
        if kind == "bytes":
            return ArrowColumn(pa.binary())
        if kind.startswith("numpy "):
            _, name, axes = kind.split(" ")
            found = pa.from_numpy_dtype(np.dtype(name))
            for _ in range(int(axes)):
                found = pa.list_(found)
            return ArrowColumn(found)
        try:
            inferred = pa.array(there).type
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            inferred = None
        if inferred is not None and _regular(there, inferred):
            return ArrowColumn(inferred)
    try:
        for value in there:
            json_value(value)  # refuses arrays
    except ValueError as e:
        raise ValueError(f"values that fit no one Arrow type ({', '.join(sorted(kinds))}): {e}") from e
    return ArrowColumn(pa.string(), text=True)


def _kind(value: Any) -> str:
    if as_bytes(value) is not None:
        return "bytes"
    if isinstance(value, np.bool_):
        return "bool"
    if isinstance(value, np.ndarray | np.generic) and not isinstance(value, np.str_ | float):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise ValueError(f"Parquet has no place for numpy values of dtype {value.dtype}")
        return f"numpy {value.dtype.newbyteorder('=').name} {value.ndim}"
    for kind in (bool, int, float, str, dict, list, tuple):
        if isinstance(value, kind):
            return "list" if kind is tuple else kind.__name__
    return type(value).__name__


def _number(values: Sequence[Any], kinds: set[str]) -> pa.DataType | None:
    """``None``: integers that fit no type together, which become JSON text."""
    import pyarrow as pa

    if "float" in kinds:
        return pa.float64()
    least, most = min(values), max(values)
    if least >= -(1 << 63) and most < 1 << 63:
        return pa.int64()
    return pa.uint64() if least >= 0 and most < 1 << 64 else None


def _regular(values: Sequence[Any], found: pa.DataType) -> bool:
    """Whether each value comes back as it went in, as far as keys and empty things go."""
    if not _storable(found):
        return False
    try:
        for value in values:
            _plain(value, found)
    except ValueError:
        return False
    return True


def _storable(found: pa.DataType) -> bool:
    import pyarrow as pa

    if pa.types.is_null(found) or (pa.types.is_struct(found) and not found.num_fields):
        return False
    return all(_storable(found.field(i).type) for i in range(found.num_fields))


def _plain(value: Any, found: pa.DataType) -> Any:
    """The value as pyarrow takes it. Raises ``ValueError`` where pyarrow would change it without a word."""
    import pyarrow as pa

    if value is None:
        return None
    raw = as_bytes(value)
    if raw is not None and pa.types.is_binary(found):
        return raw
    if isinstance(value, np.ndarray):
        if value.ndim == 1:
            return value.astype(value.dtype.newbyteorder("="), copy=False)
        return _plain(value.tolist(), found)
    if isinstance(value, np.generic):
        value = value.item()
    if pa.types.is_struct(found):
        names = {found.field(i).name for i in range(found.num_fields)}
        if not isinstance(value, dict) or set(value) != names:
            keys = sorted(map(str, value)) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"a column of dicts with the keys {sorted(names)} cannot hold one of {keys}")
        return {key: _plain(item, found.field(key).type) for key, item in value.items()}
    if pa.types.is_list(found) and isinstance(value, list | tuple):
        return [_plain(item, found.value_type) for item in value]
    if isinstance(value, bool) != pa.types.is_boolean(found):
        raise ValueError(f"a {type(value).__name__} in a column of {found}")
    if isinstance(value, int) and pa.types.is_floating(found) and int(float(value)) != value:
        raise ValueError(f"{value} does not fit into {found} exactly")
    return value


def _json(value: Any) -> str:
    return json.dumps(json_value(value), ensure_ascii=False)
