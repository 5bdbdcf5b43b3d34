"""Row groups of one Parquet shard, decoded by Arrow's library from the mapped bytes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np

from .abc import Bytes, Damage, Ready
from .arrow_pieces import Decoded, Fields, nothing
from .packed import MOST
from .parquet_bounds import Bounds, bounds_of
from .parquet_footer import Chunk, Leaf, alone
from .parquet_index import ParquetIndex
from .parquet_pages import ROWS, longest_value, pages, rows_at_once
from .parquet_prefixes import decoded_size


class GroupReader:
    """Decodes the row groups of an index, for :class:`~.arrow_pieces.Pieces`."""

    def __init__(self, data: Bytes, index: ParquetIndex, ready: Ready) -> None:
        self._data = data
        self._index = index
        self._ready = ready
        # a worker process has others beside it that want the cores
        self._threads = multiprocessing.parent_process() is None

    def __call__(self, piece: int, fields: Fields, url: str) -> Decoded:
        index = self._index
        names = [name for name in index.names if fields is None or name in fields]
        rows = int(index.counts[piece])
        if not names:
            return Decoded([nothing(rows)], 0)
        self._ready(index.place.start, index.place.end)
        for _, chunk in self._chunks(piece, names):
            self._ready(chunk.start, chunk.end)
        bad: dict[str, Damage] = {}
        try:
            batches = self._decode(piece, names)
        except MemoryError:  # says nothing of the file; Arrow's is one of its own errors too
            raise
        except _errors() as e:
            if len(names) == 1:
                return Decoded([nothing(rows)], 0, {names[0]: self._damage(piece, names[0], e)})
            batches, bad = self._one_by_one(piece, names)
        return Decoded(batches, sum(batch.get_total_buffer_size() for batch in batches), bad)

    def bounds(self, piece: int, fields: Fields) -> Bounds | None:
        """What the file's statistics say of these columns of a row group; ``None`` if nothing."""
        self._ready(self._index.place.start, self._index.place.end)
        try:
            return bounds_of(self._footer(piece), [n for n in self._index.names if fields is None or n in fields])
        except MemoryError:
            raise
        except _errors():
            return None  # what is wrong with it is told where it is decoded

    def _footer(self, piece: int) -> Any:
        """Arrow's library sees this row group only: to read the whole footer for each would take longer than to
        decode."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        index = self._index
        first, last = index.spans[piece].tolist()
        return pq.read_metadata(
            pa.BufferReader(alone(self._data, index.place, (first, last), int(index.counts[piece])))
        )

    def _one_by_one(self, piece: int, names: list[str]) -> tuple[list[Any], dict[str, Damage]]:
        """The columns that can be decoded, and what is wrong with the others."""
        import pyarrow as pa

        bad: dict[str, Damage] = {}
        good: dict[str, Any] = {}
        for name in names:
            try:
                good[name] = pa.Table.from_batches(self._decode(piece, [name])).column(0)
            except MemoryError:
                raise
            except _errors() as e:
                bad[name] = self._damage(piece, name, e)
        rows = int(self._index.counts[piece])
        return pa.table(good).to_batches() if good else [nothing(rows)], bad

    def _damage(self, piece: int, name: str, error: Exception) -> Damage:
        offset = min((chunk.start for _, chunk in self._chunks(piece, [name])), default=self._index.place.start)
        text = f"row group {self._index.groups[piece]} cannot be decoded: {error}"
        return Damage(text, offset, "leave it out with fields=[...]")

    def _chunks(self, piece: int, names: list[str]) -> Iterator[tuple[Leaf, Chunk]]:
        """What these fields consist of in one row group."""
        for leaf, numbers in zip(self._index.leaves, self._index.chunks[piece].tolist(), strict=True):
            if leaf.column in names:
                yield leaf, Chunk(*numbers)

    def _decode(self, piece: int, names: list[str]) -> list[Any]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        index = self._index
        wanted = int(index.counts[piece])
        some = ROWS
        doubtful = []
        for leaf, chunk in self._chunks(piece, names):
            longest = longest_value(self._data, chunk)
            some = min(some, rows_at_once(chunk, leaf, longest, MOST))
            if leaf.repeated and not leaf.width and chunk.values * longest > MOST:
                doubtful.append((leaf, chunk))
        footer = self._footer(piece)
        file = pq.ParquetFile(
            pa.BufferReader(pa.py_buffer(self._data)),
            metadata=footer,
            # checksums cost a tenth of decoding where a writer left them, and nothing where it did not
            page_checksum_verification=True,
        )
        for leaf, chunk in doubtful:
            self._measure(footer, leaf, chunk)
        batches = []
        size = 0
        for batch in file.iter_batches(some, [0], names, use_threads=self._threads):
            size += batch.get_total_buffer_size()
            if size > MOST:
                raise ValueError(f"it decompresses to more than {MOST} bytes")
            batches.append(batch.select(names))
        found = sum(batch.num_rows for batch in batches)
        if found != wanted:
            raise ValueError(f"{found} rows, declared are {wanted}")
        return batches

    def _measure(self, footer: Any, leaf: Leaf, chunk: Chunk) -> None:
        """Raise ``ValueError`` where a column is too large whose rows may hold any number of values, each as long as
        its dictionary or a page: it is read as numbers of the dictionary's values first, which takes little."""
        if any(page.prefixed for page in pages(self._data, chunk)):
            if decoded_size(self._data, chunk, MOST) > MOST:
                raise ValueError(f"it decompresses to more than {MOST} bytes")
            return
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        source = pa.BufferReader(pa.py_buffer(self._data))
        file = pq.ParquetFile(source, metadata=footer, read_dictionary=[leaf.path])
        size = 0
        for batch in file.iter_batches(ROWS, [0], [leaf.path], use_threads=self._threads):
            values = _innermost(batch.column(0))
            if not isinstance(values, pa.DictionaryArray):
                raise ValueError(f"{len(values)} values that may be of any length")
            lengths = pc.binary_length(values.dictionary).to_numpy(zero_copy_only=False)
            seen = np.bincount(values.indices.drop_null().to_numpy(), minlength=len(lengths))
            size += int(seen.astype(np.float64) @ lengths)
            if size > MOST:
                raise ValueError(f"it decompresses to more than {MOST} bytes")


def _innermost(column: Any) -> Any:
    """The only column that a nested column of one leaf holds, whatever lies around it."""
    import pyarrow as pa

    while not isinstance(column, pa.DictionaryArray) and pa.types.is_nested(column.type):
        column = column.field(0) if pa.types.is_struct(column.type) else column.values
    return column


def _errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises for damaged pages: OSError for most, its own errors, ValueError for names."""
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError, TypeError, KeyError, IndexError)
