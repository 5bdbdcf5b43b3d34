"""Random records that the ``lmdb`` package wrote read back equal."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.formats import Lmdb, detect_bytes

lmdb = pytest.importorskip("lmdb")
KEYS = st.binary(min_size=1, max_size=60) | st.integers(0, 200).map(lambda i: b"%05d" % i)
VALUES = st.binary(max_size=60) | st.builds(
    lambda size, byte: bytes([byte]) * size, st.integers(0, 20_000), st.integers(0, 255)
)
RAW = Lmdb(skip=(), group=False)


def read_back(path: Path, format: Lmdb) -> list[tuple[bytes, bytes]]:
    data = np.fromfile(path, np.uint8)
    assert isinstance(detect_bytes(data, "shard"), Lmdb)
    index = format.index(data, "shard")
    samples = [format.read(data, index, i, "shard") for i in range(len(index))]
    return [(s["__key__"].encode("utf-8", "surrogateescape"), s["value"].tobytes()) for s in samples]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=60), st.lists(KEYS, max_size=20))
def test_records_read_back_equal(put: list[tuple[bytes, bytes]], deleted: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "db")
        with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 26) as env:
            with env.begin(write=True) as transaction:
                for key, value in put:
                    transaction.put(key, value)
            with env.begin(write=True) as transaction:
                for key in deleted:
                    transaction.delete(key)
        assert read_back(path, RAW) == sorted((k, v) for k, v in dict(put).items() if k not in deleted)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([b"a", b"bb", b"c" * 9]), st.binary(min_size=1, max_size=400)), max_size=150),
    st.booleans(),
)
def test_duplicates_read_back_equal(put: list[tuple[bytes, bytes]], fixed: bool) -> None:
    put = [(key, value[:8].ljust(8)) for key, value in put] if fixed else put
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "db")
        with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24, max_dbs=1) as env:
            database = env.open_db(b"inner", dupsort=True, dupfixed=fixed)
            with env.begin(write=True, db=database) as transaction:
                for key, value in put:
                    transaction.put(key, value)
        assert read_back(path, Lmdb(database="inner", skip=(), group=False)) == sorted(set(put))
