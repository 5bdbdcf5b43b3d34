"""Parquet files (format 2.x, as the Arrow library reads them).

A row is a sample, a column of the top level a field; see :mod:`.arrow_cells` for what values are. The footer tells the
row groups. Each is a part of the shard (:meth:`Parquet.parts`): it is decoded when a row of it is read, only the
columns that are asked for, and of a shard that is still arriving only their bytes are waited for. Checksums of pages
are verified where the writer left them. Columns are given as they are stored: an image that Hugging Face's
``datasets`` wrote is a struct of ``bytes`` and ``path``, an index that pandas wrote is a column like others.

On purpose different from pyarrow: what the footer declares must agree with itself and with the file before anything is
decoded; a damaged row group, or column of one, harms only the samples that need it; two columns of one name are an
error; cells are numpy scalars and views where pyarrow makes Python objects. Encrypted files are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from ..sample import Sample
from .abc import Bytes, Format, Objects, Opened, Ready, SampleIndex, all_there
from .arrow_pieces import KEPT, Fields, Pieces
from .parquet_footer import MAGIC, Footer, read_footer
from .parquet_groups import GroupReader


@dataclass(slots=True)
class ParquetIndex(SampleIndex):
    """The row groups of one shard, or one of them: their numbers, samples, first bytes and sizes decoded."""

    groups: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    images: frozenset[str]
    starts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        return 5 * self.counts.nbytes + 1000


@dataclass(frozen=True)
class Parquet(Format):
    """The format has no options."""

    name: ClassVar[str] = "parquet"
    columnar: ClassVar[bool] = True
    stateful: ClassVar[bool] = True

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        return data[: len(MAGIC)].tobytes() in (MAGIC, b"PARE")

    def parts(self, objects: Objects, url: str) -> Sequence[int] | None:
        data, ready = objects.map(url)
        return [group.rows for group in read_footer(data, url, ready).groups]

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        data, ready = objects.map(url)
        footer = read_footer(data, url, ready)
        if index is None:
            index = _index(footer, url, part)
        return Opened(_pieces(data, footer, index, ready), index, min(int(index.sizes.sum()), KEPT))

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> ParquetIndex:
        return _index(read_footer(data, url, ready), url, None)

    def source(self, data: Bytes, index: ParquetIndex) -> Pieces:
        return _pieces(data, read_footer(data, "", all_there), index, all_there)

    def read(self, source: Pieces, index: ParquetIndex, i: int, url: str, fields: Fields = None) -> Sample:
        return source.read(i, fields, url)

    def columns(
        self, source: Pieces, index: ParquetIndex, rows: npt.NDArray[np.int64], url: str, fields: Fields = None
    ) -> dict[str, Any]:
        return source.columns(rows, fields, url)

    def kind(self, index: ParquetIndex, name: str) -> str:
        return "image" if name in index.images else ""


def _index(footer: Footer, url: str, part: int | None) -> ParquetIndex:
    numbers = range(len(footer.groups)) if part is None else [part]
    if part is not None and part >= len(footer.groups):
        raise FormatError(f"has {len(footer.groups)} row groups, not {part + 1}", url=url)
    groups = [footer.groups[number] for number in numbers]
    return ParquetIndex(
        np.array(numbers, dtype=np.int64),
        np.array([group.rows for group in groups], dtype=np.int64),
        np.array([group.offset for group in groups], dtype=np.int64),
        np.array([group.size for group in groups], dtype=np.int64),
        footer.images,
    )


def _pieces(data: Bytes, footer: Footer, index: ParquetIndex, ready: Ready) -> Pieces:
    return Pieces(index.starts, GroupReader(data, footer, index.groups, ready), index.offsets)
