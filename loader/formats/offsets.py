"""The index of formats whose samples lie one behind the other: where each begins, and where the last one ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import msgspec
import numpy as np
import numpy.typing as npt

from .abc import SampleIndex
from .kept import seal, unseal

Offsets = npt.NDArray[np.uint32] | npt.NDArray[np.int64]

_VERSION = 1


class _Kept(msgspec.Struct, array_like=True):
    version: int
    kind: str
    wide: bool
    offsets: bytes
    extra: bytes


def offset_dtype(size: int) -> np.dtype[Any]:
    """What holds every offset in a shard of ``size`` bytes."""
    return np.dtype("<u4") if size < 1 << 32 else np.dtype("<i8")


def joined(pieces: Iterable[npt.NDArray[Any]], end: int, size: int) -> Offsets:
    """Runs of offsets in a row, and the end behind them."""
    dtype = offset_dtype(size)
    return np.concatenate([*pieces, np.array([end], dtype)], dtype=dtype)


@dataclass(slots=True)
class OffsetIndex(SampleIndex):
    """Sample ``i`` lies in the bytes ``offsets[i] .. offsets[i + 1]``."""

    kind: ClassVar[str]
    least: ClassVar[int] = 1
    """Bytes that the smallest sample takes."""
    offsets: Offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + 200

    def extra(self) -> bytes:
        """What :meth:`to_bytes` keeps besides the offsets."""
        return b""

    @classmethod
    def rebuilt(cls, offsets: Offsets, extra: bytes, size: int) -> Self:
        """The index again. Raises ``ValueError`` for an ``extra`` that cannot be."""
        if extra:
            raise ValueError("a kept index with a part that its kind does not have")
        return cls(offsets)

    def to_bytes(self) -> bytes:
        """All of it, for :meth:`from_bytes`; as large as it is in memory."""
        offsets = self.offsets
        return seal(_Kept(_VERSION, self.kind, offsets.itemsize == 8, offsets.tobytes(), self.extra()))

    @classmethod
    def from_bytes(cls, raw: bytes, size: int) -> Self:
        """What :meth:`to_bytes` wrote, for a shard of ``size`` bytes (decompressed).

        Nothing in the result points outside the shard. Raises ``ValueError`` for any other bytes; then the shard has
        to be indexed anew.
        """
        kept = unseal(raw, _Kept, "a kept index")
        if (kept.version, kept.kind) != (_VERSION, cls.kind):
            raise ValueError(f"a kept index of {kept.kind!r}, version {kept.version}")
        dtype = np.dtype("<i8" if kept.wide else "<u4")
        if dtype != offset_dtype(size) or not kept.offsets or len(kept.offsets) % dtype.itemsize:
            raise ValueError("a kept index of a shard of another size")
        offsets = np.frombuffer(kept.offsets, dtype).copy()
        wide = offsets.astype(np.int64)
        if wide[0] < 0 or wide[-1] > size or (np.diff(wide) < cls.least).any():
            raise ValueError("a kept index whose offsets cannot be")
        return cls.rebuilt(offsets, kept.extra, size)
