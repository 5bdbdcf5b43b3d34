"""Reading structures of Thrift's compact protocol, in which Parquet describes itself.

Only the fields that are asked for are kept; every count is checked against the bytes that are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Wanted: TypeAlias = Mapping[int, Any]
"""Per number of a wanted field: ``None``, or what is wanted of the structure, or of each in the list, that it holds."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = frozenset({4, 5, 6})
_DEEPEST = 32


class Reader:
    """Reads one buffer from its start; ``at`` is the next byte. Raises ``ValueError`` for what is no Thrift."""

    def __init__(self, buffer: bytes) -> None:
        self._buffer = buffer
        self.at = 0

    def struct(self, wanted: Wanted, deep: int = 0) -> dict[int, Any]:
        """A structure: the fields wanted that it has, by number."""
        if deep > _DEEPEST:
            raise ValueError("structures within structures without end")
        found: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._zigzag()
            if number in wanted:
                found[number] = self._value(kind, wanted[number], deep, inline=True)
            else:
                self._skip(kind, deep, inline=True)
        return found

    def _value(self, kind: int, wanted: Wanted | None, deep: int, *, inline: bool = False) -> Any:
        if deep > _DEEPEST:
            raise ValueError("lists within lists without end")
        if kind in (_LIST, _SET):
            count, item = self._list_head()
            return [self._value(item, wanted, deep + 1) for _ in range(count)]
        if (kind == _STRUCT) != (wanted is not None):
            raise ValueError(f"a field of type {kind} where another is due")
        if kind in _INTEGERS:
            return self._zigzag()
        if kind == _BINARY:
            return self._take(self._varint())
        if wanted is not None:
            return self.struct(wanted, deep + 1)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE if inline else self._byte() == _TRUE
        self._skip(kind, deep, inline=inline)
        return None

    def _skip(self, kind: int, deep: int, *, inline: bool = False) -> None:
        if deep > _DEEPEST:
            raise ValueError("structures within structures without end")
        if kind in _INTEGERS:
            self._varint()
        elif kind == _BINARY:
            self._advance(self._varint())
        elif kind == _STRUCT:
            while head := self._byte():
                if not head >> 4:
                    self._varint()
                self._skip(head & 15, deep + 1, inline=True)
        elif kind in (_LIST, _SET):
            count, item = self._list_head()
            for _ in range(count):
                self._skip(item, deep + 1)
        elif kind == _MAP:
            count = self._varint()
            self._plausible(count)
            kinds = self._byte() if count else 0
            for _ in range(count):
                self._skip(kinds >> 4, deep + 1)
                self._skip(kinds & 15, deep + 1)
        elif kind == _DOUBLE:
            self._advance(8)
        elif kind == _BYTE:
            self._advance(1)
        elif kind in (_TRUE, _FALSE):
            self._advance(0 if inline else 1)
        else:
            raise ValueError(f"a field of type {kind}")

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._varint()
        self._plausible(count)
        return count, head & 15

    def _plausible(self, count: int) -> None:
        if count > len(self._buffer) - self.at:  # each takes a byte at least
            raise ValueError(f"{count} items in {len(self._buffer) - self.at} bytes")

    def _byte(self) -> int:
        if self.at >= len(self._buffer):
            raise ValueError("cut off")
        self.at += 1
        return self._buffer[self.at - 1]

    def _advance(self, size: int) -> None:
        if size > len(self._buffer) - self.at:
            raise ValueError("cut off")
        self.at += size

    def _take(self, size: int) -> bytes:
        self._advance(size)
        return self._buffer[self.at - size : self.at]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
