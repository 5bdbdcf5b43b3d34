"""What is converted is read back equal, whatever the values; or refused with an error that names the field."""

from __future__ import annotations

import io
import json
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import loader
from cachefs.client import connect
from cachefs.config import Origin
from cachefs.errors import DataError
from loader.decode import Decode
from loader.opening import open_mapped
from loader.writers import WRITERS, Placed, WriteOptions, open_output

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
DTYPES = st.sampled_from(["u1", "i1", "<u2", ">i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", ">f4", "<f8"])
ARRAYS = DTYPES.flatmap(lambda t: hnp.arrays(t, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)))
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "any_int": st.integers(),
    "float": st.floats(),
    "str": TEXT,
    "bytes": st.binary(max_size=40),
    "bool": st.booleans(),
    "decimal": st.decimals(allow_nan=False, allow_infinity=False, places=3),
    "array": ARRAYS,
    "float32": st.floats(width=32).map(np.float32),
    "uint8": st.integers(0, 255).map(np.uint8),
    "json": JSON,
    "maybe": st.none() | TEXT,
    "mixed": st.none() | st.integers() | TEXT | st.floats(),
}


@st.composite
def columns(draw: st.DrawFn, without: frozenset[str] = frozenset()) -> list[dict[str, Any]]:
    """Samples of one schema: each field keeps its kind."""
    names = draw(st.lists(st.sampled_from(sorted(KINDS.keys() - without)), min_size=1, max_size=5, unique=True))
    return draw(st.lists(st.fixed_dictionaries({name: KINDS[name] for name in names}), min_size=1, max_size=8))


def written(kind: str, folder: str, samples: list[dict[str, Any]], **options: Any) -> list[Path]:
    writer = WRITERS[kind]
    with open_output(folder, own=writer.shards, force=False, origin=Origin()) as output:
        writer(output, WriteOptions(**options)).write(Placed(s, i, "here") for i, s in enumerate(samples))
        output.commit()
    return sorted(path for path in Path(folder).iterdir() if path.suffix != ".json")


def equal(a: Any, b: Any) -> bool:
    """Equal as Python has it, NaNs to each other, arrays by dtype, shape and values, bytes to views of bytes."""
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        left, right = (np.frombuffer(v, np.uint8) if isinstance(v, bytes) else np.asarray(v) for v in (a, b))
        same_type = left.dtype.newbyteorder("=") == right.dtype.newbyteorder("=")
        return same_type and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, float | np.floating) and a != a:
        return bool(b != b)
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def same(samples: list[dict[str, Any]], back: list[dict[str, Any]]) -> None:
    assert len(samples) == len(back)
    for a, b in zip(samples, back, strict=True):
        assert a.keys() == b.keys()
        assert all(equal(a[name], b[name]) for name in a), (a, b)


@settings(max_examples=150)
@given(columns(), st.sampled_from([None, "zstd"]), st.integers(1, 400))
def test_mds(samples: list[dict[str, Any]], compression: str | None, shard_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            paths = written("mds", folder, samples, compression=compression, shard_size=shard_size)
        except DataError as e:
            # a 1-D uint8 array stands for bytes, so one among other arrays is of another kind
            assert "'array'" in str(e) and any(a["array"].dtype == np.uint8 and a["array"].ndim == 1 for a in samples)
            return
        same(samples, [dict(sample) for path in paths for sample in loader.open_shard(path)])
        data = loader.ShardDataset(folder, batch_size=1, shuffle=False, decode="bytes")
        same(samples, [dict(sample) for sample in data])


@settings(max_examples=150)
@given(columns(frozenset({"decimal"})), st.sampled_from([None, "gzip"]), st.integers(1, 5000))
def test_tar(samples: list[dict[str, Any]], compression: str | None, shard_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder, connect() as client:
        back = []
        for path in written("wds", folder, samples, compression=compression, shard_size=shard_size):
            shard = open_mapped(client, str(path))
            for i in range(len(shard.index)):
                sample = shard.format.read(shard.source, shard.index, i, shard.url)
                Decode(None)(sample, shard, i)
                del sample["__key__"]
                back.append({name.partition(".")[0]: member_value(name, value) for name, value in sample.items()})
            shard.close()
        same(samples, back)


def member_value(name: str, value: Any) -> Any:
    if name.endswith(".npy") and value.dtype == np.uint8 and value[:6].tobytes() == b"\x93NUMPY":
        return np.load(io.BytesIO(value), allow_pickle=False)
    return value


@settings(max_examples=150)
@given(columns(frozenset({"any_int"})), st.integers(1, 2000))
def test_parquet(samples: list[dict[str, Any]], shard_size: int) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    with tempfile.TemporaryDirectory() as folder:
        try:
            paths = written("parquet", folder, samples, shard_size=shard_size)
        except DataError as e:
            # arrays of several dtypes or dimensions have no type in common
            kinds = {(a.dtype.newbyteorder("="), a.ndim) for a in (s["array"] for s in samples if "array" in s)}
            assert "'array'" in str(e) and len(kinds) > 1, e
            return
        back = []
        for path in paths:
            table = pq.read_table(path)
            text = {field.name for field in table.schema if (field.metadata or {}).get(b"nearflash") == b"json"}
            for row in table.to_pylist():
                back.append({n: json.loads(v) if n in text and v is not None else v for n, v in row.items()})
        expected = [{n: listed(v) for n, v in sample.items()} for sample in samples]
        same(expected, back)


def listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.ndim == 1 and value.dtype == np.uint8 else value.tolist()
    return value.item() if isinstance(value, np.generic) else value


@settings(max_examples=100)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=20), min_size=1, max_size=10), st.integers(1, 100))
def test_tokens(runs: list[list[int]], shard_size: int) -> None:
    samples = [{"tokens": np.array(run, np.uint16)} for run in runs]
    with tempfile.TemporaryDirectory() as folder:
        paths = written("tokens", folder, samples, shard_size=shard_size)
        assert b"".join(path.read_bytes() for path in paths) == b"".join(
            s["tokens"].astype("<u2").tobytes() for s in samples
        )


def test_a_decimal_is_not_a_float() -> None:
    assert not equal(Decimal("0.1"), 0.1)
