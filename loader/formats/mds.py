"""MDS shards, the format of mosaicml-streaming, version 2.

A shard is ``n`` (uint32), ``n + 1`` offsets (uint32), a JSON description of the columns, then the samples. A sample is
the sizes of its variable columns (uint32 each), then the values of all columns in order. See :mod:`.mds_columns` for
the values. The shard describes itself; the ``index.json`` beside it (see :mod:`.mds_listing`) adds the counts and names
of all shards, their digests, and how they are compressed.

A shard that is compressed as a whole is decompressed to memory first. gzip, bzip2 and Zstandard are told by their first
bytes; Brotli and raw Snappy have no magic number, so the index tells them, or ``Mds(compression="br")``.

On purpose different from mosaicml-streaming:

* Values are views where they can be (no copy, writable); images are handed out encoded and decoded on request.
* Offsets and sizes are checked before anything is read.
* A column whose encoding is not known, or holds pickles, is an error only when it is asked for.
* A shard that lies there raw is read so, whatever the index says of its compression.
* Shards of the kinds ``json``, ``csv`` and ``xsv`` are refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, Denied, FormatError, NotFound

from ..sample import Sample
from .abc import Bytes, Format, Joined, Objects, Ready, SampleIndex, all_there
from .listing import INDEX, tool_of
from .magic import codec_of
from .mds_columns import Column, Runs, make_column
from .mds_listing import read_mds_index
from .packed import CODECS, unpacked
from .packed_head import begins

_U32 = np.dtype("<u4")
_PEEK = 64
_LONGEST_TABLE = 64 << 20
"""Bytes; a compressed shard is looked into no further to tell whether it is one."""


@dataclass(slots=True)
class MdsIndex(SampleIndex):
    """Sample ``i`` lies at bytes ``offsets[i] .. offsets[i + 1]``. ``encodings`` and ``names`` are per column."""

    offsets: npt.NDArray[np.int64]
    names: tuple[str, ...]
    encodings: tuple[str, ...]
    allow_pickle: bool = False
    _columns: dict[str, Column | str] | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.offsets.nbytes + 2000

    @property
    def columns(self) -> dict[str, Column | str]:
        """Per name the column, or, where it cannot be read, why not."""
        if self._columns is None:
            self._columns = {
                name: _column_or_reason(name, encoding, self.allow_pickle)
                for name, encoding in zip(self.names, self.encodings, strict=True)
            }
        return self._columns

    def __reduce__(self) -> tuple[Any, ...]:
        return (MdsIndex, (self.offsets, self.names, self.encodings, self.allow_pickle))


@dataclass(frozen=True)
class Mds(Format):
    """``compression``: what compresses shards that do not tell it themselves, ``"br"`` or ``"snappy"``; a data set's
    index says it where it is read. ``allow_pickle``: read columns of the encoding ``pkl``, which runs code that the
    file chooses.

    Raises ``ConfigError`` for a compression that is not known.
    """

    name: ClassVar[str] = "mds"
    UNTOLD: ClassVar[frozenset[str]] = frozenset({"br", "snappy"})
    """The compressions that have no magic number."""
    compression: str | None = None
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        if self.compression is not None and self.compression.partition(":")[0] not in CODECS:
            known = ", ".join(sorted(CODECS))
            raise ConfigError(f"Mds(compression={self.compression!r}) is not known", hint=f"known: {known}")

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        table = _table(head)
        if len(head) >= 8 and table + _PEEK <= len(head):
            return _describes(head[table : table + _PEEK])
        if codec_of(data) is None:
            return _is_plain(data)
        if table > _LONGEST_TABLE:
            return False
        return _describes(begins(data, table + _PEEK)[table:])  # the table of a large shard is longer than its head

    @classmethod
    def beside(cls, objects: Objects, url: str) -> Mds | None:
        folder, _, name = url.rpartition("/")
        beside = f"{folder}/{INDEX}" if folder else INDEX
        try:
            raw = objects.read(beside)
        except (NotFound, Denied):
            return None
        if tool_of(raw) != "mds":
            return None
        packed = {row.names[0]: row.codec for row in read_mds_index(raw, beside)}
        return cls(compression=packed[name]) if packed.get(name) in cls.UNTOLD else None

    def completed(self, known: Format) -> Mds:
        if not isinstance(known, Mds) or self.compression is not None:
            return self
        return replace(self, compression=known.compression)

    def identity(self) -> str:
        return "Mds()"  # no option changes what a sample is

    def unpack(self, data: Bytes, url: str, *, limit: int | None = None) -> Bytes:
        if _is_plain(data):
            return data
        codec = codec_of(data) or (self.compression or "").partition(":")[0]
        return unpacked(codec, data, url, limit) if codec else data

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> MdsIndex:
        size = len(data)
        if size < 8:
            raise FormatError(f"{size} bytes are too few for an MDS shard", url=url, offset=0)
        n = int(data[:4].view(_U32)[0])
        table = 4 + 4 * (n + 1)
        if table > size:
            raise FormatError(f"declares {n} samples, for which its {size} bytes are too few", url=url, offset=0)
        offsets = data[4:table].view(_U32).astype(np.int64)
        if offsets[0] < table or offsets[-1] > size:
            raise FormatError(
                f"the samples should end at byte {offsets[-1]}, the shard has {size}: cut off or damaged",
                url=url,
                offset=4,
            )
        falling = np.flatnonzero(np.diff(offsets) < 0)
        if len(falling):
            i = int(falling[0])
            raise FormatError(f"the offset of sample {i + 1} lies before that of sample {i}", url=url, offset=8 + 4 * i)
        names, encodings = _header(data[table : int(offsets[0])].tobytes(), url, table)
        return MdsIndex(offsets, names, encodings, self.allow_pickle)

    def read(self, source: Bytes, index: MdsIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        begin, end = index.offsets[i : i + 2].tolist()
        columns = index.columns
        sizes = _sizes(source, columns, begin, end, url, i)
        at = end - sum(sizes)
        sample = Sample()
        for size, (name, column) in zip(sizes, columns.items(), strict=True):
            if fields is None or name in fields:
                if isinstance(column, str):
                    raise FormatError(column, url=url, offset=at, hint="leave it out with fields=[...]")
                try:
                    sample[name] = column.decode(source[at : at + size])
                except ValueError as e:
                    raise FormatError(f"column {name!r} of sample {i}: {e}", url=url, offset=at) from e
            at += size
        return sample

    def joined(self, source: Bytes, index: MdsIndex, field: str, url: str) -> Joined | None:
        runs = _runs(source, index, field)
        return None if runs is None else Joined(source, *runs)

    def kind(self, index: MdsIndex, name: str) -> str:
        column = index.columns.get(name)
        return column.kind if isinstance(column, Column) else ""


def _table(head: bytes) -> int:
    """Where the description of the columns starts."""
    return 8 + 4 * int.from_bytes(head[:4], "little")


def _describes(some: bytes) -> bool:
    """Whether a description of columns starts with these bytes."""
    return some[:1] == b"{" and b'"column_' in some


def _is_plain(data: Bytes) -> bool:
    at = _table(data[:4].tobytes())
    return len(data) >= 8 and _describes(data[at : at + _PEEK].tobytes())


def _sizes(data: Bytes, columns: dict[str, Column | str], begin: int, end: int, url: str, i: int) -> list[int]:
    """The size of each column's value, checked to fill the sample exactly."""
    fixed = [None if isinstance(c, str) else c.size for c in columns.values()]
    head = 4 * fixed.count(None)
    if begin + head > end:
        raise FormatError(f"sample {i} is too short for the sizes of its columns", url=url, offset=begin)
    variable = iter(data[begin : begin + head].view(_U32).tolist())
    sizes = [next(variable) if size is None else size for size in fixed]
    if begin + head + sum(sizes) != end:
        raise FormatError(
            f"the columns of sample {i} take {head + sum(sizes)} bytes, the sample has {end - begin}",
            url=url,
            offset=begin,
        )
    return sizes


