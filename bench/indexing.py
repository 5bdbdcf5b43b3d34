"""Finding the samples of a shard that must be walked for it, against just reading its map.

The limit sums the map's bytes in steps of 1 MiB, eight at a time: every page is mapped and every line of memory read.
Both begin with a new map of a file that is in the page cache, as every process that opens a shard does.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from loader import formats
from loader.formats import Format

from .data import RECORDS, kept, record_files
from .figure import Case, Figure, Timing, stopwatch
from .sizes import MIB, Sizes

FORMATS: dict[str, Format] = {"tar": formats.WebDataset(), "tfrecord": formats.TFRecord(), "jsonl": formats.Jsonl()}


@contextmanager
def figure(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure; its files stay for the next run."""
    folder = kept(scratch / "records", sizes, record_files)
    yield Figure(
        name="index",
        title=f"Indexing files of {sizes.index_bytes // MIB} MiB",
        unit="GB/s",
        scale=1e-9,
        baseline="reading",
        cases=(
            Case("reading", "limit", lambda: read(folder / f"tar-{RECORDS[0]}")),
            *(
                Case(f"{name}, records of {record // 1000} KB", "ours", partial(index, folder, name, record))
                for name in FORMATS
                for record in RECORDS
            ),
        ),
    )


def read(path: Path) -> Timing:
    """Every byte of the file, through a new map."""
    with stopwatch() as watch, open(path, "rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        for start in range(0, len(data), MIB):
            step = data[start : start + MIB]
            np.add.reduce(step[: len(step) // 8 * 8].view(np.uint64))
    return watch.timing(len(data))


def index(folder: Path, name: str, record: int) -> Timing:
    """The samples of one file, found in a new map."""
    path = folder / f"{name}-{record}"
    with stopwatch() as watch, open(path, "rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        found = len(FORMATS[name].index(data, str(path)))
    if not found:
        raise ValueError(f"no sample was found in {path.name}")
    return watch.timing(len(data))
