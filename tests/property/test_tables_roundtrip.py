"""Random tables that pyarrow wrote to Parquet and Arrow read back equal, by row and by column."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from loader.formats import Arrow, Format, Parquet
from tests.foreign.table_referee import rows

SIMPLE: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint16(), st.integers(0, 65535)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.float64(), st.floats(allow_nan=False)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(st.characters(codec="utf-8"), max_size=8)),
    (pa.large_string(), st.text(st.characters(codec="utf-8"), max_size=8)),
    (pa.binary(), st.binary(max_size=12)),
    (pa.large_binary(), st.binary(max_size=12)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.date32(), st.dates()),
    (pa.timestamp("us"), st.datetimes()),
    (pa.decimal128(12, 3), st.decimals(-999999, 999999, places=3)),
]


@st.composite
def types(draw: st.DrawFn, deep: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    """A type with values of it, nulls among them."""
    shape = draw(st.sampled_from(["flat"] * 4 + (["list", "large", "fixed", "struct", "map", "dict"] if deep else [])))
    if shape == "flat":
        kind, values = draw(st.sampled_from(SIMPLE))
    elif shape == "dict":
        values = st.sampled_from(["a", "bé", ""])
        kind = pa.dictionary(pa.int16(), pa.string())
    elif shape == "struct":
        parts = [draw(types(deep - 1)) for _ in range(draw(st.integers(1, 2)))]
        kind = pa.struct([(f"f{k}", part) for k, (part, _) in enumerate(parts)])
        values = st.fixed_dictionaries({f"f{k}": some for k, (_, some) in enumerate(parts)})
    elif shape == "map":
        item, some = draw(types(0))
        kind = pa.map_(pa.string(), item)
        values = st.lists(st.tuples(st.text("ab", max_size=2), some), max_size=3)
    else:
        item, some = draw(types(deep - 1))
        sizes = (2, 2) if shape == "fixed" else (0, 3)
        kind = {"list": pa.list_, "large": pa.large_list, "fixed": lambda t: pa.list_(t, 2)}[shape](item)
        values = st.lists(some, min_size=sizes[0], max_size=sizes[1])
    return kind, (st.none() | values if draw(st.booleans()) else values)


@st.composite
def tables(draw: st.DrawFn) -> Any:
    columns = [draw(types()) for _ in range(draw(st.integers(1, 3)))]
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    schema = pa.schema([(f"c{k}", kind) for k, (kind, _) in enumerate(columns)])
    batches = []
    for size in sizes:
        values = [draw(st.lists(some, min_size=size, max_size=size)) for _, some in columns]
        arrays = [pa.array(value, kind) for value, (kind, _) in zip(values, columns, strict=True)]
        batch = pa.record_batch(arrays, schema=schema)
        cut = draw(st.integers(0, size))
        batches.append(batch.slice(cut))
    return pa.Table.from_batches(batches, schema)


def check(format: Format, data: bytes, table: Any) -> None:
    whole = np.frombuffer(bytearray(data), np.uint8)
    assert format.matches(data[:4096], whole)
    index = format.index(whole, "shard")
    source = format.source(whole, index)
    n = len(index)
    assert n == table.num_rows
    found = [format.read(source, index, i, "shard") for i in range(n)]
    assert rows(found, table.schema) == table.to_pylist()
    if n:
        order = np.random.default_rng(n).permutation(n)
        for wanted in (np.arange(n), order, order[: n // 2 + 1]):
            columns = format.columns(source, index, wanted, "shard")
            again = [{name: values[at] for name, values in columns.items()} for at in range(len(wanted))]
            assert rows(again, table.schema) == table.take(pa.array(wanted)).to_pylist()
        name = table.schema.names[-1]
        only = [format.read(source, index, i, "shard", frozenset([name])) for i in range(n)]
        assert all(set(sample) == {name} for sample in only)
        assert repr(only) == repr([{name: sample[name]} for sample in found])


def sound(table: Any) -> bool:
    """Whether pyarrow believes it itself: it gives null structs of dictionaries numbers that are out of bounds."""
    try:
        table.validate(full=True)
    except (pa.ArrowInvalid, pa.ArrowIndexError):
        return False
    return True


@settings(max_examples=60, deadline=None)
@given(tables(), st.sampled_from([pa.ipc.new_file, pa.ipc.new_stream]), st.sampled_from([None, "lz4", "zstd"]))
def test_arrow(table: Any, new: Any, codec: str | None) -> None:
    assume(sound(table))
    out = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec, unify_dictionaries=new is pa.ipc.new_file)
    with new(out, table.schema, options=options) as writer:
        writer.write_table(table)
    check(Arrow(), out.getvalue(), table)


@settings(max_examples=60, deadline=None)
@given(
    tables(),
    st.integers(1, 8),
    st.sampled_from(["none", "snappy", "zstd", "gzip"]),
    st.booleans(),
    st.sampled_from(["1.0", "2.0"]),
)
def test_parquet(table: Any, size: int, codec: str, dictionary: bool, version: str) -> None:
    assume(sound(table))
    out = io.BytesIO()
    pq.write_table(
        table,
        out,
        row_group_size=size,
        compression=codec,
        use_dictionary=dictionary,
        data_page_version=version,
        write_page_checksum=dictionary,
    )
    check(Parquet(), out.getvalue(), table)
