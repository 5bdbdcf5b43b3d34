"""zarr stores: metadata and chunks of several codecs. Only what carries a CRC is known to be as written."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zarr
import zarr.codecs

import loader
from tests.fault.format_damage import Case

ROWS = 11
VALUES = (np.arange(ROWS * 12).reshape(ROWS, 3, 4) * 7919 % 241).astype("<i4")


def store(make: Callable[[Any], None], *first: str) -> Callable[[random.Random], dict[str, bytes]]:
    """The files of a store that ``make`` writes; a file that stands for the folder comes first."""

    def build(rng: random.Random) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder, "s.zarr"))
            root = Path(folder)
            files = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        return {**{name: files[name] for name in first}, **files}

    return build


def v2(compressor: Any, **options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        group = zarr.open_group(path, mode="w", zarr_format=2)
        x = group.create_array("x", shape=VALUES.shape, chunks=(4, 3, 4), dtype="i4", compressors=compressor, **options)
        x[...] = VALUES

    return make


def v3(**options: Any) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        group = zarr.open_group(path, mode="w", zarr_format=3)
        group.create_array("x", shape=VALUES.shape, dtype="i4", **options)[...] = VALUES

    return make


def folder(path: Path) -> loader.ShardReader:
    """Open the store that a file of it stands for."""
    return loader.open_shard(next(parent for parent in path.parents if parent.name == "s.zarr"), "zarr")


def case(name: str, make: Callable[[Path], None], first: str, *chunks: str, checksummed: bool = False) -> Case:
    names = tuple(f"s.zarr/x/{chunk}" for chunk in chunks)
    return Case(f"zarr {name}", store(make, f"s.zarr/{first}"), folder, checksummed, names or (f"s.zarr/{first}",))


_C2 = ("0.0.0", "2.0.0")
_C3 = ("c/0/0/0", "c/2/0/0")
CHUNKS = {"chunks": (4, 3, 4)}
SHARDS = {"chunks": (2, 3, 4), "shards": (6, 3, 4)}
CRC = zarr.codecs.Crc32cCodec()

CASES = [
    case("v3 metadata", v3(**CHUNKS), "x/zarr.json"),
    case("v2 metadata", v2("auto"), "x/.zarray"),
    case("sharded metadata", v3(**SHARDS), "x/zarr.json"),
    case("v3 zstd", v3(**CHUNKS), "zarr.json", *_C3),
    case("v3 raw", v3(**CHUNKS, compressors=None), "zarr.json", *_C3),
    case("v3 gzip", v3(**CHUNKS, compressors=zarr.codecs.GzipCodec()), "zarr.json", *_C3, checksummed=True),
    case(
        "v3 zstd crc",
        v3(**CHUNKS, compressors=[zarr.codecs.ZstdCodec(), CRC]),
        "zarr.json",
        *_C3,
        checksummed=True,
    ),
    case("v3 blosc", v3(**CHUNKS, compressors=zarr.codecs.BloscCodec(cname="lz4")), "zarr.json", *_C3),
    case("sharded", v3(**SHARDS), "zarr.json", "c/0/0/0", "c/1/0/0"),
    case(
        "sharded crc",
        v3(**SHARDS, compressors=[zarr.codecs.ZstdCodec(), CRC]),
        "zarr.json",
        "c/0/0/0",
        "c/1/0/0",
    ),
]


def _numcodecs_cases() -> list[Case]:
    import numcodecs

    codecs: dict[str, Any] = {
        "blosc zstd": numcodecs.Blosc(cname="zstd", shuffle=1),
        "blosc lz4": numcodecs.Blosc(cname="lz4", shuffle=2),
        "lz4": numcodecs.LZ4(),
        "zstd": numcodecs.Zstd(),
        "zlib": numcodecs.Zlib(),
        "bz2": numcodecs.BZ2(),
        "lzma": numcodecs.LZMA(),
    }
    return [case(f"v2 {name}", v2(codec), "x/.zarray", *_C2) for name, codec in codecs.items()]


CASES += _numcodecs_cases()
