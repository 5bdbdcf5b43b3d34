"""A manifest as a file: the same data set without listing or counting, or a typed error."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import loader
from cachefs.errors import Changed, FormatError
from cachefs.shard import ObjectStat
from loader.formats import Mds
from loader.manifest import Manifest
from loader.manifest_file import parse_manifest, save_manifest
from loader.testing import write_mds, write_tars


def keys(source: Path, **options: object) -> list[object]:
    return [s["__id__"] for s in loader.ShardDataset(source, batch_size=1, ids=True, **options)]  # type: ignore[arg-type]


def test_a_saved_manifest_is_the_data_set(tmp_path: Path) -> None:
    write_tars(tmp_path / "data", [3, 0, 5])
    ds = loader.ShardDataset(tmp_path / "data", batch_size=1)
    ds.save_manifest(tmp_path / "train.manifest")
    again = loader.ShardDataset(tmp_path / "train.manifest", batch_size=1)
    assert again.manifest.digest == ds.manifest.digest
    assert keys(tmp_path / "train.manifest") == keys(tmp_path / "data")
    again.load_state_dict(ds.state_at(3))
    assert list(tmp_path.glob(".manifest-*")) == []


def test_options_and_sizes_come_back(tmp_path: Path) -> None:
    blobs = write_mds(tmp_path / "data", [4, 2])
    ds = loader.ShardDataset(tmp_path / "data", batch_size=2)
    ds.save_manifest(tmp_path / "m.manifest")
    back = parse_manifest((tmp_path / "m.manifest").read_bytes(), "m")
    assert isinstance(back.format, Mds) and back.total == len(blobs)
    for mine, theirs in ((back.sizes, ds.manifest.sizes), (back.raw_sizes, ds.manifest.raw_sizes)):
        assert mine is not None and theirs is not None
        np.testing.assert_array_equal(mine, theirs)


def test_a_replaced_shard_is_noticed(tmp_path: Path) -> None:
    write_tars(tmp_path / "data", [3, 2])
    loader.ShardDataset(tmp_path / "data", batch_size=1).save_manifest(tmp_path / "t.manifest")
    shard = tmp_path / "data" / "001.tar"
    raw = shard.read_bytes()
    shard.unlink()
    shard.write_bytes(raw + bytes(512))
    with pytest.raises(Changed):
        list(loader.ShardDataset(tmp_path / "t.manifest", batch_size=1))


@pytest.mark.parametrize("at", [0, 10, 25, 60, -1])
def test_damage_is_told(tmp_path: Path, at: int) -> None:
    write_tars(tmp_path / "data", [3])
    path = tmp_path / "t.manifest"
    loader.ShardDataset(tmp_path / "data", batch_size=1).save_manifest(path)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    with pytest.raises(FormatError, match=r"t\.manifest"):
        len(loader.ShardDataset(path, batch_size=1))


def test_names_are_checked(tmp_path: Path) -> None:
    write_tars(tmp_path / "data", [3])
    ds = loader.ShardDataset(tmp_path / "data", batch_size=1)
    with pytest.raises(FormatError, match=r"\.manifest"):
        ds.save_manifest(tmp_path / "t.json")


def test_a_hundred_thousand_shards_open_in_a_second(tmp_path: Path) -> None:
    n = 100_000
    stats = tuple(ObjectStat(f"s3://bucket/set/shard.{i:06d}.mds", 1 << 26, f'"{i:032x}"') for i in range(n))
    counts = np.full(n, 700, dtype=np.int64)
    sizes = np.full(n, 1 << 26, dtype=np.int64)
    manifest = Manifest(stats, counts, sizes, sizes, Mds(), "d", {}, 0)
    save_manifest(manifest, tmp_path / "big.manifest")
    took = []
    for _ in range(3):
        start = time.perf_counter()
        back = parse_manifest((tmp_path / "big.manifest").read_bytes(), "big")
        took.append(time.perf_counter() - start)
    assert back.shards == stats and back.total == 700 * n
    assert min(took) < 1, took
