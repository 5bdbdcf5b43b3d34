"""Many tar headers side by side, as columns of words, in which they are checked at once. See :mod:`.tar_runs`.

The 512 bytes of a header are 64 little-endian words: 0-12 name, 15 and 16 size, 18 and 19 checksum, type flag and the
link's name, 32 magic, 43-62 prefix of the name (IEEE Std 1003.1, "ustar Interchange Format").
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .abc import Bytes
from .tar_header import BLOCK

Words = npt.NDArray[Any]
"""Little-endian ``uint64``."""
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Columns = Sequence[Words]
"""Of shape ``(rows,)``; a column that is the same in all rows may be of shape ``(1,)``."""

_WORDS = BLOCK // 8
_NAME_WORDS = 13
_MAGIC = 32
_PREFIX, _PREFIX_END = 43, 63
_REGULAR, _EXTENDED = ord("0"), ord("x")
_TIME = int.from_bytes(b" mtime", "little")
_POSIX, _GNU = 0x00_7261747375, 0x20_7261747375

_TILE = 16
"""Headers that are compared together: short rows cost numpy more than what is in them."""


def words_of(data: Bytes) -> Words:
    """The whole blocks of an archive as words, shape ``(blocks, 64)``."""
    words: Words = data[: len(data) // BLOCK * BLOCK].view("<u8").reshape(-1, _WORDS)
    return words


def row_bytes(columns: Columns, i: int) -> bytes:
    """What row ``i`` holds, without the zeros behind it."""
    return b"".join(column[i if len(column) > 1 else 0].tobytes() for column in columns).rstrip(b"\0")


class Room:
    """Memory for the headers of one window after the other."""

    def __init__(self) -> None:
        self._rows = np.empty((0, _WORDS), "<u8")

    def rows(self, count: int) -> Words:
        """So many of them, which hold anything."""
        if len(self._rows) < count:
            self._rows = np.empty((count, _WORDS), "<u8")
        return self._rows[:count]


def has_magic(header: Words) -> bool:
    """Whether a header of 64 words has the magic of POSIX, or of GNU."""
    return header.item(_MAGIC) >> 8 & 0xFFFFFFFFFFFF in (_POSIX, _GNU)


class HeaderColumns:
    """Blocks that have the magic of the first one, as columns of words: those that are the same in all as one value."""

    def __init__(self, first: Words, room: Room) -> None:
        self._first = first.copy()
        self._tile = np.tile(first, _TILE)
        self._room = room
        self._parts: list[tuple[int, dict[int, Words]]] = []
        self._varied: dict[int, Words] = {}

    def collect(self, window: Words) -> Places:
        """Take those of a window's blocks; which they are."""
        blocks = np.flatnonzero(window[:, _MAGIC] == self._first[_MAGIC])
        count, padded = len(blocks), -(-len(blocks) // _TILE) * _TILE
        rows = self._room.rows(padded)
        window.take(blocks, axis=0, out=rows[:count], mode="clip")
        rows[count:] = self._first
        other = np.logical_or.reduce(rows.reshape(-1, _TILE * _WORDS) != self._tile, axis=0)
        varied = np.flatnonzero(other.reshape(_TILE, _WORDS).any(axis=0)).tolist()
        self._parts.append((count, dict(zip(varied, rows[:count].T[varied], strict=True))))
        return blocks

    def join(self) -> None:
        """Make columns of what was collected, once all is."""
        total = sum(count for count, _ in self._parts)
        for number in sorted(set().union(*(columns for _, columns in self._parts))):
            joined, end = np.full(total, self._first[number]), 0
            for count, columns in self._parts:
                if number in columns:
                    joined[end : end + count] = columns[number]
                end += count
            self._varied[number] = joined

    def checked(self) -> tuple[Places, Flags]:
        """The sizes, and which headers are plain and add up to their checksums."""
        digits, rest, last = self._word(15) >> 32 | self._word(16) << 32, self._word(16) >> 32, self._word(19)
        checksum = self._word(18) >> 32 | last << 32
        kind = last >> 32 & 0xFF
        sound: Flags = (
            (digits & 0xF8F8F8F8F8F8F8F8 == 0x3030303030303030)
            & (rest & 0xDFF8F8F8 == 0x00303030)  # the last three digits, and a zero byte or a space
            & (checksum & 0xFFFFF8F8F8F8F8F8 == 0x2000303030303030)
            & ((kind == _REGULAR) | (kind == _EXTENDED))
        )
        sizes = _octal(digits) << 9 | (rest & 7) << 6 | rest >> 5 & 0o70 | rest >> 16 & 7
        declared = _octal(checksum & 0x0000FFFFFFFFFFFF) >> 6
        return sizes.astype(np.int64), sound & (self._sums() + 8 * 0x20 == declared + _byte_sums(checksum))

    def extended(self, count: int) -> Places:
        """Which of the ``count`` headers are extended ones, that say more of the member behind them."""
        kind = self._word(19) >> 32 & 0xFF
        found = np.flatnonzero(kind == _EXTENDED)
        return found if len(kind) > 1 or not len(found) else np.arange(count)

    def names(self, members: slice | Places) -> Columns:
        """See :class:`.tar_runs.Run`."""
        used = max((i for i in range(_NAME_WORDS) if i in self._varied or self._first[i]), default=0) + 1
        columns = self._columns(range(used), members)
        if used == _NAME_WORDS:
            columns[-1] = columns[-1] & 0xFFFFFFFF
        return columns

    def prefixes(self, members: slice | Places) -> Columns | None:
        """See :class:`.tar_runs.Run`."""
        if self._first.item(_MAGIC) >> 8 & 0xFFFFFFFFFFFF != _POSIX or not (self._word(_PREFIX) & 0xFF00).any():
            return None
        return self._columns(range(_PREFIX, _PREFIX_END), members)

    def _columns(self, numbers: Iterable[int], members: slice | Places) -> list[Words]:
        return [self._varied[i][members] if i in self._varied else self._first[i : i + 1] for i in numbers]

    def _word(self, number: int) -> Words:
        """One column, or a single value that is the same in all."""
        varied = self._varied.get(number)
        return self._first[number : number + 1] if varied is None else varied

    def _sums(self) -> Words:
        """Of all bytes of each header, or one sum where all are the same."""
        alike = self._first.copy()
        alike[list(self._varied)] = 0
        sums: Words = alike.view(np.uint8).sum(dtype=np.uint64, keepdims=True)
        for column in self._varied.values():
            sums = sums + _byte_sums(column)
        return sums


def only_times(words: Words, blocks: Places, sizes: Places) -> Flags:
    """Which bodies of extended headers tell a time of change and nothing else: ``28 mtime=1700000000.1234567``.

    Python's ``tarfile`` writes one before each member whose time is a float, and so does WebDataset's writer.
    """
    there = (blocks < len(words)) & (sizes >= 10) & (sizes < 100)
    blocks, sizes = np.where(there, blocks, 0), np.where(there, sizes, 10)
    first, length = words[blocks, 0], ord("0") + sizes // 10 | ord("0") + sizes % 10 << 8
    only: Flags = (
        there
        & (first >> 16 == _TIME)
        & (first.astype(np.int64) & 0xFFFF == length)
        & (words[blocks, 1] & 0xFF == ord("="))
        & (words.view(np.uint8)[blocks, sizes - 1] == ord("\n"))
    )
    return only


def _octal(digits: Words) -> Words:
    """The numbers that eight octal digits make, the first one in the lowest byte."""
    pairs = ((digits & 0x0707070707070707) << 3) + (digits >> 8 & 0x0007000700070007) & 0x003F003F003F003F
    fours = (pairs << 6) + (pairs >> 16) & 0x00000FFF00000FFF
    return (fours << 12) + (fours >> 32) & 0xFFFFFF


def _byte_sums(words: Words) -> Words:
    """The sum of the eight bytes of each word."""
    pairs = (words & 0x00FF00FF00FF00FF) + (words >> 8 & 0x00FF00FF00FF00FF)
    return pairs * np.uint64(0x0001000100010001) >> 48
