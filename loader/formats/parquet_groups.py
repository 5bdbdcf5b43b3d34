"""Row groups of one Parquet shard, decoded by Arrow's library from the mapped bytes."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import numpy.typing as npt

from .abc import Bytes, Damage, Ready
from .arrow_pieces import Decoded, Fields, nothing
from .packed import MOST
from .parquet_footer import Chunk, Footer
from .thrift import Reader, Wanted

_BATCH = 1 << 16
"""Rows that are decoded at a time."""
_PAGE_HEADER = 64 << 10
_PAGE: Wanted = {1: None, 2: None}
_DICTIONARY_PAGE = 2


class GroupReader:
    """Decodes the row groups ``groups`` (numbers in the file), for :class:`~.arrow_pieces.Pieces`."""

    def __init__(self, data: Bytes, footer: Footer, groups: npt.NDArray[np.int64], ready: Ready) -> None:
        self._data = data
        self._footer = footer
        self._groups = groups.tolist()
        self._ready = ready
        self._file: Any = None
        # a worker process has others beside it that want the cores
        self._threads = multiprocessing.parent_process() is None

    def __call__(self, piece: int, fields: Fields, url: str) -> Decoded:
        number = self._groups[piece]
        group = self._footer.groups[number]
        names = [name for name in self._footer.names if fields is None or name in fields]
        for chunk in group.chunks:
            if fields is None or chunk.column in fields:
                self._ready(chunk.start, chunk.end)
        if not names:
            return Decoded([nothing(group.rows)], 0)
        bad: dict[str, Damage] = {}
        try:
            batches = self._decode(number, names)
        except MemoryError:  # says nothing of the file; Arrow's is one of its own errors too
            raise
        except _errors() as e:
            if len(names) == 1:
                return Decoded([nothing(group.rows)], 0, {names[0]: self._damage(number, names[0], e)})
            batches, bad = self._one_by_one(number, names)
        return Decoded(batches, sum(batch.get_total_buffer_size() for batch in batches), bad)

    def _one_by_one(self, number: int, names: list[str]) -> tuple[list[Any], dict[str, Damage]]:
        """The columns that can be decoded, and what is wrong with the others."""
        import pyarrow as pa

        bad: dict[str, Damage] = {}
        good: dict[str, Any] = {}
        for name in names:
            try:
                good[name] = pa.Table.from_batches(self._decode(number, [name])).column(0)
            except MemoryError:
                raise
            except _errors() as e:
                bad[name] = self._damage(number, name, e)
        rows = self._footer.groups[number].rows
        return pa.table(good).to_batches() if good else [nothing(rows)], bad

    def _damage(self, number: int, name: str, error: Exception) -> Damage:
        offset = next(chunk.start for chunk in self._footer.groups[number].chunks if chunk.column == name)
        text = f"row group {number} cannot be decoded: {error}"
        return Damage(text, offset, "leave it out with fields=[...]")

    def _decode(self, number: int, names: list[str]) -> list[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._file is None:
            # checksums cost a tenth of decoding where a writer left them, and nothing where it did not
            self._file = pq.ParquetFile(
                pa.BufferReader(pa.py_buffer(self._data)),
                page_checksum_verification=True,
            )
        batches = []
        size = 0
        for batch in self._file.iter_batches(
            self._rows_at_a_time(number, names), [number], names, use_threads=self._threads
        ):
            size += batch.get_total_buffer_size()
            if size > MOST:
                raise ValueError(f"it decompresses to more than {MOST} bytes")
            batches.append(batch.select(names))
        found, wanted = sum(batch.num_rows for batch in batches), self._footer.groups[number].rows
        if found != wanted:
            raise ValueError(f"{found} rows, declared are {wanted}")
        return batches

    def _rows_at_a_time(self, number: int, names: list[str]) -> int:
        """So few that they cannot take much more memory than a row group may, whatever a dictionary holds: each of its
        values may be as long as all of it, and be repeated for next to nothing."""
        rows = _BATCH
        for chunk in self._footer.groups[number].chunks:
            if chunk.column in names:
                rows = min(rows, max(MOST // 2 // max(self._dictionary_size(chunk), 1), 1))
        return rows

    def _dictionary_size(self, chunk: Chunk) -> int:
        """What the dictionary that a column's pages may begin with decompresses to."""
        header = self._data[chunk.start : min(chunk.start + _PAGE_HEADER, chunk.end)].tobytes()
        try:
            page = Reader(header).struct(_PAGE)
        except ValueError:
            return MOST  # not known; most likely pyarrow will say why
        size = page.get(2)
        return size if page.get(1) == _DICTIONARY_PAGE and isinstance(size, int) else 0


def _errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for damaged pages: OSError for most, its own errors, ValueError for names."""
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)
