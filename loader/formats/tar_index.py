"""Where the samples of a tar lie: :class:`TarIndex`, and the bytes that it is kept as."""

from __future__ import annotations

import sys
import zlib
from array import array
from dataclasses import dataclass

import msgspec
import numpy as np

from .abc import Damage, SampleIndex

_VERSION = 2
"""1: of walks that took the first zeros for the end."""
_SUM_BYTES = 4


@dataclass(slots=True)
class TarIndex(SampleIndex):
    """Per member: payload offset, size, field number; per sample: its first member and its key."""

    starts: array[int]
    sizes: array[int]
    names: array[int]
    first: array[int]
    key_ends: array[int]
    keys: bytes
    fields: tuple[str, ...]
    damaged: dict[int, Damage]
    skipped: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.first) - 1

    @property
    def nbytes(self) -> int:
        arrays = (self.starts, self.sizes, self.names, self.first, self.key_ends)
        return sum(a.itemsize * len(a) for a in arrays) + len(self.keys) + 200 * len(self.damaged) + 1000

    def key(self, i: int) -> str:
        return self.keys[self.key_ends[i] : self.key_ends[i + 1]].decode("utf-8", "surrogateescape")

    def to_bytes(self) -> bytes:
        """All of it, for :meth:`from_bytes`; about as large as it is in memory."""
        body = msgspec.msgpack.encode(
            _Wire(
                _VERSION,
                _packed(self.starts),
                _packed(self.sizes),
                _packed(self.names),
                _packed(self.first),
                _packed(self.key_ends),
                self.keys,
                [name.encode("utf-8", "surrogateescape") for name in self.fields],
                [(i, damage.what, damage.offset, damage.hint) for i, damage in self.damaged.items()],
                self.skipped,
                list(self.notes),
            )
        )
        return zlib.crc32(body).to_bytes(_SUM_BYTES, "little") + body

    @classmethod
    def from_bytes(cls, raw: bytes, size: int) -> TarIndex:
        """What :meth:`to_bytes` wrote, for a tar of ``size`` bytes (decompressed).

        The bytes are input from outside: nothing in the result points outside the tar. Raises ``ValueError`` for any
        others; then the tar has to be indexed anew.
        """
        if zlib.crc32(raw[_SUM_BYTES:]).to_bytes(_SUM_BYTES, "little") != raw[:_SUM_BYTES]:
            raise ValueError("a kept index with a wrong checksum")
        try:
            wire = msgspec.msgpack.decode(raw[_SUM_BYTES:], type=_Wire)
        except msgspec.MsgspecError as e:
            raise ValueError(f"no kept index: {e}") from e
        if wire.version != _VERSION:
            raise ValueError(f"a kept index of version {wire.version}")
        index = cls(
            _unpacked(wire.starts, "q"),
            _unpacked(wire.sizes, "q"),
            _unpacked(wire.names, "i"),
            _unpacked(wire.first, "q"),
            _unpacked(wire.key_ends, "q"),
            wire.keys,
            tuple(name.decode("utf-8", "surrogateescape") for name in wire.fields),
            {i: Damage(what, offset, hint) for i, what, offset, hint in wire.damaged},
            wire.skipped,
            tuple(wire.notes),
        )
        if not _fits(index, size):
            raise ValueError(f"a kept index that does not fit a tar of {size} bytes")
        return index


class _Wire(msgspec.Struct, array_like=True):
    version: int
    starts: bytes
    sizes: bytes
    names: bytes
    first: bytes
    key_ends: bytes
    keys: bytes
    fields: list[bytes]
    damaged: list[tuple[int, str, int, str | None]]
    skipped: int
    notes: list[str]


def _packed(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def _unpacked(raw: bytes, code: str) -> array[int]:
    values: array[int] = array(code)
    values.frombytes(raw)  # ValueError where the length is no multiple
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _fits(index: TarIndex, size: int) -> bool:
    starts, sizes = (np.frombuffer(a, np.int64) for a in (index.starts, index.sizes))
    names = np.frombuffer(index.names, np.int32)
    members, samples = len(starts), len(index)
    return (
        len(sizes) == len(names) == members
        and len(index.key_ends) == len(index.first)
        and _runs_to(index.first, members)
        and _runs_to(index.key_ends, len(index.keys))
        and not ((sizes < 0) | (sizes > size)).any()
        and not ((starts < 0) | (starts > size - sizes)).any()
        and not ((names < 0) | (names >= len(index.fields))).any()
        and all(0 <= i < samples for i in index.damaged)
        and index.skipped >= 0
    )


def _runs_to(ends: array[int], last: int) -> bool:
    """Whether these run from 0 to ``last`` and never back."""
    if not ends:
        return False
    values = np.frombuffer(ends, np.int64)
    return bool(values[0] == 0 and values[-1] == last and (values[1:] >= values[:-1]).all())
