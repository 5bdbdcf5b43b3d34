"""NumPy's ``.npz`` archives: several arrays with one length, side by side (``numpy.savez``, ``savez_compressed``).

It follows ``numpy.load`` and, for the archive around the arrays, ``zipfile`` (see :mod:`.zip_members`).

On purpose different from ``numpy.load``: arrays of Python objects are refused and never unpickled; arrays that were
stored without compression are views into the mapped file; sizes are checked before anything is allocated. Every array's
CRC is checked once, when it is first read from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from ..sample import Sample
from .abc import Bytes, Format, Objects, Opened, Ready, SampleIndex, all_there
from .npy_header import MOST, NpyHeader, read_header, rows_of, value_at
from .options import settle_names
from .zip_members import DEFLATED, MAGIC, Member, content_of, head_of, members

_SUFFIX = ".npy"


@dataclass(slots=True)
class NpzIndex(SampleIndex):
    """Per field the archive's member and its array's header."""

    arrays: dict[str, tuple[Member, NpyHeader]]
    samples: int
    skipped: int

    def __len__(self) -> int:
        return self.samples

    @property
    def nbytes(self) -> int:
        return 500 * (1 + len(self.arrays))

    @property
    def private_bytes(self) -> int:
        """Memory that decompressed arrays take once all are read from."""
        return sum(member.size for member, _ in self.arrays.values() if member.method == DEFLATED)


class Arrays:
    """The arrays of one open archive, each checked (and decompressed) when it is first asked for."""

    def __init__(self, data: Bytes, index: NpzIndex, rows: bool) -> None:
        self._data = data
        self._index = index
        self._rows = rows
        self._done: dict[str, npt.NDArray[Any] | FormatError] = {}

    def get(self, name: str, url: str) -> npt.NDArray[Any]:
        """One array. Raises ``FormatError``, the same each time, for one that cannot be read."""
        found = self._done.get(name)
        if found is None:
            try:
                found = self._make(name, url)
            except FormatError as e:
                found = e
            self._done[name] = found
        if isinstance(found, FormatError):
            raise found.with_traceback(None)
        return found

    def _make(self, name: str, url: str) -> npt.NDArray[Any]:
        member, header = self._index.arrays[name]
        if header.dtype.hasobject:
            raise FormatError(
                f"array {name!r} holds Python objects, which only unpickling could read",
                url=url,
                offset=member.at,
                hint="leave it out with fields=[...]",
            )
        array = header.array(content_of(self._data, member, url))
        return array if self._rows else array[np.newaxis]


@dataclass(frozen=True)
class Npz(Format):
    """An archive of named arrays. Sample ``i`` is row ``i`` of each of them.

    All arrays must be equally long; ``arrays`` names those that are read, where others in the file are not. Arrays
    without axes describe the file and are no part of a sample. ``rows=False`` makes the file one sample with all its
    arrays whole, those without axes too. A field is an array's name; a value is a view, or a numpy scalar where the
    array has one axis.
    """

    name: ClassVar[str] = "npz"
    columnar: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    arrays: tuple[str, ...] | None = None
    rows: bool = True

    def __post_init__(self) -> None:
        settle_names(self, "arrays")

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        if data[:4].tobytes() != MAGIC:
            return False
        size = int.from_bytes(data[26:28].tobytes(), "little")
        return data[30 : 30 + size].tobytes().endswith(_SUFFIX.encode())

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        opened = super().open(objects, url, index=index, unpacked=unpacked, part=part)
        return opened._replace(private_bytes=opened.index.private_bytes)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> NpzIndex:
        found: dict[str, tuple[Member, NpyHeader]] = {}
        skipped = 0
        for member in members(data, url):
            name = member.name.removesuffix(_SUFFIX)
            if name == member.name:
                skipped += 1
                continue
            if name in found:
                raise FormatError(f"two arrays are named {name!r}", url=url, offset=member.at)
            head = head_of(data, member, MOST, url)
            found[name] = (member, read_header(head, member.size, url, member.at, f"array {name!r}"))
        if self.arrays is not None:
            absent = [name for name in self.arrays if name not in found]
            if absent:
                raise FormatError(f"has no array {absent[0]!r}", url=url, hint=f"there are: {', '.join(found)}")
            skipped += len(found) - len(set(self.arrays))
            found = {name: found[name] for name in self.arrays}
        if not self.rows:
            return NpzIndex(found, 1, skipped)
        rows = {name: pair for name, pair in found.items() if pair[1].shape}
        return NpzIndex(rows, self._common(rows, url), skipped + len(found) - len(rows))

    def _common(self, arrays: dict[str, tuple[Member, NpyHeader]], url: str) -> int:
        lengths = {name: header.rows for name, (_, header) in arrays.items()}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:10])
            first = next(iter(lengths))
            hint = f"formats.Npz(arrays=({first!r}, ...)) for some of them, Npz(rows=False) for one sample a file"
            raise FormatError(f"its arrays are not equally long: {told}", url=url, hint=hint)
        return next(iter(lengths.values()), 0)

    def source(self, data: Bytes, index: NpzIndex) -> Arrays:
        return Arrays(data, index, self.rows)

    def read(self, source: Arrays, index: NpzIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        sample = Sample()
        for name in index.arrays:
            if fields is None or name in fields:
                try:
                    sample[name] = value_at(source.get(name, url), i)
                except ValueError as e:
                    raise FormatError(f"field {name!r} of sample {i}: {e}", url=url) from e
        return sample

    def columns(
        self,
        source: Arrays,
        index: NpzIndex,
        rows: npt.NDArray[np.int64],
        url: str,
        fields: frozenset[str] | None = None,
    ) -> dict[str, Any]:
        names = [name for name in index.arrays if fields is None or name in fields]
        try:
            return {name: rows_of(source.get(name, url), rows) for name in names}
        except ValueError as e:
            raise FormatError(f"a value is no text: {e}", url=url) from e
