"""Reading structures of Thrift's compact protocol, in which Parquet describes itself.

Only the fields that are asked for are kept; every count is checked against the bytes that are left, and what is walked
value by value is limited. A footer of many row groups is passed over much faster than that: see :mod:`.thrift_skip`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from .thrift_skip import usual_struct

Wanted: TypeAlias = Mapping[int, Any]
"""Per number of a wanted field: ``None``, or what is wanted of the structure, or of each in the list, that it holds."""

_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = frozenset({4, 5, 6})
_DEEPEST = 32
_MOST_VALUES = 1 << 24
"""That are looked at one by one: more than a footer of 100 MB holds."""
_LARGE = 32 << 10
"""Bytes from which on it pays to pass over structures by an expression, which takes a while to make."""


class Reader:
    """Reads one buffer from its start; ``at`` is the next byte. Raises ``ValueError`` for what is no Thrift."""

    def __init__(self, buffer: bytes) -> None:
        self._buffer = buffer
        self._left = _MOST_VALUES
        self._usual = usual_struct() if len(buffer) >= _LARGE else None
        self.at = 0

    def struct(self, wanted: Wanted, deep: int = 0) -> dict[int, Any]:
        """A structure: the fields wanted that it has, by number."""
        if deep > _DEEPEST:
            raise ValueError("structures within structures without end")
        found: dict[int, Any] = {}
        for number, kind in self.fields():
            if number in wanted:
                found[number] = self._value(kind, wanted[number], deep, inline=True)
            else:
                self._skip(kind, deep, inline=True)
        return found

    def fields(self) -> Iterator[tuple[int, int]]:
        """Number and type of each field of a structure; the value is read (:meth:`value`, :meth:`structs`) or passed
        over (:meth:`skip`) before the next is asked for."""
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self.zigzag()
            yield number, kind

    def value(self, kind: int, wanted: Wanted | None) -> Any:
        """A field's value."""
        return self._value(kind, wanted, 0, inline=True)

    def skip(self, kind: int) -> None:
        """Pass over a field's value."""
        self._skip(kind, 0, inline=True)

    def structs(self, kind: int, most: int) -> int:
        """How many structures, ``most`` at most, the list that is a field's value has; the first is read next."""
        count, item = self._list_head() if kind == _LIST else (0, 0)
        if kind != _LIST or (count and item != _STRUCT):
            raise ValueError(f"a field of type {kind} where a list of structures is due")
        if count > most:
            raise ValueError(f"a list of {count}, more than {most}")
        return count

    def skip_structs(self, count: int) -> None:
        """Pass over so many structures, one behind the other."""
        for _ in range(count):
            self._skip(_STRUCT, 1)

    def _value(self, kind: int, wanted: Wanted | None, deep: int, *, inline: bool = False) -> Any:
        if deep > _DEEPEST:
            raise ValueError("lists within lists without end")
        self._count()
        if kind in (_LIST, _SET):
            count, item = self._list_head()
            return [self._value(item, wanted, deep + 1) for _ in range(count)]
        if (kind == _STRUCT) != (wanted is not None):
            raise ValueError(f"a field of type {kind} where another is due")
        if kind in _INTEGERS:
            return self.zigzag()
        if kind == _BINARY:
            return self.take(self.varint())
        if wanted is not None:
            return self.struct(wanted, deep + 1)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE if inline else self._byte() == _TRUE
        self._skip(kind, deep, inline=inline)
        return None

    def _skip(self, kind: int, deep: int, *, inline: bool = False) -> None:
        if deep > _DEEPEST:
            raise ValueError("structures within structures without end")
        self._count()
        if kind in _INTEGERS:
            self.varint()
        elif kind == _BINARY:
            self._advance(self.varint())
        elif kind == _STRUCT:
            usual = self._usual.match(self._buffer, self.at) if self._usual is not None else None
            if usual is not None:
                self.at = usual.end()
                return
            while head := self._byte():
                if not head >> 4:
                    self.varint()
                self._skip(head & 15, deep + 1, inline=True)
        elif kind in (_LIST, _SET):
            count, item = self._list_head()
            for _ in range(count):
                self._skip(item, deep + 1)
        elif kind == _MAP:
            count = self.varint()
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

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {_MOST_VALUES} values")

    def _list_head(self) -> tuple[int, int]:
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self.varint()
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

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self._advance(size)
        return self._buffer[self.at - size : self.at]

    def varint(self) -> int:
        """A number without a sign."""
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def zigzag(self) -> int:
        """A number with a sign."""
        value = self.varint()
        return (value >> 1) ^ -(value & 1)