def _runs(data: Bytes, index: MdsIndex, field: str) -> Runs | None:
    """Where the arrays of one column lie, in all samples at once; ``None`` for a column that is none of these, or does
    not tell. Each sample is checked to be filled exactly, as :func:`_sizes` does it for one."""
    columns = index.columns
    column = columns.get(field)
    if not isinstance(column, Column) or column.array is None:
        return None
    fixed = [None if isinstance(column, str) else column.size for column in columns.values()]
    begins, ends = index.offsets[:-1], index.offsets[1:]
    at = begins + 4 * fixed.count(None)
    good = at <= ends
    heads = np.where(good, begins, 0)
    first = stop = at
    for name, size in zip(columns, fixed, strict=True):
        sizes = np.full(len(at), size or 0, np.int64)
        if size is None:
            sizes = data[heads[:, None] + np.arange(4)].view(_U32)[:, 0].astype(np.int64)
            heads = np.where(good, heads + 4, 0)
        if name == field:
            first, stop = at, at + sizes
        at = at + sizes
    good &= at == ends
    runs = column.array.runs(data, np.where(good, first, 0), np.where(good, stop, 0))
    return None if runs is None else runs._replace(lengths=np.where(good, runs.lengths, -1))


def _header(raw: bytes, url: str, offset: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        header = json.loads(raw)
        names, encodings, sizes = (header[f"column_{what}"] for what in ("names", "encodings", "sizes"))
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise FormatError(f"the description of the columns is not readable: {e!r}", url=url, offset=offset) from e
    lists = all(isinstance(part, list) for part in (names, encodings, sizes))
    if not lists or not all(isinstance(text, str) for text in (*names, *encodings)):
        raise FormatError("the description of the columns is malformed", url=url, offset=offset)
    if not (len(names) == len(encodings) == len(sizes)) or len(set(names)) != len(names):
        raise FormatError("the columns' names, encodings and sizes do not match", url=url, offset=offset)
    for name, encoding, size in zip(names, encodings, sizes, strict=True):
        column = _column_or_reason(name, encoding)
        if isinstance(column, Column) and (column.size or None) != (size or None):
            raise FormatError(f"column {name!r} ({encoding}) is declared as {size} bytes", url=url, offset=offset)
    return tuple(names), tuple(encodings)


def _column_or_reason(name: str, encoding: str, allow_pickle: bool = False) -> Column | str:
    try:
        return make_column(name, encoding, allow_pickle)
    except ValueError as e:
        return str(e)
