"""Parquet files and Arrow IPC files and streams, plain and compressed."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import loader
from tests.fault.format_damage import Case


def table(rng: random.Random, rows: int) -> pa.RecordBatch:
    """Columns of every way in which a column lies in memory."""

    def some(make: Callable[[], Any]) -> list[Any]:
        return [None if rng.random() < 0.2 else make() for _ in range(rows)]

    place = pa.struct({"a": pa.int64(), "b": pa.list_(pa.string())})
    columns = {
        "id": pa.array(range(rows), pa.int64()),
        "x": pa.array(some(rng.random), pa.float32()),
        "ok": pa.array(some(lambda: rng.random() < 0.5), pa.bool_()),
        "text": pa.array(some(lambda: "é" * rng.randrange(5)), pa.string()),
        "blob": pa.array(some(lambda: rng.randbytes(rng.randrange(20))), pa.large_binary()),
        "cat": pa.array(some(lambda: rng.choice(["a", "bb"])), pa.string()).dictionary_encode(),
        "ids": pa.array(some(lambda: [rng.randrange(9) for _ in range(rng.randrange(4))]), pa.list_(pa.int16())),
        "at": pa.array(some(lambda: {"a": rng.randrange(9), "b": ["x"] * rng.randrange(3)}), place),
        "pair": pa.array([[i, i] for i in range(rows)], pa.list_(pa.uint8(), 2)),
        "map": pa.array(some(lambda: [("k", rng.randrange(9))]), pa.map_(pa.string(), pa.int64())),
    }
    return pa.record_batch(columns)


def parquet(**options: Any) -> Callable[[random.Random], dict[str, bytes]]:
    def build(rng: random.Random) -> dict[str, bytes]:
        out = io.BytesIO()
        pq.write_table(pa.Table.from_batches([table(rng, 12)]), out, row_group_size=7, store_schema=False, **options)
        return {"t.parquet": out.getvalue()}

    return build


def arrow(new: Callable[..., Any], codec: str | None) -> Callable[[random.Random], dict[str, bytes]]:
    def build(rng: random.Random) -> dict[str, bytes]:
        batches = [table(rng, 5), table(rng, 0), table(rng, 4)]
        out = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(compression=codec, unify_dictionaries=True)
        whole = pa.Table.from_batches(batches)
        with new(out, whole.schema, options=options) as writer:
            writer.write_table(whole)
        return {"t.arrow": out.getvalue()}

    return build


def growing(rng: random.Random) -> dict[str, bytes]:
    """A stream whose dictionaries grow and are replaced."""
    values = [["a"], ["a", "b"], ["c"], ["c", "d", "e"]]
    batches = [
        pa.record_batch({"cat": pa.DictionaryArray.from_arrays(pa.array([0, len(v) - 1, None], pa.int8()), v)})
        for v in values
    ]
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(out, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return {"t.arrows": out.getvalue()}


CASES = [
    Case("parquet", parquet(compression="none", use_dictionary=False), loader.open_shard),
    Case("parquet-dictionary", parquet(compression="snappy", write_page_index=True), loader.open_shard),
    Case(
        "parquet-pages",
        parquet(compression="zstd", data_page_version="2.0", write_page_checksum=True),
        loader.open_shard,
    ),
    Case("arrow-file", arrow(pa.ipc.new_file, None), loader.open_shard),
    Case("arrow-file-lz4", arrow(pa.ipc.new_file, "lz4"), loader.open_shard),
    Case("arrow-stream", arrow(pa.ipc.new_stream, None), loader.open_shard),
    Case("arrow-stream-zstd", arrow(pa.ipc.new_stream, "zstd"), loader.open_shard),
    Case("arrow-stream-growing", growing, loader.open_shard),
]
