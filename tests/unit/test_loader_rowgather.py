"""Windows of many token shards: gathered in one call, the same as read one by one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.errors import FormatError
from loader.formats import Tokens
from loader.rowgather import WindowRows
from loader.rowspace import RowSpace, supported
from loader.samples import Places

pytestmark = pytest.mark.skipif(not supported(), reason="files cannot be placed at an address here")


def files(folder: Path, counts: list[int], dtype: str = "uint16") -> list[np.ndarray[Any, Any]]:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(len(counts))
    out = []
    for i, count in enumerate(counts):
        out.append(rng.integers(0, 60000, count).astype(dtype))
        out[-1].tofile(folder / f"{i:03d}.bin")
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"length": 8},
        {"length": 8, "labels": True},
        {"length": 8, "out": "int64"},
        {"length": 8, "labels": True, "out": "int64", "dtype": "uint32"},
        {"length": 8, "stride": 3},
        {"length": 5, "stride": 11, "labels": True},
        {"length": 4097, "dtype": "uint8"},
        {"length": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_rows_are_those_of_the_samples(tmp_path: Path, options: dict[str, Any], capacity: int) -> None:
    format = Tokens(**options)
    files(tmp_path, [5000, 0, 9000, 4098, 12345, 5], format.dtype)
    ds = loader.ShardDataset(tmp_path, batch_size=1, format=format)
    definition = ds._definition
    manifest = ds.manifest
    rows = WindowRows(format, manifest, definition.client, capacity=capacity)
    pool = ds.begin_pass().reader.pool
    rng = np.random.default_rng(1)
    shards = np.flatnonzero(manifest.counts)
    for size in (1, 2, 40):
        for _ in range(4):
            shard = rng.choice(shards, size)
            row = np.array([rng.integers(manifest.counts[s]) for s in shard])
            names = ["tokens", "labels"] if format.labels else ["tokens"]
            arrays = [(np.empty((size, format.length), format.delivered), at) for at in range(len(names))]
            rows.gather(Places(shard, row), arrays, pool)
            for k in range(size):
                opened = pool.get(int(shard[k]))
                sample = format.read(opened.source, opened.index, int(row[k]), opened.url)
                for name, (array, _) in zip(names, arrays, strict=True):
                    np.testing.assert_array_equal(array[k], sample[name])
    rows.close()
    rows.close()


def test_a_batch_is_the_same_with_and_without_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path, [999] * 9)
    format = Tokens(length=16, labels=True, out="int64")

    def batches() -> list[Any]:
        ds = loader.ShardDataset(tmp_path, batch_size=7, format=format, ids=True)
        return [{k: v.tolist() for k, v in batch.items()} for _ in range(2) for batch in ds.batched()]

    placed = batches()
    monkeypatch.setattr("loader.rowgather.supported", lambda: False)
    assert batches() == placed


def test_places_are_given_away_to_the_longest_unused(tmp_path: Path) -> None:
    contents = files(tmp_path, [64] * 6)
    ds = loader.ShardDataset(tmp_path, batch_size=1, format=Tokens(length=8))
    rows = WindowRows(Tokens(length=8), ds.manifest, ds._definition.client, capacity=3)
    pool = ds.begin_pass().reader.pool

    def read(shards: list[int]) -> None:
        out = np.empty((len(shards), 8), np.uint16)
        rows.gather(Places(np.array(shards), np.full(len(shards), 7)), [(out, 0)], pool)
        np.testing.assert_array_equal(out, [contents[s][56:64] for s in shards])

    for wanted in ([0, 1, 2], [0, 1], [3], [0, 3], [4, 5, 0], [2], [0, 1, 2, 3, 4, 5], [5, 4, 3]):
        read(wanted)
        assert len(rows._open) <= 3
    rows.close()


def test_a_changed_or_damaged_shard_is_told(tmp_path: Path) -> None:
    files(tmp_path, [64, 64])
    ds = loader.ShardDataset(tmp_path, batch_size=2, format=Tokens(length=8))
    manifest = ds.manifest
    object.__setattr__(manifest, "counts", manifest.counts + 1)  # an index that says too much
    with pytest.raises(FormatError, match="holds 8 samples, the data set's index says 9"):
        next(iter(ds.batched()))


def test_what_is_placed_stays_for_the_next_pass_and_nothing_leaks(tmp_path: Path) -> None:
    files(tmp_path, [640] * 5)
    ds = loader.ShardDataset(tmp_path, batch_size=4, format=Tokens(length=8))
    list(ds.batched())
    kept = ds._definition._rows
    assert kept is not None
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    for _ in range(20):
        for _ in ds.batched():
            break
    assert ds._definition._rows is kept or ds._definition._rows[2] is kept[2]
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/fd")) <= before + 1


def test_a_range_is_only_made_where_it_fits() -> None:
    assert RowSpace.fits(1 << 30, 4096)
    assert not RowSpace.fits(1 << 45, 4096)
    assert not RowSpace.fits(100, 0)
    space = RowSpace(4, 10_000, 4098)
    assert space.slot_bytes % 4096 == 0 and space.slot_bytes % 4098 == 0
