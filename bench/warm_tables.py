"""Warm reading of tables: batches of Parquet and Arrow rows, against pyarrow iterating the same files.

pyarrow reads the rows in file order and turns each column of a batch into a numpy array (of Python strings for text),
which is the least that a user of it does before a training step. Ours gives tensors, and lists of strings. pyarrow has
no shuffled reading of its own, so the shuffled cases are held against its unshuffled one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from loader import Loader, ShardDataset

from .data import kept, table_shards
from .figure import Case, Figure, Timing, stopwatch
from .sizes import Sizes


@contextmanager
def parquet(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure of Parquet; its files stay for the next run."""
    yield _figure(scratch, sizes, "parquet", "Parquet", _parquet_batches)


@contextmanager
def arrow(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure of uncompressed Arrow IPC files; the same rows."""
    yield _figure(scratch, sizes, "arrow", "Arrow", _arrow_batches)


def _figure(
    scratch: Path, sizes: Sizes, ending: str, name: str, batches: Callable[[Path, int], Iterator[pa.RecordBatch]]
) -> Figure:
    folder = kept(scratch / "tables", sizes, table_shards)
    files = sorted(folder.glob(f"*.{ending}"))
    ours = partial(_ours, folder / f"*.{ending}", sizes)
    return Figure(
        name=f"warm-tables-{ending}",
        title=f"Warm, {name} rows of four numbers and a string, batches of {sizes.table_batch}",
        unit="rows/s",
        scale=1.0,
        baseline="pyarrow",
        cases=(
            Case("pyarrow", "limit", lambda: iterate(files, sizes, batches)),
            Case("ShardDataset.batched, in order", "ours", lambda: ours(False, ShardDataset.batched)),
            Case("Loader, in order", "ours", lambda: ours(False, Loader)),
            Case("ShardDataset.batched, shuffled", "ours", lambda: ours(True, ShardDataset.batched)),
            Case("Loader, shuffled", "ours", lambda: ours(True, Loader)),
        ),
    )


def iterate(files: list[Path], sizes: Sizes, batches: Callable[[Path, int], Iterator[pa.RecordBatch]]) -> Timing:
    """One epoch of pyarrow in file order, every column of a batch as a numpy array."""
    rows = 0
    with stopwatch() as watch:
        for path in files:
            for batch in batches(path, sizes.table_batch):
                columns = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
                rows += len(columns[0])
    if rows != sizes.table_rows:
        raise ValueError(f"pyarrow gave {rows} rows, not {sizes.table_rows}")
    return watch.timing(rows)


def _parquet_batches(path: Path, size: int) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path, memory_map=True) as file:
        yield from file.iter_batches(size)


def _arrow_batches(path: Path, size: int) -> Iterator[pa.RecordBatch]:
    with pa.memory_map(str(path)) as memory, pa.ipc.open_file(memory) as file:
        for number in range(file.num_record_batches):
            batch = file.get_batch(number)
            for start in range(0, len(batch), size):
                yield batch.slice(start, size)


def _ours(pattern: Path, sizes: Sizes, shuffle: bool, through: Callable[[ShardDataset], Iterable[Any]]) -> Timing:
    """One epoch; the clock starts at the second batch, so that listing and counting do not count."""
    dataset = ShardDataset(pattern, batch_size=sizes.table_batch, shuffle=shuffle, drop_last=False)
    iterator = iter(through(dataset))
    next(iterator)
    with stopwatch() as watch:
        rows = sum(len(batch["name"]) for batch in iterator)
    if rows != sizes.table_rows - sizes.table_batch:
        raise ValueError(f"an epoch gave {rows} rows after the first batch")
    return watch.timing(rows)
