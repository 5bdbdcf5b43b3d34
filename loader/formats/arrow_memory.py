"""Arrow's buffers as numpy arrays: the same memory, writable.

pyarrow marks most of its memory as read-only although it is either private to this process (decoded pages, decompressed
buffers) or the private, writable map of the shard. Arrays made here may be written into; what they point into lives as
long as they do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .abc import Bytes


class _Held:
    """A buffer as numpy takes it; the array keeps this object, which keeps the buffer."""

    __slots__ = ("__array_interface__", "buffer")

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.__array_interface__ = {
            "shape": (buffer.size,),
            "typestr": "|u1",
            "data": (buffer.address, False),
            "version": 3,
        }


def memory(buffer: Any) -> Bytes:
    """All bytes of a ``pyarrow.Buffer`` (``None``: none) as a writable view."""
    if buffer is None or buffer.size == 0:
        return np.empty(0, np.uint8)
    return np.asarray(_Held(buffer))


def numbers(buffer: Any, dtype: np.dtype[Any], offset: int, length: int) -> npt.NDArray[Any]:
    """``length`` values of a buffer, from value ``offset`` on. Raises ``ValueError`` where it holds fewer."""
    if length == 0:
        return np.empty(0, dtype)
    values = np.frombuffer(memory(buffer), dtype, length, offset * dtype.itemsize)
    # a buffer that lies anywhere, as the format allows no writer to leave it, is one that memoryviews cannot index
    return values if values.flags.aligned else values.copy()


def bits(buffer: Any, offset: int, length: int) -> npt.NDArray[np.uint8]:
    """``length`` bits of a bitmap from bit ``offset`` on, as new zeros and ones."""
    first = offset // 8
    packed = memory(buffer)[first : (offset + length + 7) // 8]
    if len(packed) * 8 < offset - first * 8 + length:
        raise ValueError(f"a bitmap of {len(packed)} bytes is too short for {length} values")
    return np.unpackbits(packed, bitorder="little")[offset - first * 8 :][:length]
