"""Values for people and for programs: one line of text, or JSON. Large ones are summarised, never printed whole."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import sys
from typing import Any

import numpy as np

from ..writers.abc import as_bytes
from ..writers.magic import guess

_FIRST = 8
_LONGEST = 160


def type_of(value: Any) -> str:
    """``bytes (jpeg)``, ``str``, ``uint16[2048]``, ``list`` ..."""
    raw = as_bytes(value)
    if raw is not None:
        kind = guess(raw)
        return f"bytes ({kind})" if kind else "bytes"
    if isinstance(value, np.ndarray):
        return f"{value.dtype.name}[{','.join(map(str, value.shape))}]"
    if _is_image(value):
        return f"image ({value.mode})"
    return "null" if value is None else type(value).__name__


def _is_image(value: Any) -> bool:
    """Whether it is a ``PIL.Image``, without loading that library where nothing else has."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def line(value: Any) -> str:
    """A value in one line of limited length."""
    raw = as_bytes(value)
    if raw is not None:
        kind = guess(raw)
        shown = f"{len(raw)} bytes" + (f", {kind}" if kind else "")
        return f"{shown}: {_cut(repr(bytes(raw[:_LONGEST]).decode()))}" if kind == "text" and len(raw) <= 40 else shown
    if isinstance(value, np.ndarray):
        more = ", ..." if value.size > _FIRST else ""
        firsts = ", ".join(str(item) for item in _firsts(value))
        return f"{type_of(value)} [{firsts}{more}]"
    if isinstance(value, np.generic):
        return f"{value.dtype.name} {value}"
    if _is_image(value):
        return f"image {value.width}x{value.height} {value.mode}"
    if isinstance(value, dict | list):
        try:
            return _cut(json.dumps(to_json(value), ensure_ascii=False))
        except RecursionError:
            return "nested too deeply to show"
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def _firsts(value: np.ndarray[Any, Any]) -> list[Any]:
    return [value.flat[i] for i in range(min(_FIRST, value.size))]


def to_json(value: Any, *, whole: bool = False) -> Any:
    """A value as JSON types. Bytes and arrays are summarised with a digest; ``whole``: with all of them in base64."""
    raw = as_bytes(value)
    if raw is not None:
        return {"bytes": len(raw), "kind": guess(raw) or None, **_content(raw, whole)}
    if isinstance(value, np.ndarray):
        summary = {"dtype": value.dtype.name, "shape": list(value.shape)}
        if not value.dtype.hasobject:
            summary |= _content(np.ascontiguousarray(value).tobytes(), whole)
        return {**summary, "first": [to_json(item) for item in _firsts(value)]}
    if isinstance(value, np.generic):
        return to_json(value.item())
    if _is_image(value):
        return {"image": [value.width, value.height], "mode": value.mode, **_content(value.tobytes(), whole)}
    if isinstance(value, dict):
        return {str(key): to_json(item, whole=whole) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item, whole=whole) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _content(raw: bytes | memoryview, whole: bool) -> dict[str, str]:
    if whole:
        return {"base64": base64.b64encode(raw).decode()}
    return {"sha256": hashlib.sha256(raw).hexdigest()}
