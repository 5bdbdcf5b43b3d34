"""Our values as pyarrow gives them as Python objects, so that it can be the referee."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa


def plain(value: Any, kind: Any) -> Any:
    """What ``pyarrow`` has as ``as_py()`` for a value that we read from a column of the type ``kind``."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return value
    if types.is_dictionary(kind):
        return plain(value, kind.value_type)
    if value is None:
        return None
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        assert value.dtype == np.uint8 and value.ndim == 1 and value.flags.writeable
        return value.tobytes()
    if types.is_struct(kind):
        assert type(value) is dict
        return {field.name: plain(value[field.name], field.type) for field in kind}
    if types.is_map(kind):
        return [(plain(key, kind.key_type), plain(item, kind.item_type)) for key, item in value]
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if isinstance(value, np.ndarray):
            assert value.flags.writeable
        return [plain(item, kind.value_type) for item in value]
    if types.is_temporal(kind):
        return pa.scalar(value.view(np.int64).item(), pa.int64()).cast(kind).as_py() if _wide(kind) else value.item()
    return value.item() if isinstance(value, np.generic) else value


def _wide(kind: Any) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind))


def rows(samples: Any, schema: Any) -> list[dict[str, Any]]:
    """All samples as ``Table.to_pylist()`` gives them."""
    return [{field.name: plain(sample[field.name], field.type) for field in schema} for sample in samples]
