"""zarr stores that lie: sizes that are not theirs, bombs, indexes that point outside, metadata that is nonsense."""

from __future__ import annotations

import copy
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import zstandard

import loader
from cachefs.errors import DataError, FormatError
from tests.unit.test_formats_zarr import FakeObjects, write

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")


def _damaged(tmp_path: Path, data: bytes, key: str = "c/0/0") -> FormatError:
    path = tmp_path / "s" / "x" / key
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(FormatError) as e:
        loader.open_shard(tmp_path / "s")[0]
    return e.value


def test_a_zstd_bomb_is_not_unpacked(tmp_path: Path) -> None:
    write(tmp_path / "s")
    assert "more than the" in str(_damaged(tmp_path, zstandard.compress(bytes(64 << 20))))
    stream = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    unsized = stream.compress(bytes(64 << 20)) + stream.flush()
    assert zstandard.frame_content_size(unsized) == -1
    assert "more than the" in str(_damaged(tmp_path, unsized))


@pytest.mark.parametrize(("at", "value"), [(4, 1 << 30), (4, -1), (12, 10_000), (12, 15), (8, 0), (8, -5)])
def test_a_blosc_header_that_lies_is_not_believed(tmp_path: Path, at: int, value: int) -> None:
    write(tmp_path / "s", compressors=zarr.codecs.BloscCodec())
    data = bytearray((tmp_path / "s" / "x" / "c" / "0" / "0").read_bytes())
    struct.pack_into("<i", data, at, value)
    told = str(_damaged(tmp_path, bytes(data)))
    assert "blosc header" in told or "more than" in told


@pytest.mark.parametrize("codec", ["zlib", "gzip", "bz2", "lzma"])
def test_bombs_of_streams_that_declare_nothing(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.formats.zarr_guard._LARGE", 1 << 20)
    write(tmp_path / "s", version=2, compressors=numcodecs.get_codec({"id": codec}))
    bomb = numcodecs.get_codec({"id": codec}).encode(bytes(20 << 20))
    assert "more than the" in str(_damaged(tmp_path, bytes(bomb), "0.0"))


@pytest.mark.parametrize("index", [(1 << 40, 8), (0, 1 << 62), ((1 << 64) - 8, 100), (5, (1 << 64) - 3)])
def test_a_shard_s_index_that_points_outside(tmp_path: Path, index: tuple[int, int]) -> None:
    write(tmp_path / "s", chunks=(2, 3), shards=(4, 3))
    data = bytearray((tmp_path / "s" / "x" / "c" / "0" / "0").read_bytes())
    struct.pack_into("<QQ", data, len(data) - 4 - 32, *index)
    assert "points past" in str(_damaged(tmp_path, bytes(data)))


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [1 << 61, 3]},
        {"shape": [10, 1 << 50]},
        {"shape": [10]},
        {"shape": [-1, 3]},
        {"shape": [True, 3]},
        {"shape": "10"},
        {"shape": None},
        {"shape": [1] * 500},
        {"chunk_grid": None},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 3]}}},
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 50, 3]}}},
        {"chunk_grid": {"name": "regular", "configuration": []}},
        {"data_type": "float1024"},
        {"data_type": {"name": "fixed_length_utf32", "configuration": {"length_bytes": 1 << 60}}},
        {"codecs": []},
        {"codecs": None},
        {"codecs": [{"name": "no_such_codec"}]},
        {"codecs": [{"name": "bytes"}, {"name": "zstd", "configuration": 5}]},
        {"fill_value": "x"},
        {"zarr_format": 4},
    ],
)
def test_metadata_that_cannot_be(tmp_path: Path, change: dict[str, Any]) -> None:
    write(tmp_path / "s")
    meta = tmp_path / "s" / "x" / "zarr.json"
    document = {**json.loads(meta.read_text()), **change}
    meta.write_text(json.dumps(document))
    with pytest.raises(FormatError) as e:
        len(loader.ShardDataset(tmp_path / "s", batch_size=1))
    assert "\n" not in str(e.value)


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        _places(inner, found)
    return found


@pytest.mark.parametrize("version", [2, 3])
def test_any_value_in_the_metadata_may_be_nonsense(tmp_path: Path, version: int) -> None:
    options: dict[str, Any] = {"shards": (4, 3), "chunks": (2, 3)} if version == 3 else {}
    write(tmp_path / "s", version=version, **options)
    objects = FakeObjects(tmp_path / "s")
    [key] = [name for name in objects.files if name.startswith("x/") and name.endswith(("zarr.json", ".zarray"))]
    document = json.loads(objects.files[key])
    rng = random.Random(version)
    nonsense = [None, -1, 0, 1, 7, 1 << 63, 1.5, "", "x", [], {}, [1, 2], True, "int64", "zstd", "|O", ">f8"]
    for _ in range(300):
        mutated = copy.deepcopy(document)
        holder, at = rng.choice(_places(mutated, []))
        holder[at] = rng.choice(nonsense)
        objects.files[key] = json.dumps(mutated).encode()
        try:
            objects.rows()
        except DataError as e:
            assert "\n" not in str(e)
