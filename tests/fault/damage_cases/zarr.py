"""zarr stores: metadata, and chunks of many codecs. Of those with a CRC what is read must be what was written."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
import zarr.codecs

import loader
from tests.fault.format_damage import Case

VALUES = (np.arange(11 * 12).reshape(11, 3, 4) * 7919 % 241).astype("<i4")
CHUNKS = {"chunks": (4, 3, 4)}
SHARDS = {"chunks": (2, 3, 4), "shards": (6, 3, 4)}
CRC = [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()]


def store(version: int, arrays: Mapping[str, dict[str, Any]]) -> Callable[[random.Random], dict[str, bytes]]:
    """The files of a store of these arrays, each with options of its own; one that stands for the folder is first."""

    def build(rng: random.Random) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            group = zarr.open_group(root / "s.zarr", mode="w", zarr_format=version)
            for name, options in arrays.items():
                group.create_array(name, shape=VALUES.shape, dtype="i4", **options)[...] = VALUES
            files = {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        first = "s.zarr/zarr.json" if version == 3 else "s.zarr/.zgroup"
        return {first: files[first], **files}

    return build


def open_store(path: Path) -> loader.ShardReader:
    """Open the store that a file in it stands for."""
    return loader.open_shard(path.parent, "zarr")


def case(name: str, version: int, arrays: Mapping[str, dict[str, Any]], *names: str, checksummed: bool = False) -> Case:
    mutated = tuple(f"s.zarr/{array}/{file}" for array in arrays for file in names)
    return Case(f"zarr {name}", store(version, arrays), open_store, checksummed, mutated)


def v2(**compressors: Any) -> dict[str, dict[str, Any]]:
    return {name: {**CHUNKS, "compressors": codec} for name, codec in compressors.items()}


CASES = [
    case("v2 metadata", 2, {"x": CHUNKS}, ".zarray"),
    case("v3 metadata", 3, {"x": CHUNKS, "y": SHARDS}, "zarr.json"),
    case(
        "v2 checked",
        2,
        v2(zlib=numcodecs.Zlib(), bz2=numcodecs.BZ2(), lzma=numcodecs.LZMA()),
        "0.0.0",
        "2.0.0",
        checksummed=True,
    ),
    case(
        "v2",
        2,
        v2(
            blosc=numcodecs.Blosc(cname="lz4", shuffle=2),
            zstd=numcodecs.Zstd(),
            lz4=numcodecs.LZ4(),
            blosc_zstd=numcodecs.Blosc(cname="zstd", shuffle=1),
        ),
        "0.0.0",
        "2.0.0",
    ),
    case(
        "v3 checked",
        3,
        {
            "gzip": {**CHUNKS, "compressors": zarr.codecs.GzipCodec()},
            "zstd": {**CHUNKS, "compressors": CRC},
            "sharded": {**SHARDS, "compressors": CRC},
        },
        "c/0/0/0",
        "c/1/0/0",
        checksummed=True,
    ),
    case(
        "v3",
        3,
        {
            "raw": {**CHUNKS, "compressors": None},
            "zstd": CHUNKS,
            "blosc": {**CHUNKS, "compressors": zarr.codecs.BloscCodec(cname="lz4")},
            "sharded": SHARDS,
        },
        "c/0/0/0",
        "c/1/0/0",
    ),
]
