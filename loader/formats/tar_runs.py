"""Runs of plain tar headers, checked many at once.

Nearly every header of an archive is of one kind: a regular file with the magic ``ustar``, its numbers filled in as all
common writers do it, and all that matters in its own block. Where such members are small and many, their headers are
looked for in windows of the archive (the blocks that have the magic where the last header had it), checked in arrays,
and followed from one to the next. A run ends before the first block that is not exactly such a header; what that is,
is for the walk that looks at headers one by one (:mod:`.tar`), which takes everything this module takes, as it does.

Layout of the 512 bytes as 64 little-endian words: 0-12 name, 15 and 16 size, 18 and 19 checksum, type flag and the
link's name, 32 magic, 43-62 prefix of the name (IEEE Std 1003.1, "ustar Interchange Format").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
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
_REGULAR, _EXTENDED = ord("0"), ord("x")
_TIME = int.from_bytes(b" mtime", "little")
_POSIX, _GNU = 0x00_7261747375, 0x20_7261747375

_AT_ONCE = 2 << 20
"""Bytes whose headers are copied together: what fits a cache."""
_TILE = 16
"""Headers that are compared together: short rows cost numpy more than what is in them."""


@dataclass(frozen=True)
class Pace:
    """When runs are looked for, and how far ahead."""

    first: int = 16
    """Plain headers in a row after which a run is looked for, where members are small."""
    patience: int = 1024
    """The same, where that found little time and again."""
    worth: int = 64
    """Members of a run that was worth it."""
    sparse: int = 32 << 10
    """Bytes from header to header, on average, from which on it costs less to go from one to the next."""
    least: int = 64 << 10
    """Bytes of the first window."""
    most: int = 16 << 20
    """Bytes of any window."""


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
    full: bool
    """Whether the run ended because the window did."""

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

    def __init__(self, data: Bytes, ready: Ready, take: Callable[[Run], None], pace: Pace = Pace()) -> None:
        self._words = words_of(data)
        self._size = len(data)
        self._ready = ready
        self._take = take
        self._pace = pace
        self._from = 0
        self._seen = 0
        self._wait = pace.first
        self._room = Room()

    def __call__(self, offset: int) -> int:
        """The offset from which the walk goes on: ``offset`` itself, or the end of the runs behind it."""
        self._seen += 1
        if self._seen < self._wait:
            return offset
        if offset - self._from <= self._pace.sparse * self._seen:
            taken, offset = self._runs(offset)
            self._wait = self._pace.first if taken >= self._pace.worth else min(2 * self._wait, self._pace.patience)
        self._from, self._seen = offset, 0
        return offset

    def _runs(self, offset: int) -> tuple[int, int]:
        """Takes runs from ``offset`` on, as long as they fill their windows; how many members, and where they end."""
        begun, taken, window = offset, 0, self._pace.least
        while offset < self._size:
            stop = min(offset + window, self._size)
            run = find_run(self._words, self._size, offset, stop, self._ready, self._room)
            if run is None:
                break
            self._take(run)
            taken += len(run.sizes)
            offset = run.end
            if not run.full or offset - begun > self._pace.sparse * taken:
                break
            window = min(2 * window, self._pace.most)
        return taken, offset


class Room:
    """Memory for the headers of one window after the other."""

    def __init__(self) -> None:
        self._rows = np.empty((0, _WORDS), "<u8")

    def rows(self, count: int) -> Words:
        """So many of them, which hold anything."""
        if len(self._rows) < count:
            self._rows = np.empty((count, _WORDS), "<u8")
        return self._rows[:count]


def find_run(words: Words, size: int, offset: int, stop: int, ready: Ready, room: Room) -> Run | None:
    """The plain members whose headers follow each other from ``offset`` on, as far as they begin before ``stop``;
    ``None`` if there is none. ``size``: of the archive, in bytes. Looks at nothing more than a block behind ``stop``.
    """
    headers: _Headers | None = None
    places: list[Places] = []
    for at in range(offset, stop, _AT_ONCE):
        end = min(at + _AT_ONCE, stop)
        ready(at, min(end + BLOCK, size))
        window = words[at // BLOCK : end // BLOCK]
        if headers is None:
            if not len(window) or not _has_magic(window.item(0, _MAGIC)):
                return None
            headers = _Headers(window[0], room)
        found = headers.collect(window)
        if not len(found):
            break
        places.append(found + (at - offset) // BLOCK)
    assert headers is not None
    headers.join()
    blocks = np.concatenate(places)
    sizes, sound = headers.checked()
    sizes = sizes if len(sizes) > 1 else np.full(len(blocks), sizes[0])
    sound = sound & (sizes <= size - offset - BLOCK * (blocks + 1))
    times = headers.extended(len(blocks))
    sound[times] &= _only_times(words, offset // BLOCK + 1 + blocks[times], sizes[times])
    behind = blocks + 1 + (sizes + (BLOCK - 1) >> 9)
    members = chain(blocks, behind, sound)
    full = len(behind[members]) > 0 and offset + BLOCK * behind[members].item(-1) >= stop
    if len(times):
        chained = np.zeros(len(blocks), np.bool_)
        chained[members] = True
        chained[times] = False
        members = np.flatnonzero(chained)
    behind = behind[members]
    if not len(behind):
        return None
    names, prefixes = headers.names(members), headers.prefixes(members)
    end = offset + BLOCK * behind.item(-1)
    return Run(offset + BLOCK * blocks[members], sizes[members], names, prefixes, end, full)


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


def _only_times(words: Words, blocks: Places, sizes: Places) -> Flags:
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
