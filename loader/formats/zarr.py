"""zarr stores, versions 2 and 3: arrays whose first axis is the sample, several side by side.

Follows the zarr specifications v2 and v3 (https://zarr-specs.readthedocs.io) by way of zarr-python, which decodes:
consolidated metadata, filters, sharding, fill values and both memory orders are as there. A group's arrays are the
fields, by their paths in the store; a store that is one array has the field ``data``.

On purpose different from zarr-python:

* A chunk reads as the fill value only if it is absent. One that may not be read, or was listed and is gone, raises.
* What a chunk declares of its size is checked before a codec allocates for it, and pickles are not unpickled unasked.
* Chunks that are compressed twice are refused: what the inner codec makes of them has no bound.
* Rows of uncompressed arrays are writable views of the mapped chunks. Values come in the machine's byte order.
* Arrays without axes belong to no sample and are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from cachefs.errors import Denied, FormatError, NotFound

from ..sample import Sample
from .abc import Bytes, Format, Objects, Opened, Ready, SampleIndex, all_there
from .options import settle_names
from .zarr_array import LONE, ZarrArray
from .zarr_folder import MARKS, StoreFolder, folder_of
from .zarr_metadata import read_documents
from .zarr_rows import DecodedRows, MappedRows, Rows

_PIECE_BYTES = 4 << 20
"""Decoded bytes that a part should have at least; more where one chunk has more."""
_MOST_PARTS = 10_000_000


@dataclass(frozen=True, slots=True)
class ZarrIndex(SampleIndex):
    """How many rows there are; the store's metadata says the rest."""

    rows: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        return 200


@dataclass(frozen=True, slots=True)
class ZarrParts:
    """How a store is cut: in runs of ``piece`` rows, a multiple of the longest chunk along the sample axis."""

    rows: int
    piece: int

    @property
    def count(self) -> int:
        return max(-(-self.rows // self.piece), 1)

    def bounds(self, part: int) -> tuple[int, int]:
        return part * self.piece, min((part + 1) * self.piece, self.rows)


@dataclass(frozen=True)
class Zarr(Format):
    """``arrays``: the paths of those that are the fields (default: all); they must have equally many rows.

    ``allow_pickle``: read arrays of pickled objects, which run code that the store chooses.
    """

    name: ClassVar[str] = "zarr"
    columnar: ClassVar[bool] = True
    folder: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    arrays: tuple[str, ...] | None = None
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        settle_names(self, "arrays")

    def identity(self) -> str:
        return repr(self.arrays)

    @classmethod
    def beside(cls, objects: Objects, url: str) -> Self | None:
        base = folder_of(url)
        for name in MARKS:
            try:
                objects.read(f"{base}/{name}")
            except (NotFound, Denied):  # without the right to list, a store answers so for a missing key as well
                continue
            return cls()
        return None

    def parts(self, objects: Objects, url: str) -> list[int]:
        parts = self._cut(self._open_arrays(StoreFolder(objects, url)), url)
        if parts.count > _MOST_PARTS:
            raise FormatError(f"{parts.rows} rows in chunks of {parts.piece} are too many parts", url=url)
        return [stop - start for start, stop in map(parts.bounds, range(parts.count))]

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        arrays = self._open_arrays(StoreFolder(objects, url))
        parts = self._cut(arrays, url)
        if part is not None and not 0 <= part < parts.count:
            raise FormatError(f"has {parts.count} parts, number {part} is asked for", url=url)
        start, stop = (0, parts.rows) if part is None else parts.bounds(part)
        source: dict[str, Rows] = {}
        decoded = 0
        for array in arrays:
            if array.plain:
                source[array.name] = MappedRows(array, start, stop)
            else:
                source[array.name] = DecodedRows(array, start, stop, parts.piece)
                decoded += array.row_bytes
            if part is not None:
                array.ask(start, stop)
        return Opened(source, ZarrIndex(stop - start), min(stop - start, 2 * parts.piece) * decoded)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> SampleIndex:
        raise FormatError("one object of a zarr store; name the store's folder", url=url)

    def read(
        self, source: dict[str, Rows], index: Any, i: int, url: str, fields: frozenset[str] | None = None
    ) -> Sample:
        sample = Sample()
        for name, rows in source.items():
            if fields is None or name in fields:
                sample[name] = rows.row(i)
        return sample

    def columns(
        self,
        source: dict[str, Rows],
        index: Any,
        rows: npt.NDArray[np.int64],
        url: str,
        fields: frozenset[str] | None = None,
    ) -> dict[str, Any]:
        return {name: mine.rows(rows) for name, mine in source.items() if fields is None or name in fields}

    def _open_arrays(self, folder: StoreFolder) -> list[ZarrArray]:
        """The arrays that are fields, checked to have equally many rows."""
        documents = read_documents(folder)
        if self.arrays is not None:
            missing = [name for name in self.arrays if name not in documents and not (name == LONE and "" in documents)]
            if missing:
                present = ", ".join(path or LONE for path in documents) or "none"
                raise FormatError(f"has no array {missing[0]!r}", url=folder.url, hint=f"arrays present: {present}")
            documents = {path: document for path, document in documents.items() if (path or LONE) in self.arrays}
        found = [
            ZarrArray(folder, path, document, allow_pickle=self.allow_pickle)
            for path, document in documents.items()
            if document.get("shape") != []
        ]
        folder.release()
        lengths = {array.name: array.rows for array in found}
        if not found:
            raise FormatError("no array with a sample axis in the store", url=folder.url)
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {rows}" for name, rows in lengths.items())
            raise FormatError(
                f"the arrays have different numbers of rows: {told}",
                url=folder.url,
                hint="choose those that belong together: formats.Zarr(arrays=(...))",
            )
        return found

    def _cut(self, arrays: list[ZarrArray], url: str) -> ZarrParts:
        longest = max(array.chunk[0] for array in arrays)
        row = sum(array.row_bytes for array in arrays)
        rows = arrays[0].rows
        if longest >= rows:
            return ZarrParts(rows, max(rows, 1))
        return ZarrParts(rows, longest * max(-(-_PIECE_BYTES // max(longest * row, 1)), 1))
