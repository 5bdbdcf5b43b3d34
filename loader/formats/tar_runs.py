"""Runs of plain tar headers, checked many at once.

Nearly every header of an archive is of one kind: a regular file with the magic ``ustar``, its numbers filled in as all
common writers do it, and all that matters in its own block. Where such members are small and many, their headers are
looked for in windows of the archive (the blocks that have the magic where the last header had it), checked in arrays,
and followed from one to the next. A run ends before the first block that is not exactly such a header; what that is,
is for the walk that looks at headers one by one (:mod:`.tar`), which takes everything this module takes, as it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .abc import Bytes, Ready
from .tar_columns import Columns, Flags, HeaderColumns, Places, Room, Words, has_magic, only_times, row_bytes, words_of
from .tar_header import BLOCK

_NAME = 100
_AT_ONCE = 2 << 20
"""Bytes whose headers are copied together: what fits a cache."""


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


def find_run(words: Words, size: int, offset: int, stop: int, ready: Ready, room: Room) -> Run | None:
    """The plain members whose headers follow each other from ``offset`` on, as far as they begin before ``stop``;
    ``None`` if there is none. ``size``: of the archive, in bytes. Looks at nothing more than a block behind ``stop``.
    """
    headers: HeaderColumns | None = None
    places: list[Places] = []
    for at in range(offset, stop, _AT_ONCE):
        end = min(at + _AT_ONCE, stop)
        ready(at, min(end + BLOCK, size))
        window = words[at // BLOCK : end // BLOCK]
        if headers is None:
            if not len(window) or not has_magic(window[0]):
                return None
            headers = HeaderColumns(window[0], room)
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
    sound[times] &= only_times(words, offset // BLOCK + 1 + blocks[times], sizes[times])
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
