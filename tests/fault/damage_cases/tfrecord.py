"""TFRecord files: every byte is under a checksum; only whole records cut off the end leave no trace in the file.

That a record is missing shows where its number is known, as it is to a data set: so these are opened.
"""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable
from pathlib import Path

import loader
from cachefs.errors import FormatError
from loader import formats
from tests.fault.format_damage import Case
from tests.foreign.tfrecord_writer import example, tfrecord

_RECORDS = 9


def raw(rng: random.Random) -> bytes:
    sizes = [0, 1, 300, 300, 300, 300, *(rng.randrange(70, 600) for _ in range(_RECORDS - 6))]
    return tfrecord(rng.randbytes(size) for size in sizes)


def examples(rng: random.Random) -> bytes:
    return tfrecord(
        example(
            {
                "image/encoded": ("bytes", [rng.randbytes(rng.randrange(200))]),
                "label": ("int64", [rng.randrange(1000)]),
                "tokens": ("int64", [rng.randrange(-5, 70_000) for _ in range(rng.randrange(60))]),
                "weights": ("float", [rng.random() for _ in range(rng.randrange(5))]),
                "words": ("bytes", [rng.randbytes(3) for _ in range(rng.randrange(5))]),
            },
            packed=rng.random() < 0.7,
        )
        for _ in range(_RECORDS)
    )


def opened(format: formats.Format | None) -> Callable[[Path], loader.ShardReader]:
    def open_counted(path: Path) -> loader.ShardReader:
        reader = loader.open_shard(path, format)
        if len(reader) != _RECORDS:
            raise FormatError(f"holds {len(reader)} samples, the data set's index says {_RECORDS}", url=str(path))
        return reader

    return open_counted


def file(name: str, content: Callable[[random.Random], bytes]) -> Callable[[random.Random], dict[str, bytes]]:
    return lambda rng: {name: content(rng)}


CASES = [
    Case("tfrecord", file("x", raw), opened(formats.TFRecord()), checksummed=True),
    Case("tfrecord_found", file("x", raw), opened(None), checksummed=True),
    Case("tfrecord_example", file("x", examples), opened(formats.TFRecord(example=True)), checksummed=True),
    Case("tfrecord_gz", file("x.gz", lambda rng: gzip.compress(raw(rng))), opened(None), checksummed=True),
    Case("tfrecord_zlib", file("x", lambda rng: zlib.compress(raw(rng))), opened(None), checksummed=True),
    Case(  # damage gets into the messages
        "tfrecord_unverified",
        file("x", examples),
        lambda path: loader.open_shard(path, formats.TFRecord(example=True, verify=False)),
    ),
]
