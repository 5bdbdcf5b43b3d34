"""Random arrays that zarr wrote read back equal: formats, codecs, shards, orders, separators, missing chunks."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import loader
from cachefs.client import connect
from loader.formats import Zarr
from loader.opening import ClientObjects

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")

DTYPES = ["u1", "<i2", ">i4", "<i8", "<f4", ">f8", "?", "<c8", "S3", "<U4", "<M8[s]"]
V2 = [None, "auto", numcodecs.Zlib(), numcodecs.LZ4(), numcodecs.Blosc(), numcodecs.Zstd(), numcodecs.LZMA()]
V3 = [
    None,
    "auto",
    zarr.codecs.GzipCodec(),
    zarr.codecs.BloscCodec(),
    [zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()],
]


@st.composite
def arrays(draw: st.DrawFn, rows: int, version: int) -> tuple[np.ndarray, dict[str, Any]]:
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = (rows, *draw(st.lists(st.integers(1, 4), max_size=2)))
    numbers = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 200, shape)
    values = numbers.astype("<M8[s]") if dtype.kind == "M" else numbers.astype(dtype)
    chunks = tuple(draw(st.integers(1, n + 1)) for n in shape)
    options: dict[str, Any] = {"chunks": chunks}
    if version == 2:
        options["compressors"] = draw(st.sampled_from(V2))
        options["order"] = draw(st.sampled_from("CF"))
        options["chunk_key_encoding"] = {"name": "v2", "separator": draw(st.sampled_from("./"))}
        if dtype.kind in "iu" and draw(st.booleans()):
            options["filters"] = [numcodecs.Delta(dtype=dtype.str)]
    else:
        options["compressors"] = draw(st.sampled_from(V3))
        options["chunk_key_encoding"] = {"name": "default", "separator": draw(st.sampled_from("./"))}
        if draw(st.booleans()):
            options["shards"] = tuple(n * draw(st.integers(1, 3)) for n in chunks)
        if draw(st.booleans()) and len(shape) > 1:
            options["filters"] = [zarr.codecs.TransposeCodec(order=tuple(reversed(range(len(shape)))))]
    return values, options


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(1, 12), st.sampled_from([2, 3]), st.booleans(), st.booleans())
def test_stores_read_back_equal(data: st.DataObject, rows: int, version: int, consolidated: bool, lone: bool) -> None:
    made = [data.draw(arrays(rows, version)) for _ in range(1 if lone else 2)]
    names = ["data"] if lone else ["a", "deep/b"]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr warns of dtypes that the specification lacks
        path = Path(folder, "s")
        if not lone:
            zarr.open_group(path, mode="w", zarr_format=version)
        for name, (values, options) in zip(names, made, strict=True):
            array = zarr.create_array(
                path,
                name=None if lone else name,
                shape=values.shape,
                dtype=values.dtype,
                zarr_format=version,
                **options,
            )
            written = data.draw(st.integers(0, rows))  # the rest stays absent, and reads as the fill value
            array[:written] = values[:written]
            values[...] = array[:]
        if consolidated and not lone:
            zarr.consolidate_metadata(path)
        samples = list(loader.open_shard(path))
        assert len(samples) == rows
        opened = Zarr().open(ClientObjects(connect(), {}), str(path))
        which = np.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=5)))
        gathered = Zarr().columns(opened.source, opened.index, which, str(path))
        for name, (values, _) in zip(names, made, strict=True):
            native = values.astype(values.dtype.newbyteorder("="))
            for i, sample in enumerate(samples):
                assert np.asarray(sample[name]).tobytes() == native[i].tobytes()  # NaT and NaN are no equals
                if isinstance(sample[name], np.ndarray):
                    assert sample[name].dtype == native.dtype
                    assert sample[name].flags.writeable and sample[name].flags.c_contiguous
            assert gathered[name].tobytes() == native[which].tobytes()
