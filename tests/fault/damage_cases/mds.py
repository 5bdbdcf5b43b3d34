"""MDS shards: plain and in every compression that mosaicml-streaming offers, and the index."""

from __future__ import annotations

import bz2
import gzip
import json
import random
import struct
from collections.abc import Callable

import pyarrow as pa
import zstandard

import loader
from loader.formats import Mds
from loader.testing import mds_bytes
from tests.fault.format_damage import Case

NAME = "shard.00000.mds"
COLUMNS = {
    "b": "bytes", "dyn": "ndarray", "f": "float32", "fix": "ndarray:uint16:2,2", "i": "int", "images": "list[png]",
    "j": "json", "jpegs": "jpeg_array", "s": "str", "sd": "str_decimal", "si": "str_int",
}  # fmt: skip
SIZES = [None, None, 4, 8, 8, None, None, None, None, None, None]


def _shard(rng: random.Random) -> bytes:
    rows = [
        {
            "b": rng.randbytes(rng.randrange(30)),
            "dyn": bytes([34, 8, 2, 1]) + rng.randbytes(8),
            "f": rng.randbytes(4),
            "fix": rng.randbytes(8),
            "i": struct.pack("<q", i),
            "images": struct.pack("<4I", 0, 2, 3, 1) + rng.randbytes(4),
            "j": json.dumps({"k": [i, None]}).encode(),
            "jpegs": struct.pack("<2I", 1, 5) + rng.randbytes(5),
            "s": f"é{i}".encode(),
            "sd": b"12.50",
            "si": b"%d" % 10**i,
        }
        for i in range(6)
    ]
    return mds_bytes(COLUMNS, rows, SIZES)


def _case(name: str, pack: Callable[[bytes], bytes], *, checksummed: bool = False, codec: str | None = None) -> Case:
    return Case(
        name,
        lambda rng: {NAME: pack(_shard(rng))},
        lambda path: loader.open_shard(path, format=Mds(compression=codec)),
        checksummed=checksummed,
    )


def _with_index(rng: random.Random) -> dict[str, bytes]:
    raw = _shard(rng)
    packed = pa.Codec("brotli").compress(raw, asbytes=True)
    files = {
        "raw_data": {"basename": NAME, "bytes": len(raw), "hashes": {}},
        "zip_data": {"basename": f"{NAME}.br", "bytes": len(packed), "hashes": {}},
    }
    index = {"version": 2, "shards": [{"format": "mds", "samples": 6, "compression": "br:11", **files}]}
    return {f"{NAME}.br": packed, "index.json": json.dumps(index).encode()}


CASES = [
    _case("mds", lambda raw: raw),
    _case("mds-zstd", zstandard.compress),
    _case("mds-zstd-checksum", zstandard.ZstdCompressor(write_checksum=True).compress, checksummed=True),
    _case("mds-gz", lambda raw: gzip.compress(raw, mtime=0), checksummed=True),
    _case("mds-bz2", bz2.compress, checksummed=True),
    _case("mds-br", lambda raw: bytes(pa.Codec("brotli").compress(raw, asbytes=True)), codec="br"),
    _case("mds-snappy", lambda raw: bytes(pa.Codec("snappy").compress(raw, asbytes=True)), codec="snappy"),
    Case("mds-index", _with_index, loader.open_shard, mutated=("index.json",)),
]
