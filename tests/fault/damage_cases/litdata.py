"""LitData chunks: plain, of Arrow rows, of tokens, compressed in each of the three ways, and their index."""

from __future__ import annotations

import itertools
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import zstandard

import loader
from loader.testing import litdata_bytes, litdata_index
from tests.fault.format_damage import Case

NAME = "chunk-0-0.bin"
FIELDS = {
    "id": "int", "ok": "bool", "w": "float", "text": "str", "blob": "bytes", "array": "numpy", "tensor": "tensor",
    "run": "no_header_numpy:5", "nested": "json", "images": "jpeg_array",
}  # fmt: skip


def _items(rng: random.Random, count: int) -> list[list[bytes]]:
    return [
        [
            struct.pack("<q", i),
            bytes([i % 2]),
            struct.pack("<d", rng.random()),
            f"text {i} é".encode(),
            rng.randbytes(rng.randrange(40)),
            struct.pack("<4I", 9, 2, 2, 3) + rng.randbytes(24),
            struct.pack(">3I", 15, 1, 4) + rng.randbytes(16),
            rng.randbytes(2 * rng.randrange(10)),
            b"\x05\x02\0\0\0"
            + b"\x01\0\0\0a\x02\x01\0\0\0"
            + rng.randbytes(8)
            + b"\x01\0\0\0b\x01\x01\0\0\0\x01\0\0\0x",
            struct.pack("<3I", 2, 3, 4) + rng.randbytes(7),
        ]
        for i in range(count)
    ]


def _plain(rng: random.Random) -> dict[str, bytes]:
    return _with_index(litdata_bytes(_items(rng, 5)), 5)


def _with_index(chunk: bytes, count: int, size: int | None = None, **config: object) -> dict[str, bytes]:
    index = litdata_index({NAME: (count, len(chunk) if size is None else size)}, FIELDS, **config)
    return {NAME: chunk, "index.json": index}


def _chunk(checksum: bool) -> Callable[[random.Random], dict[str, bytes]]:
    def build(rng: random.Random) -> dict[str, bytes]:
        chunk = litdata_bytes(_items(rng, 5))
        packed = zstandard.ZstdCompressor(write_checksum=checksum).compress(chunk)
        return _with_index(packed, 5, len(chunk), compression="zstd", compression_level=None)

    return build


def _sample(rng: random.Random) -> dict[str, bytes]:
    whole = litdata_bytes(_items(rng, 5))
    offsets = struct.unpack_from("<6I", whole, 4)
    parts = [zstandard.compress(whole[a:b]) for a, b in itertools.pairwise(offsets)]
    ends = np.cumsum([offsets[0], *map(len, parts)]).tolist()
    chunk = struct.pack("<7I", 5, *ends) + b"".join(parts)
    return _with_index(chunk, 5, compression="zstd", compression_level="sample")


def _batch(rng: random.Random) -> dict[str, bytes]:
    whole = litdata_bytes(_items(rng, 5))
    offsets = struct.unpack_from("<6I", whole, 4)
    spans = [(0, 2), (2, 4), (4, 5)]
    parts = [zstandard.compress(whole[offsets[a] : offsets[b]]) for a, b in spans]
    at = 24 + 4 * 6 + 24 * len(spans)
    table = b""
    for (a, b), part in zip(spans, parts, strict=True):
        table += struct.pack("<IIQII", a, b - a, at, len(part), offsets[b] - offsets[a])
        at += len(part)
    head = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, 5, 2, len(spans))
    chunk = head + struct.pack("<6I", *(o - offsets[0] for o in offsets)) + table + b"".join(parts)
    return _with_index(chunk, 5, compression="zstd", compression_level="batch", compression_batch_size=2)


def _rows(rng: random.Random) -> dict[str, bytes]:
    rows = [{"id": i, "text": f"t{i}", "blob": rng.randbytes(9), "list": [1, i], "d": {"k": [1.5]}} for i in range(6)]
    table = pa.Table.from_pylist(rows)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    ipc = sink.getvalue().to_pybytes()
    head = 8 + 4 * len(rows)
    chunk = struct.pack("<8I", len(rows), *[head] * 7) + ipc + struct.pack("<I", len(ipc)) + b"LDARW01\0"
    fields = {"id": "int", "text": "str", "blob": "bytes", "list": "json", "d": "json"}
    return {NAME: chunk, "index.json": litdata_index({NAME: (len(rows), len(chunk))}, fields)}


def _tokens(rng: random.Random) -> dict[str, bytes]:
    runs = [rng.randbytes(4 * rng.randrange(30)) for _ in range(4)]
    offsets = np.cumsum([24, *map(len, runs)]).tolist()
    chunk = struct.pack("<6I", 4, *offsets) + b"".join(runs)
    index = {
        "chunks": [{"filename": NAME, "chunk_size": 4, "chunk_bytes": len(chunk), "dim": sum(map(len, runs)) // 4}],
        "config": {"data_format": ["no_header_tensor:15"], "data_spec": None, "item_loader": "TokensLoader"},
    }
    return {NAME: chunk, "index.json": json.dumps(index).encode()}


def _open(path: Path) -> loader.reader.ShardReader:
    return loader.open_shard(path, format="litdata")


CASES = [
    Case("litdata", _plain, _open),
    Case("litdata-index", _plain, _open, mutated=("index.json",)),
    Case("litdata-rows", _rows, _open),
    Case("litdata-tokens", _tokens, _open),
    Case("litdata-zstd", _chunk(checksum=False), _open),
    Case("litdata-zstd-checksum", _chunk(checksum=True), _open, checksummed=True),
    Case("litdata-zstd-batch", _batch, _open),
    Case("litdata-zstd-sample", _sample, _open),
]
