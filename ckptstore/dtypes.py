"""Names and sizes of element types, without torch.

A checkpoint names a type as torch does (``"bfloat16"``); a numpy type that torch lacks is ``"numpy:"`` and numpy's own
string (``"numpy:<M8[ns]"``). A safetensors segment stores what that format's readers know under its own code and
everything else as ``U8`` with one more axis, the bytes of an element; the true type stands in the part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cachefs.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

# Codes: https://github.com/huggingface/safetensors (README, "Format", and its Dtype enumeration). F8_E8M0 and F4 are in
# the enumeration but not in the torch reader's table, so a file that used them could not be read back by it.
_TYPES: dict[str, tuple[int, str | None]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex32": (4, None),
    "complex64": (8, "C64"),
    "complex128": (16, None),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e4m3fnuz": (1, None),
    "float8_e5m2fnuz": (1, None),
    "float8_e8m0fnu": (1, None),
    "float4_e2m1fn_x2": (1, None),
}

NUMPY_PREFIX = "numpy:"
NUMPY_KINDS = "biufcMmSU"
"""numpy's kinds of types whose elements are plain bytes."""
_TORCH_ONLY = ("bfloat", "float8", "float4", "complex32")


def known(dtype: str) -> bool:
    """Whether torch's type of this name can be saved."""
    return dtype in _TYPES


def numpy_has(dtype: str) -> bool:
    """Whether numpy has a type of this name."""
    return dtype in _TYPES and not dtype.startswith(_TORCH_ONLY)


def itemsize(dtype: str) -> int:
    """Bytes of one element. Raises :class:`CheckpointError` for a name that this version does not know."""
    if dtype in _TYPES:
        return _TYPES[dtype][0]
    size: int = numpy_type(dtype).itemsize
    return size


def numpy_type(dtype: str) -> np.dtype[Any]:
    """The numpy type of a name. Raises :class:`CheckpointError` for a name that this version does not know."""
    import numpy as np  # only checkpoints with such arrays pay for the import

    if numpy_has(dtype):
        return np.dtype(dtype)
    if dtype.startswith(NUMPY_PREFIX):
        try:
            found = np.dtype(dtype.removeprefix(NUMPY_PREFIX))
        except (TypeError, ValueError):
            found = np.dtype(object)
        if found.kind in NUMPY_KINDS and found.itemsize:  # never an object: its bytes would be taken for pointers
            return found
    raise CheckpointError(f"unknown element type {dtype!r}", hint="written by a newer version?")


def safetensors_code(dtype: str) -> str | None:
    """The type's code in a safetensors header; ``None``: stored as ``U8`` with one more axis."""
    return _TYPES[dtype][1] if dtype in _TYPES else None
