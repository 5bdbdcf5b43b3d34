"""The checksum of TFRecord files: CRC-32C (Castagnoli; RFC 3720, appendix B.4), masked as LevelDB masks it.

Payloads go through the C code of ``google_crc32c``. The lengths in the records' headers are eight bytes each, for which
a call costs far more than the sum itself: :func:`masked_lengths` does thousands at once with numpy. A CRC is affine
over exclusive or, so that of eight bytes is one table entry for each byte, joined.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

from .abc import Bytes

_ADDED = 0xA282EAD8
_32 = 0xFFFFFFFF


@cache
def _crc() -> Callable[[Bytes | bytes], int]:
    import google_crc32c

    value: Callable[[Bytes | bytes], int] = google_crc32c.value
    return value


def crc32c(data: Bytes | bytes) -> int:
    """The plain sum. ``data``: ``bytes``, or a contiguous array, which is not copied."""
    return _crc()(data)


def unmasked(stored: int) -> int:
    """The plain sum that a record's masked one stands for."""
    turned = (stored - _ADDED) & _32
    return (turned >> 17) | (turned << 15) & _32


def masked_lengths(lengths: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """The masked sum of each length, as eight little-endian bytes."""
    base, tables = _tables()
    sums = np.full(len(lengths), base, np.uint32)
    highest = int(lengths.max(initial=0))
    for place, table in enumerate(tables):
        if highest >> (8 * place) == 0:
            break  # the table of a zero byte adds nothing
        sums ^= table[(lengths >> np.uint64(8 * place)).astype(np.uint8)]
    return ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(_ADDED)


@cache
def _tables() -> tuple[np.uint32, tuple[npt.NDArray[np.uint32], ...]]:
    base = crc32c(bytes(8))
    return np.uint32(base), tuple(
        np.array([crc32c((byte << 8 * place).to_bytes(8, "little")) ^ base for byte in range(256)], np.uint32)
        for place in range(8)
    )
