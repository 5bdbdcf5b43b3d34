"""Finding the samples of a shard that must be walked for it, against just reading its map, and against its fill.

Warm, the limit sums the maps' bytes in steps of 1 MiB, eight at a time: every page is mapped and every line of memory
read. Both begin with a new map of a file that is in the page cache, as every process that opens a shard does.

Cold, the limit fetches the file into the empty cache until every byte can be read, and the indexing goes on meanwhile,
as bytes arrive; all that it adds is time.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import obstore
import psutil

from cachefs.client import Client
from cachefs.testing.seaweed import SeaweedServer
from loader import formats
from loader.formats import Format

from .cold import BUCKET, daemon, store_of
from .data import RECORDS, kept, record_files
from .figure import Case, Figure, Timing, stopwatch
from .sizes import MIB, Sizes

FORMATS: dict[str, Format] = {"tar": formats.WebDataset(), "tfrecord": formats.TFRecord(), "jsonl": formats.Jsonl()}


@contextmanager
def figure(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure; its files stay for the next run."""
    folder = kept(scratch / "records", sizes, record_files)
    files = [folder / f"{name}-{record}" for name in FORMATS for record in RECORDS]
    yield Figure(
        name="index",
        title=f"Indexing files of {sizes.index_bytes // MIB} MiB",
        unit="GB/s",
        scale=1e-9,
        baseline="reading",
        cases=(
            Case("reading", "limit", lambda: read(files)),
            *(
                Case(f"{name}, records of {record // 1000} KB", "ours", partial(index, folder, name, record))
                for name in FORMATS
                for record in RECORDS
            ),
        ),
    )


@contextmanager
def filling(scratch: Path, sizes: Sizes) -> Iterator[Figure]:
    """The figure of shards that are indexed while they are fetched, with a server that holds them until it ends."""
    folder = kept(scratch / "records", sizes, record_files)
    least = min(RECORDS)
    shutil.rmtree(scratch / "s3", ignore_errors=True)
    with SeaweedServer(scratch / "s3") as server:
        server.make_bucket(BUCKET)
        for name in FORMATS:
            obstore.put(store_of(server), f"{name}-{least}", folder / f"{name}-{least}")
        with daemon(server, scratch / "cache", sizes) as (client, process):
            yield Figure(
                name="filling",
                title=f"Fetching files of {sizes.index_bytes // MIB} MiB and indexing them meanwhile",
                unit="MB/s",
                scale=1e-6,
                baseline="fetching",
                cases=(
                    Case("fetching", "limit", lambda: fetch(client, process, f"tar-{least}", None)),
                    *(
                        Case(
                            f"{name}, records of {least // 1000} KB", "ours", partial(fetch, client, process, key, kind)
                        )
                        for name, kind in FORMATS.items()
                        for key in [f"{name}-{least}"]
                    ),
                ),
            )
    shutil.rmtree(scratch / "s3", ignore_errors=True)


def fetch(client: Client, process: psutil.Process, key: str, kind: Format | None) -> Timing:
    """One object into the emptied cache, every byte of it; as a shard of ``kind`` it is indexed as its bytes arrive."""
    client.evict(None)
    if client.entries():
        raise ValueError("the cache could not be emptied")
    os.sync()
    with stopwatch(process) as watch:
        shard = client.open(f"s3://{BUCKET}/{key}")
        arriving = shard.filling()
        if kind is not None and not len(kind.index(np.frombuffer(arriving.view, np.uint8), key, arriving.ready)):
            raise ValueError(f"no sample was found in {key}")
        arriving.ready(0, shard.size)
        shard.close()
    return watch.timing(shard.size)


def read(paths: Sequence[Path]) -> Timing:
    """Every byte of the files, each through a new map: what a page costs to map differs from file to file."""
    done = 0
    with stopwatch() as watch:
        for path in paths:
            with open(path, "rb") as file:
                data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
            done += len(data)
            for start in range(0, len(data), MIB):
                step = data[start : start + MIB]
                np.add.reduce(step[: len(step) // 8 * 8].view(np.uint64))
    return watch.timing(done)


def index(folder: Path, name: str, record: int) -> Timing:
    """The samples of one file, found in a new map."""
    path = folder / f"{name}-{record}"
    with stopwatch() as watch, open(path, "rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
        found = len(FORMATS[name].index(data, str(path)))
    if not found:
        raise ValueError(f"no sample was found in {path.name}")
    return watch.timing(len(data))
