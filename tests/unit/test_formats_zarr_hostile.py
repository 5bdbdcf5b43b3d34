"""zarr stores that lie: sizes that are not theirs, bombs, indexes that point outside, metadata that is nonsense."""

from __future__ import annotations

import copy
import gzip
import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import loader
from cachefs.errors import DataError, FormatError
from loader.formats import Zarr
from loader.formats.zarr_array import ZarrArray
from loader.formats.zarr_guard import guard_of
from loader.formats.zarr_sizes import Suspect
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


def test_a_zstd_bomb_behind_a_small_frame(tmp_path: Path) -> None:
    write(tmp_path / "s")
    small, skipped = zstandard.compress(bytes(48)), struct.pack("<II3s", 0x184D2A50, 3, b"abc")
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(bytes(48))
    for first in (small, skipped, skipped + small, checked):
        for bomb in (zstandard.compress(bytes(64 << 20)), unsized):
            assert "more than the" in str(_damaged(tmp_path, first + bomb))


def test_zstd_frames_that_are_sound_are_read(tmp_path: Path) -> None:
    values = write(tmp_path / "s")
    path = tmp_path / "s" / "x" / "c" / "0" / "0"
    raw = values[:4].tobytes()
    for data in (
        zstandard.ZstdCompressor(write_checksum=True).compress(raw),
        zstandard.ZstdCompressor(write_content_size=False).compress(raw),
    ):
        path.unlink()
        path.write_bytes(data)
        assert loader.open_shard(tmp_path / "s")[3]["x"].tolist() == values[3].tolist()


def test_many_zstd_blocks_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.formats.zarr_sizes._FREE_BLOCKS", 100)
    write(tmp_path / "s")
    head = zstandard.compress(bytes(48))[:6]
    assert "blocks" in str(_damaged(tmp_path, head + bytes(3) * 5000))


