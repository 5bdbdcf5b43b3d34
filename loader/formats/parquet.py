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
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cachefs.errors import FormatError

from .abc import Bytes, Objects, Opened, Ready, all_there
from .arrow_pieces import KEPT, Pieces
from .parquet_footer import MAGIC, Chunk, Footer, read_footer, read_group
from .parquet_groups import GroupReader
from .parquet_index import ParquetIndex
from .table import Table


@dataclass(frozen=True)
class Parquet(Table):
    """The format has no options."""

    name: ClassVar[str] = "parquet"

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        return data[: len(MAGIC)].tobytes() in (MAGIC, b"PARE")

    def parts(self, objects: Objects, url: str) -> Sequence[int] | None:
        data, ready = objects.map(url)
        counts: list[int] = read_footer(data, url, ready).counts.tolist()
        return counts

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        data, ready = objects.map(url)
        if index is None:
            index = _index(data, read_footer(data, url, ready), url, part)
        return Opened(_pieces(data, index, ready), index, min(index.size, KEPT))

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> ParquetIndex:
        return _index(data, read_footer(data, url, ready), url, None)

    def source(self, data: Bytes, index: ParquetIndex) -> Pieces:
        return _pieces(data, index, all_there)


def _index(data: Bytes, footer: Footer, url: str, part: int | None) -> ParquetIndex:
    if part is not None and part >= len(footer.counts):
        raise FormatError(f"has {len(footer.counts)} row groups, not {part + 1}", url=url)
    numbers = np.arange(len(footer.counts)) if part is None else np.array([part])
    chunks = [read_group(data, footer, number, url) for number in numbers.tolist()]
    return ParquetIndex(
        numbers,
        footer.counts[numbers],
        footer.spans[numbers],
        np.array(chunks, dtype=np.int64).reshape(len(numbers), len(footer.leaves), len(Chunk._fields)),
        footer.place,
        footer.leaves,
        footer.names,
        footer.images,
    )


def _pieces(data: Bytes, index: ParquetIndex, ready: Ready) -> Pieces:
    groups = GroupReader(data, index, ready)
    return Pieces(index.starts, groups, index.offsets, bounds=groups.bounds)
