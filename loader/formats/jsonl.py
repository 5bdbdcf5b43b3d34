"""JSON Lines: one JSON object a line (jsonlines.org, ndjson), UTF-8; also compressed (gzip, bzip2, xz, Zstandard).

A sample is one line, its fields are the object's names. Lines end at a line feed and nowhere else: a carriage return
before it is white space, and U+2028, U+2029 and U+0085 are characters like others. A byte order mark at the start and
blank lines are passed over; the last line needs no end. Lines may be of any length, members and frames of a compressed
file may end anywhere.

Values are those of Python's ``json``: integers exact whatever their size, numbers with a fraction or an exponent
``float`` (infinite where they are too large for it, as ``1e999`` is), ``null`` is ``None``, of a name that is there
twice the last value counts, and ``NaN``, ``Infinity`` and ``-Infinity`` are numbers, since Python writes them. (msgspec
reads the lines; ``json`` reads those that it refuses.)

On purpose different from other readers:

* A line that is no JSON object (broken, or an array or a number) is damage of that sample alone, and its error names
  byte and line number. Nothing is guessed from other lines: no common schema, no ``None`` for a name that is absent.
* With ``fields=[...]`` the other values are passed over, and only their syntax is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Self, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from ..sample import Sample
from .abc import Bytes, Format, KeptIndex, Ready, all_there
from .offsets import OffsetIndex, Offsets, joined, offset_dtype
from .packed import unpack

_BOM = b"\xef\xbb\xbf"
_END = 10
_FEED = np.bytes_(b"\n")
_STEP = 1 << 20
"""Bytes that are looked through, and waited for, at a time."""
_BLOCK = 256
_FEW = 2000 if hasattr(np, "strings") else 0  # numpy 2
_MANY = 5000
"""Lines in a step. Where there are few, it is fastest to look for the first end in each block of bytes, and then for
others behind it; where there are not many, to look for words of eight bytes that hold the end of one."""
_ROUNDS = 10
"""Line ends in one block from which on there are not few."""
_SPACE = np.isin(np.arange(256), list(b" \t\r\n"))
_blank = re.compile(rb"[ \t\r]*").match
_first_line = re.compile(rb'(?:[ \t\r]*\n)*[ \t\r]*\{[ \t]*(?:\}|"(?:[^"\\\x00-\x1f]|\\.)*"[ \t]*:)').match


@dataclass(slots=True)
class LineIndex(OffsetIndex):
    """Sample ``i`` is the line that starts at ``offsets[i]``; up to ``offsets[i + 1]`` only white space follows it."""

    kind: ClassVar[str] = "jsonl"
    before: npt.NDArray[np.int64]
    """How many lines end before each step of the shard."""

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + self.before.nbytes + 300

    def line(self, data: memoryview, offset: int) -> int:
        """The number of the line that starts at ``offset``, from 1 on, blank ones included."""
        step = offset // _STEP
        ahead = np.frombuffer(data[step * _STEP : offset], np.uint8)
        return self.before.item(step) + int(np.count_nonzero(ahead == _END)) + 1

    def extra(self) -> bytes:
        return self.before.astype("<i8").tobytes()

    @classmethod
    def rebuilt(cls, offsets: Offsets, extra: bytes, size: int) -> Self:
        if len(extra) != 8 * _steps(size):
            raise ValueError("a kept index of a shard of another size")
        return cls(offsets, np.frombuffer(extra, "<i8").copy())


@dataclass(frozen=True)
class Jsonl(Format):
    """The format has no options."""

    name: ClassVar[str] = "jsonl"
    streams: ClassVar[bool] = True
    kept_index: ClassVar[type[KeptIndex] | None] = LineIndex

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        return _first_line(head.removeprefix(_BOM)) is not None

    def unpack(self, data: Bytes, url: str, *, limit: int | None = None) -> Bytes:
        return unpack(data, url, limit)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> LineIndex:
        size = len(data)
        before = np.zeros(_steps(size), np.int64)
        starts = joined(_line_starts(data, ready, before), size, size)
        return LineIndex(starts, np.concatenate([[0], np.cumsum(before[:-1])]) if size else before)

    def source(self, data: Bytes, index: LineIndex) -> memoryview:
        return data.data

    def read(
        self, source: memoryview, index: LineIndex, i: int, url: str, fields: frozenset[str] | None = None
    ) -> Sample:
        begin = index.offsets.item(i)
        line = source[begin : index.offsets.item(i + 1)]
        try:
            return Sample(_select(_decoder(fields).decode(line), fields))
        except (msgspec.MsgspecError, RecursionError):
            pass  # perhaps NaN, which msgspec refuses
        try:
            value = json.loads(str(line, "utf-8"))
        except (ValueError, RecursionError) as e:
            what = f"line {index.line(source, begin)} is no JSON: {e}"
            raise FormatError(what, url=url, offset=begin) from e
        if not isinstance(value, dict):
            what = f"line {index.line(source, begin)} is no JSON object but a {type(value).__name__}"
            raise FormatError(what, url=url, offset=begin)
        return Sample(_select(value, fields))


def _select(row: dict[str, Any], fields: frozenset[str] | None) -> dict[str, Any]:
    return row if fields is None else {name: row[name] for name in row if name in fields}


@lru_cache(maxsize=64)
def _decoder(fields: frozenset[str] | None) -> msgspec.json.Decoder[dict[str, Any]]:
    if fields is None or not all(map(str.isascii, fields)):  # msgspec finds no other names in a type
        return msgspec.json.Decoder(dict[str, Any])
    # what is not in the type is passed over without making objects of it
    wanted: Any = TypedDict("wanted", dict.fromkeys(sorted(fields), Any), total=False)  # type: ignore[misc]
    return msgspec.json.Decoder(wanted)


def _steps(size: int) -> int:
    return -(-size // _STEP)


def _line_starts(data: Bytes, ready: Ready, counts: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[Any]]:
    """Runs of the offsets at which lines start that are not blank. Fills ``counts`` with each step's line ends."""
    size = len(data)
    dtype = offset_dtype(size)
    view = data.data
    ready(0, min(len(_BOM), size))
    begin = len(_BOM) if data[: len(_BOM)].tobytes() == _BOM else 0
    line_ends = _LineEnds()
    for step, low in enumerate(range(0, size, _STEP)):
        piece = data[low : low + _STEP]
        ready(low, low + len(piece))
        ends = low + line_ends.find(piece)
        counts[step] = len(ends)
        if len(ends):
            starts = np.concatenate([[begin], ends[:-1] + 1])
            begin = int(ends[-1]) + 1
            yield _not_blank(data, view, starts, ends).astype(dtype)
    if begin < size:
        yield _not_blank(data, view, np.array([begin]), np.array([size])).astype(dtype)


