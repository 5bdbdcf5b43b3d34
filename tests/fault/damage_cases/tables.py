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


def prefixed(rng: random.Random) -> dict[str, bytes]:
    """Strings that are told by the one before, in rows and in lists, and a dictionary in lists."""
    words = [f"word {rng.randrange(40):02d}" for _ in range(60)]
    lists = [words[at : at + 3] for at in range(0, 60, 3)]
    columns = {"word": words[:20], "words": lists, "again": lists, "fixed": pa.array([b"abcd"] * 20, pa.binary(4))}
    encodings = {"word": "DELTA_BYTE_ARRAY", "words.list.element": "DELTA_BYTE_ARRAY", "fixed": "DELTA_BYTE_ARRAY"}
    out = io.BytesIO()
    pq.write_table(
        pa.table(columns),
        out,
        row_group_size=11,
        use_dictionary=["again"],
        column_encoding=encodings,
        compression="none",
    )
    return {"t.parquet": out.getvalue()}


def shared(rng: random.Random) -> dict[str, bytes]:
    """Values that take no bytes, and values that several cells share."""
    words = pa.array(["a", "a word of more than twelve bytes", None, "bb"])
    first, count = pa.array([0, 2, 1, 0], pa.int32()), pa.array([2, 2, 0, 4], pa.int32())
    ends = pa.array([0, 2, 3, 3, 4], pa.int32())
    columns = {
        "nulls": pa.array([[None], [], [None] * rng.randrange(1, 5), None], pa.list_(pa.null())),
        "text": words.cast(pa.string_view()),
        "blob": pa.array([b"x" * 20, b"y", b"", None], pa.binary_view()),
        "views": pa.ListViewArray.from_arrays(first, count, words.dictionary_encode()),
        "runs": pa.ListArray.from_arrays(
            ends, pa.RunEndEncodedArray.from_arrays(pa.array([1, 4], pa.int32()), words[:2])
        ),
        "lists": pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1]), pa.array([[1], [2, 3]])),
    }
    batch = pa.record_batch(columns)
    out = io.BytesIO()
    with pa.ipc.new_file(out, batch.schema) as writer:
        writer.write_batch(batch)
    return {"t.arrow": out.getvalue()}


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
    Case("arrow-file-shared", shared, loader.open_shard),
    Case("parquet-prefixes", prefixed, loader.open_shard),
]