def _rewrite(path: Path, **change: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CRC = {"name": "crc32c"}


def _shard(codecs: list[Any], index: list[Any]) -> dict[str, Any]:
    options = {"chunk_shape": [2, 3], "codecs": codecs, "index_codecs": index, "index_location": "end"}
    return {"name": "sharding_indexed", "configuration": options}


@pytest.mark.parametrize(
    "codecs",
    [
        [BYTES, ZSTD, ZSTD],
        [BYTES, ZSTD, CRC, ZSTD],
        [BYTES, ZSTD, {"name": "numcodecs.zlib", "configuration": {"level": 1}}],
        [BYTES, {"name": "numcodecs.bz2", "configuration": {"level": 1}}, ZSTD, CRC],
        [BYTES, {"name": "numcodecs.lzma", "configuration": {"format": 3, "filters": [{"id": 33}]}}],
        [_shard([BYTES, ZSTD], [BYTES, CRC]), ZSTD],
        [_shard([BYTES, ZSTD, ZSTD], [BYTES, CRC])],
        [_shard([BYTES, ZSTD], [BYTES, ZSTD])],
    ],
)
def test_codecs_that_nothing_bounds_are_refused(tmp_path: Path, codecs: list[Any]) -> None:
    write(tmp_path / "s")
    _rewrite(tmp_path / "s" / "x" / "zarr.json", codecs=codecs)
    with pytest.raises(FormatError, match=r"any size|no known size"):
        loader.open_shard(tmp_path / "s")


ZLIB = {"id": "zlib", "level": 9}


@pytest.mark.parametrize(
    ("filters", "compressor"), [([ZLIB, ZLIB], None), ([ZLIB], {"id": "zstd", "level": 1}), ([ZLIB], {"id": "lz4"})]
)
def test_filters_that_nothing_bounds_are_refused(tmp_path: Path, filters: list[Any], compressor: Any) -> None:
    write(tmp_path / "s", version=2)
    _rewrite(tmp_path / "s" / "x" / ".zarray", filters=filters, compressor=compressor)
    with pytest.raises(FormatError, match="any size"):
        loader.open_shard(tmp_path / "s")


@pytest.mark.parametrize("sums", [[], ["crc32"], ["adler32", "crc32c"], ["fletcher32"], ["jenkins_lookup3"]])
def test_a_filter_that_compresses_is_bounded_below_checksums(
    tmp_path: Path, sums: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.formats.zarr_sizes._LARGE", 1 << 20)
    values = write(tmp_path / "s", version=2, compressors=None)
    filters = [ZLIB, *({"id": name} for name in sums)]
    _rewrite(tmp_path / "s" / "x" / ".zarray", filters=filters, compressor=None)

    def encoded(data: bytes) -> bytes:
        for each in filters:
            data = bytes(numcodecs.get_codec(dict(each)).encode(data))
        return data

    for first in (0, 4, 8):
        chunk = np.zeros((4, 3), "<i4")
        chunk[: len(values[first : first + 4])] = values[first : first + 4]
        (tmp_path / "s" / "x" / f"{first // 4}.0").unlink()
        (tmp_path / "s" / "x" / f"{first // 4}.0").write_bytes(encoded(chunk.tobytes()))
    assert [sample["x"].tolist() for sample in loader.open_shard(tmp_path / "s")] == values.tolist()
    assert "more than the" in str(_damaged(tmp_path, encoded(bytes(20 << 20)), "0.0"))


def test_a_checksum_of_the_specification_s_stands_at_the_end_whatever_it_says(tmp_path: Path) -> None:
    codec = {"name": "crc32c", "configuration": {"location": "start"}}
    check = guard_of({"codecs": [BYTES, {"name": "zstd"}, codec]}, (4, 3), 4, 1 << 30)
    with pytest.raises(Suspect, match="more than the"):
        check(np.frombuffer(zstandard.compress(bytes(1 << 20)) + bytes(4), np.uint8))


def test_a_gzip_bomb_behind_a_small_member_and_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.formats.zarr_sizes._LARGE", 1 << 20)
    write(tmp_path / "s", version=2, compressors=numcodecs.GZip())
    bomb = gzip.compress(bytes(48)) + bytes(5000) + gzip.compress(bytes(20 << 20))
    assert "more than the" in str(_damaged(tmp_path, bomb, "0.0"))


def test_memory_that_runs_out_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = write(tmp_path / "s")
    dataset = loader.ShardDataset(tmp_path / "s", batch_size=1, shuffle=False, on_error="skip")
    check = ZarrArray._check

    def out_of_memory(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(ZarrArray, "_check", out_of_memory)
    with pytest.raises(MemoryError):
        list(dataset)
    monkeypatch.setattr(ZarrArray, "_check", check)
    reader = loader.open_shard(tmp_path / "s")
    with monkeypatch.context() as context:
        context.setattr(ZarrArray, "_check", out_of_memory)
        with pytest.raises(MemoryError):
            reader[0]
    assert reader[0]["x"].tolist() == values[0].tolist(), "the next try may have the memory"


def test_a_pickle_that_is_nested_deep_is_not_missed(tmp_path: Path) -> None:
    write(tmp_path / "s", chunks=(2, 3), shards=(4, 3))
    codec: dict[str, Any] = {"name": "numcodecs.pickle", "configuration": {}}
    for _ in range(8):
        codec = _shard([codec], [BYTES, CRC])
    _rewrite(tmp_path / "s" / "x" / "zarr.json", codecs=[codec])
    with pytest.raises(FormatError, match="nested deeper"):
        loader.open_shard(tmp_path / "s")
    with pytest.raises(FormatError, match="nested deeper"):
        loader.open_shard(tmp_path / "s", Zarr(allow_pickle=True))


@pytest.mark.parametrize("codec", ["zlib", "gzip", "bz2", "lzma"])
def test_bombs_of_streams_that_declare_nothing(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loader.formats.zarr_sizes._LARGE", 1 << 20)
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