class _LineEnds:
    """Where line feeds are, in one piece of a shard after the other."""

    def __init__(self) -> None:
        self._held = np.empty(0, f"S{_BLOCK}")
        self._expected = 0

    def find(self, piece: Bytes) -> npt.NDArray[np.int64]:
        """Their offsets in the next piece, which is taken to have about as many as the last one had."""
        if self._expected < _FEW:
            whole = len(piece) // _BLOCK * _BLOCK
            rest = np.flatnonzero(piece[whole:] == _END) + whole
            ends = np.concatenate([self._few(piece[:whole]), rest])
        else:
            ends = _many_ends(piece, self._expected)
        self._expected = len(ends)
        return ends

    def _few(self, piece: Bytes) -> npt.NDArray[np.int64]:
        """Those of whole blocks. numpy looks for a character in a string as C's ``memchr`` does, at memory's speed."""
        texts = piece.view(f"S{_BLOCK}")
        if len(self._held) < len(texts):
            self._held = np.empty(len(texts), texts.dtype)
        at = np.strings.find(texts, _FEED)
        found = np.flatnonzero(at >= 0)
        at, starts = at[found], found * _BLOCK
        rounds = [starts + at]
        while len(at):
            if len(rounds) > _ROUNDS:
                return np.flatnonzero(piece == _END)
            texts = texts.take(found, out=self._held[: len(found)], mode="clip")
            at = np.strings.find(texts, _FEED, at + 1)
            found = np.flatnonzero(at >= 0)
            at, starts = at[found], starts[found]
            rounds.append(starts + at)
        ends = np.concatenate(rounds)
        if len(rounds) > 2:
            ends.sort()
        return ends


def _many_ends(piece: Bytes, expected: int) -> npt.NDArray[np.int64]:
    """Where line feeds are, about as many as ``expected``."""
    hits = piece == _END
    if expected >= _MANY or len(hits) % 8:
        return np.flatnonzero(hits)
    words = np.flatnonzero(hits.view(np.uint64) != 0)
    places = np.flatnonzero(hits.reshape(-1, 8)[words])
    ends: npt.NDArray[np.int64] = words[places >> 3] * 8 + (places & 7)
    return ends


def _not_blank(
    data: Bytes, view: memoryview, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Those of ``starts`` whose lines hold more than white space."""
    suspects = np.flatnonzero(_SPACE[data[starts]])
    if not len(suspects):
        return starts
    blank = ends[suspects] - starts[suspects] <= 1
    for which in np.flatnonzero(~blank).tolist():
        start, end = starts.item(suspects[which]), ends.item(suspects[which])
        match = _blank(view, start, end)
        blank[which] = match is not None and match.end() == end
    return np.delete(starts, suspects[blank])
