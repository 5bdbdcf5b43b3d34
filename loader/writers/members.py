"""What a value becomes as a member of a tar: the field's name says how it is read back.

=====================================  ================================================================================
value                                  member
=====================================  ================================================================================
``bytes``, 1-D ``uint8`` array         the bytes, under the field's own name
``{bytes, path}``, an HF image         the file, its kind added to the name (``image.png``); its path is left out
``str``                                UTF-8; ``.txt`` is added unless the name ends in ``txt``, ``text`` ...
whole number, name ends in ``cls`` ..  its digits
other numbers, ``bool``, ``None``      JSON; ``.json`` is added unless the name ends in ``json``
list, dict                             JSON, likewise
array                                  NumPy's format; ``.npy`` is added unless the name ends in ``npy``
=====================================  ================================================================================

Bytes in a field called ``txt``, ``json`` or ``cls`` are taken to be that already.
"""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np

from ..decode import plain_kind
from .abc import as_bytes, image_bytes
from .magic import guess
from .mds_columns import json_value


def member(name: str, value: Any) -> tuple[str, bytes | memoryview]:
    """What is behind the key in the member's name, and the member's bytes. Raises ``ValueError``."""
    if "/" in name or "\0" in name:
        raise ValueError("no tar member's name can end so")
    raw = as_bytes(value)
    if raw is not None:
        return name, raw
    image = image_bytes(value)
    if image is not None:
        return f"{name}.{guess(image) or 'bin'}", image
    last = name.rpartition(".")[2].lower()
    kind = plain_kind(last)
    if isinstance(value, str):
        return (name if kind == "text" else f"{name}.txt"), value.encode()
    if isinstance(value, np.ndarray) and value.ndim:
        return (name if last == "npy" else f"{name}.npy"), _npy(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.item()
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        return name, str(value).encode()
    return (name if kind == "json" else f"{name}.json"), json.dumps(json_value(value), ensure_ascii=False).encode()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.hasobject:
        raise ValueError(f"an array of dtype {array.dtype} holds Python objects, which would be pickled")
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()
