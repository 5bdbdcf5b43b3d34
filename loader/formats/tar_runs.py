"""Runs of plain tar headers, checked many at once.

Nearly every header of an archive is of one kind: a regular file with the magic ``ustar``, its numbers filled in as all
common writers do it, and what it tells in its own block. Where such members are small and many, their headers are
looked for in windows of the archive (the blocks that have the magic where the last header had it), checked in arrays,
and followed from one to the next. A run ends before the first block that is not exactly such a header; what that is,
is for the walk that looks at headers one by one (:mod:`.tar`), which takes everything this module takes, as it does.

Layout of the 512 bytes as 64 little-endian words: 0-12 name, 15 and 16 size, 18 and 19 checksum, type flag and the
link's name, 32 magic, 43-62 prefix of the name (IEEE Std 1003.1, "ustar Interchange Format").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .abc import Bytes, Ready
from .tar_header import BLOCK

Words = npt.NDArray[Any]
"""Little-endian ``uint64``."""
Places = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Columns = Sequence[Words]
"""Of shape ``(rows,)``; a column that is the same in all rows may be of shape ``(1,)``."""

_WORDS = BLOCK // 8
_NAME = 100
_NAME_WORDS = 13
_MAGIC = 32
_PREFIX, _PREFIX_END = 43, 63
_POSIX, _GNU = 0x00_7261747375, 0x20_7261747375

_FIRST = 16
"""Plain headers in a row after which a run is looked for, where members are small."""
_PATIENCE = 1024
"""The same, where that found little time and again."""
_SPARSE = 32 << 10
"""Bytes from header to header, on average, from which on it costs less to go from one to the next."""
_WORTH = 64
"""Members of a run that was worth it."""
_LEAST, _MOST = 64 << 10, 4 << 20
"""Bytes of the first window, and of any."""
_TILE = 16
"""Headers that are compared at a time: short rows cost numpy more than what is in them."""


class Run(NamedTuple):
    """Plain members that follow each other."""

    headers: Places
    """Offsets."""
    sizes: Places
    """Of the payloads, in bytes."""
    names: Columns
    """The bytes of the names, zeros behind them: a column for each eight bytes."""
    prefixes: Columns | None
    """The same of what names are continued from, whose first byte is the second one here; ``None``: nothing."""
    end: int
    """Where the next header should be."""

    def name(self, i: int) -> bytes:
        """The full name of member ``i``."""
        name = row_bytes(self.names, i)[:_NAME].split(b"\0", 1)[0]
        if self.prefixes is None:
            return name
        prefix = row_bytes(self.prefixes, i)[1:156].split(b"\0", 1)[0]
        return prefix + b"/" + name if prefix else name


def row_bytes(columns: Columns, i: int) -> bytes:
    """What row ``i`` holds, without the zeros behind it."""
    return b"".join(column[i if len(column) > 1 else 0].tobytes() for column in columns).rstrip(b"\0")


def words_of(data: Bytes) -> Words:
    """The whole blocks of an archive as words, shape ``(blocks, 64)``."""
    words: Words = data[: len(data) // BLOCK * BLOCK].view("<u8").reshape(-1, _WORDS)
    return words


class RunFinder:
    """Called behind each plain header of a walk; takes runs of them where they pay."""

    def __init__(self, data: Bytes, ready: Ready, take: Callable[[Run], None]) -> None:
        self._words = words_of(data)
        self._size = len(data)
        self._ready = ready
        self._take = take
        self._from = 0
        self._seen = 0
        self._wait = _FIRST
        self._room = Scratch()

    def __call__(self, offset: int) -> int:
        """The offset from which the walk goes on: ``offset`` itself, or the end of the runs behind it."""
        self._seen += 1
        if self._seen < self._wait:
            return offset
        if offset - self._from <= _SPARSE * self._seen:
            begun, taken = offset, 0
            window = _LEAST
            while offset < self._size:
                stop = min(offset + window, self._size)
                self._ready(offset, stop)
                run = find_run(self._words, self._size, offset, stop, self._room)
                if run is None:
                    break
                self._take(run)
                taken += len(run.sizes)
                offset = run.end
                if offset < stop or offset - begun > _SPARSE * taken:
                    break
                window = min(2 * window, _MOST)
            self._wait = _FIRST if taken >= _WORTH else min(2 * self._wait, _PATIENCE)
        self._from, self._seen = offset, 0
        return offset


def find_run(words: Words, size: int, offset: int, stop: int, room: Scratch) -> Run | None:
    """The plain members whose headers follow each other from ``offset`` on, as far as they begin before ``stop``;
    ``None`` if there is none. ``size``: of the archive, in bytes. Looks at nothing outside ``offset .. stop``."""
    window = words[offset // BLOCK : stop // BLOCK]
    if not len(window) or not _has_magic(window.item(0, _MAGIC)):
        return None
    blocks = np.flatnonzero(window[:, _MAGIC] == window[0, _MAGIC])
    headers = _Headers(window, blocks, room)
    sizes, sound = headers.checked()
    behind = blocks + 1 + (sizes + (BLOCK - 1) >> 9)
    members = chain(blocks, behind, sound & (sizes <= size - offset - BLOCK * (blocks + 1)))
    behind = behind[members]
    if not len(behind):
        return None
    sizes = np.broadcast_to(sizes, blocks.shape)[members]
    names, prefixes = headers.names(members), headers.prefixes(members)
    return Run(offset + BLOCK * blocks[members], sizes, names, prefixes, offset + BLOCK * behind.item(-1))


def chain(blocks: Places, behind: Places, sound: Flags) -> slice | Places:
    """Which of ``blocks`` are met on the way that begins at the first one and goes on ``behind`` each, up to one that
    is not ``sound`` or none of them. A member may hold an archive, whose headers are passed over."""
    first_bad = len(blocks) if sound.all() else int(sound.argmin())
    apart = np.flatnonzero(behind[:-1] != blocks[1:])
    if not len(apart) or first_bad <= apart[0]:
        return slice(first_bad)
    at = int(apart[0])
    following = np.searchsorted(blocks, behind)
    found = following < len(blocks)
    found[found] = blocks[following[found]] == behind[found]
    if not found[at]:
        return slice(at + 1)
    on_way = list(range(at + 1))
    following, found, sound = following.tolist(), found.tolist(), sound.tolist()
    while found[at] and sound[following[at]]:
        at = following[at]
        on_way.append(at)
    return np.array(on_way)


def _has_magic(word: int) -> bool:
    """Whether bytes 1 to 6 of this word are the magic, of POSIX or of GNU."""
    return word >> 8 & 0xFFFFFFFFFFFF in (_POSIX, _GNU)


class _Headers:
    """Blocks that have one magic, side by side."""

    def __init__(self, window: Words, blocks: Places, room: Scratch) -> None:
        count = len(blocks)
        padded = room.rows(-(-count // _TILE) * _TILE)
        window.take(blocks, axis=0, out=padded[:count], mode="clip")
        padded[count:] = padded[0]
        self._first = padded[0].copy()
        varied = np.flatnonzero(_varies(padded, room)).tolist()
        self._varied: dict[int, Words] = dict(zip(varied, padded[:count].T[varied], strict=True))

    def checked(self) -> tuple[Places, Flags]:
        """The sizes, and which headers are plain and add up to their checksums."""
        digits, rest, last = self._word(15) >> 32 | self._word(16) << 32, self._word(16) >> 32, self._word(19)
        checksum = self._word(18) >> 32 | last << 32
        sound: Flags = (
            (digits & 0xF8F8F8F8F8F8F8F8 == 0x3030303030303030)
            & (rest & 0xDFF8F8F8 == 0x00303030)  # the last three digits, and a zero byte or a space
            & (checksum & 0xFFFFF8F8F8F8F8F8 == 0x2000303030303030)
            & (last >> 32 & 0xFF == 0x30)
        )
        sizes = _octal(digits) << 9 | (rest & 7) << 6 | rest >> 5 & 0o70 | rest >> 16 & 7
        declared = _octal(checksum & 0x0000FFFFFFFFFFFF) >> 6
        return sizes.astype(np.int64), sound & (self._sums() + 8 * 0x20 == declared + _byte_sums(checksum))

    def names(self, members: slice | Places) -> Columns:
        """See :class:`Run`."""
        used = max((i for i in range(_NAME_WORDS) if i in self._varied or self._first[i]), default=0) + 1
        columns = self._columns(range(used), members)
        if used == _NAME_WORDS:
            columns[-1] = columns[-1] & 0xFFFFFFFF
        return columns

    def prefixes(self, members: slice | Places) -> Columns | None:
        """See :class:`Run`."""
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


class Scratch:
    """Memory that the search of one window leaves for the next one's."""

    def __init__(self) -> None:
        self._rows = np.empty((0, _WORDS), "<u8")
        self._flags = np.empty((0, _TILE * _WORDS), np.bool_)

    def rows(self, count: int) -> Words:
        """Room for so many headers, a multiple of :data:`_TILE`."""
        if len(self._rows) < count:
            self._rows = np.empty((count, _WORDS), "<u8")
            self._flags = np.empty((count // _TILE, _TILE * _WORDS), np.bool_)
        return self._rows[:count]

    def flags(self, tiles: int) -> Flags:
        """Room for a flag for each word of so many tiles."""
        return self._flags[:tiles]


def _varies(headers: Words, room: Scratch) -> Flags:
    """Which words are not the same in all headers. ``headers``: a multiple of :data:`_TILE`."""
    tiles = headers.reshape(-1, _TILE * _WORDS)
    varies: Flags = (headers[:_TILE] != headers[0]).any(axis=0)
    if len(tiles) > 1:
        other = np.not_equal(tiles[1:], tiles[0], out=room.flags(len(tiles) - 1))
        varies |= np.logical_or.reduce(other, axis=0).reshape(_TILE, _WORDS).any(axis=0)
    return varies


def _octal(digits: Words) -> Words:
    """The numbers that eight octal digits make, the first one in the lowest byte."""
    pairs = ((digits & 0x0707070707070707) << 3) + (digits >> 8 & 0x0007000700070007) & 0x003F003F003F003F
    fours = (pairs << 6) + (pairs >> 16) & 0x00000FFF00000FFF
    return (fours << 12) + (fours >> 32) & 0xFFFFFF


def _byte_sums(words: Words) -> Words:
    """The sum of the eight bytes of each word."""
    pairs = (words & 0x00FF00FF00FF00FF) + (words >> 8 & 0x00FF00FF00FF00FF)
    return pairs * np.uint64(0x0001000100010001) >> 48
