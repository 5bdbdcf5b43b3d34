"""LitData's ``json`` leaves: lists and dicts as one value, in JSON or in a compact binary of LitData's own.

The binary is a tag and what it says: a count and the values for lists of one type, pairs for dicts, rows for lists of
dicts with the same keys. Lengths and counts are uint32, all little-endian. Nothing is taken before it is known to be
there, and nesting is bounded.
"""

from __future__ import annotations

import json
import struct
from typing import Any

_JSON, _TEXTS, _INTS, _FLOATS, _BOOLS, _DICT, _ROWS, _TEXT, _INT, _FLOAT, _BOOL, _NONE = range(12)
_CELL_NONE, _CELL_TEXT, _CELL_INT, _CELL_FLOAT, _CELL_BOOL = range(0x10, 0x15)
_FIRST_OF_JSON = 0x21
_DEEPEST = 100
_CUT = "the nested value is cut off"


def parse_nested(data: bytes) -> Any:
    """The value. ``ValueError``: the bytes are none."""
    if not data or data[0] >= _FIRST_OF_JSON:
        return _json(data)
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise ValueError(f"{len(data) - reader.at} bytes are behind the nested value")
    return value


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def value(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ValueError(f"nested more than {_DEEPEST} deep")
        tag = self._take(1)[0]
        if tag in (_INTS, _FLOATS):
            count = self._count(8)
            return list(struct.unpack(f"<{count}{'q' if tag == _INTS else 'd'}", self._take(8 * count)))
        if tag == _TEXTS:
            return [self._text() for _ in range(self._count(4))]
        if tag == _BOOLS:
            return [byte != 0 for byte in self._take(self._count(1))]
        if tag == _DICT:
            return {self._text(): self.value(depth + 1) for _ in range(self._count(5))}
        if tag == _ROWS:
            return self._rows()
        if tag == _JSON:
            return _json(self._take(self._count(1)))
        if tag > _NONE:
            raise ValueError(f"a nested value of the unknown kind {tag}")
        return self._scalar(tag - _TEXT)

    def _rows(self) -> list[dict[str, Any]]:
        count = self._count(1)
        keys = [self._text() for _ in range(self._count(4))]
        if not keys or count * len(keys) > len(self._data) - self.at:
            raise ValueError(_CUT)
        order = (_CELL_TEXT, _CELL_INT, _CELL_FLOAT, _CELL_BOOL, _CELL_NONE)
        rows = []
        for _ in range(count):
            row = {}
            for key in keys:
                tag = self._take(1)[0]
                if tag not in order:
                    raise ValueError(f"a cell of the unknown kind {tag}")
                row[key] = self._scalar(order.index(tag))
            rows.append(row)
        return rows

    def _scalar(self, kind: int) -> Any:
        """``kind``: text, int, float, bool or none, in this order."""
        if kind == 0:
            return self._text()
        if kind == 1:
            return int.from_bytes(self._take(8), "little", signed=True)
        if kind == 2:
            return struct.unpack("<d", self._take(8))[0]
        return self._take(1)[0] != 0 if kind == 3 else None

    def _text(self) -> str:
        return str(self._take(self._count(1)), "utf-8")

    def _count(self, each: int) -> int:
        """A count of things that take at least ``each`` bytes."""
        count = int.from_bytes(self._take(4), "little")
        if count * each > len(self._data) - self.at:
            raise ValueError(_CUT)
        return count

    def _take(self, size: int) -> bytes:
        start = self.at
        self.at += size
        if self.at > len(self._data):
            raise ValueError(_CUT)
        return self._data[start : self.at]
