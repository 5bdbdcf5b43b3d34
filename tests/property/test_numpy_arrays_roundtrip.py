"""Random arrays that NumPy wrote read back equal, row by row and in batches."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from loader.formats import Npy, Npz, detect_bytes

SCALARS = arrays_of.scalar_dtypes()
DTYPES = SCALARS | arrays_of.array_dtypes(SCALARS, max_size=3, allow_subarrays=True)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8).filter(
    lambda name: not name.endswith("/") and name not in ("file", "args", "kwds", "allow_pickle") and "\\" not in name
)


def shard(save: Any, *values: Any, **named: Any) -> np.ndarray[Any, Any]:
    out = io.BytesIO()
    save(out, *values, **named)
    return np.frombuffer(bytearray(out.getvalue()), np.uint8)


def same(value: Any, row: Any) -> bool:
    if isinstance(value, dict):
        return all(same(value[name], row[name]) for name in row.dtype.names)
    return np.asarray(value, np.asarray(row).dtype).tobytes() == np.asarray(row).tobytes()


@settings(max_examples=200, deadline=None)
@given(DTYPES.flatmap(lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(max_side=5))), st.booleans())
def test_bare_arrays_read_back_equal(array: np.ndarray[Any, Any], fortran: bool) -> None:
    array = np.asfortranarray(array) if fortran else array
    data = shard(np.save, array)
    assert isinstance(detect_bytes(data, "shard"), Npy)
    for format, rows in ((Npy(), array), (Npy(rows=False), array[None])):
        index = format.index(data, "shard")
        source = format.source(data, index)
        assert len(index) == len(rows)
        every = format.columns(source, index, np.arange(len(rows)), "shard")
        for i, row in enumerate(rows):
            sample = format.read(source, index, i, "shard")
            fields = {"value": row} if row.dtype.names is None else {name: row[name] for name in row.dtype.names}
            assert sample.keys() == fields.keys() == every.keys()
            for name, value in fields.items():
                assert same(sample[name], value) and same(every[name][i], value)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 6), st.dictionaries(NAMES, st.tuples(SCALARS, st.integers(0, 3)), max_size=4), st.data())
def test_archives_read_back_equal(rows: int, wanted: dict[str, tuple[Any, int]], draw: st.DataObject) -> None:
    arrays = {
        name: draw.draw(arrays_of.arrays(dtype, (rows, width) if width else (rows,)))
        for name, (dtype, width) in wanted.items()
    }
    for save in (np.savez, np.savez_compressed):
        data = shard(save, **arrays)
        format = Npz()
        index = format.index(data, "shard")
        source = format.source(data, index)
        assert len(index) == (rows if arrays else 0)
        for i in range(len(index)):
            sample = format.read(source, index, i, "shard")
            assert sample.keys() == arrays.keys()
            assert all(same(sample[name], array[i]) for name, array in arrays.items())
