"""A manifest as a file: the same data set without listing or counting, or a typed error."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash

import loader
from cachefs.errors import Changed, ConfigError, FormatError
from cachefs.shard import ObjectStat
from loader.formats import Mds, TFRecord
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


def sealed(manifest: Manifest) -> bytes:
    body = manifest.to_bytes()
    return b"nearflash manifest 1\n" + xxhash.xxh3_128_digest(body) + body


def manifest_of(tmp_path: Path, **changes: object) -> Manifest:
    write_mds(tmp_path / "data", [4, 2])
    found = loader.ShardDataset(tmp_path / "data", batch_size=2).manifest
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def test_a_file_never_gives_leave_to_run_code(tmp_path: Path) -> None:
    raw = sealed(manifest_of(tmp_path, format=Mds(allow_pickle=True)))
    assert parse_manifest(raw, "m.manifest").format == Mds()
    assert parse_manifest(raw, "m.manifest", Mds(allow_pickle=True)).format == Mds(allow_pickle=True)


def test_a_store_s_manifest_names_no_local_file(tmp_path: Path) -> None:
    raw = sealed(manifest_of(tmp_path))
    assert parse_manifest(raw, str(tmp_path / "m.manifest")).total == 6
    with pytest.raises(FormatError, match="names the local file"):
        parse_manifest(raw, "s3://bucket/m.manifest")


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": ()},
        {"counts": np.array([1, -5])},
        {"part_numbers": np.array([0, -7])},
        {"damaged": {10**6: FormatError("far")}},
        {"skipped": -1},
        {"counts": np.array([1])},
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="another version"):
        parse_manifest(sealed(manifest_of(tmp_path, **changes)), "m.manifest")


def test_options_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="no option 'exmaple'"):
        TFRecord.from_options({"exmaple": True})


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
        start = time.process_time()  # CPU time: a busy machine is not our doing
        back = parse_manifest((tmp_path / "big.manifest").read_bytes(), "big")
        took.append(time.process_time() - start)
    assert back.shards == stats and back.total == 700 * n
    assert min(took) < 1, took
