"""What ends a tar, and what only looks like it: zeros in its midst, joined archives, names that do not end."""

from __future__ import annotations

import io
import tarfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import loader
from cachefs.errors import DataError, FormatError
from loader import DataWarning
from loader.formats import WebDataset
from loader.testing import tar_bytes

MEMBERS = [(f"{i:03}.bin", bytes([i + 1]) * 700) for i in range(100)]
RAW = tar_bytes(MEMBERS, tarfile.USTAR_FORMAT)
STEP = 512 + 1024


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def blocked(members: list[tuple[str, bytes]], record: int) -> bytes:
    """An archive whose last record is filled up, as ``tar -b`` does it."""
    raw = tar_bytes(members).rstrip(b"\0")
    size = -(-len(raw) // 512) * 512 + 1024
    return raw.ljust(-(-size // record) * record, b"\0")


def zeroed(raw: bytes, start: int, size: int) -> bytes:
    return raw[:start] + bytes(size) + raw[start + size :]


@pytest.mark.parametrize("size", [512, 1024, 1536, 4096, 16 << 10, 20_000])
@pytest.mark.parametrize("start", [10 * STEP, 10 * STEP + 512, 61_440, 13 * STEP])
def test_zeros_in_the_midst_lose_nothing_silently(tmp_path: Path, start: int, size: int) -> None:
    path = save(tmp_path / "a.tar", zeroed(RAW, start, size))
    told = False
    samples: list[bytes] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            samples = [s["bin"].tobytes() for s in loader.open_shard(path)]
        except DataError as e:
            told = "\n" not in str(e) and e.offset is not None
    assert told or len(samples) == len(MEMBERS) or any(issubclass(w.category, DataWarning) for w in seen)


def test_a_lost_run_is_named_by_its_first_byte(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tar", zeroed(RAW, 10 * STEP, 16 << 10))
    with pytest.raises(FormatError, match=r"zeros where members should be.* from byte 32256 on") as error:
        loader.open_shard(path)
    assert error.value.offset == 10 * STEP


def test_one_lost_header_is_no_end(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="one block of zeros"):
        loader.open_shard(save(tmp_path / "a.tar", zeroed(RAW, 10 * STEP, 512)))


@pytest.mark.parametrize("record", [512, 10240, 32 << 10, 1 << 20])
def test_a_joined_tar_is_told(tmp_path: Path, record: int) -> None:
    path = save(tmp_path / "a.tar", blocked(MEMBERS[:3], record) + blocked(MEMBERS[3:9], record))
    with pytest.warns(DataWarning, match="behind the tar's end marker"):
        assert len(loader.open_shard(path)) == 3


@pytest.mark.parametrize("record", [512, 10240, 32 << 10, 1 << 20])
def test_records_of_any_common_size_are_no_peculiarity(tmp_path: Path, record: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(loader.open_shard(save(tmp_path / "a.tar", blocked(MEMBERS[:3], record)))) == 3


def test_a_tail_that_never_came_is_told(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tar", zeroed(RAW, 20 * STEP, len(RAW) - 20 * STEP))
    with pytest.warns(DataWarning, match="it may have lost members"):
        assert len(loader.open_shard(path)) == 20


def test_other_data_behind_the_marker_is_told(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tar", blocked(MEMBERS[:3], 512) + b"signature")
    with pytest.warns(DataWarning, match="data behind the tar's end marker"):
        assert len(loader.open_shard(path)) == 3


def test_half_a_marker_is_told(tmp_path: Path) -> None:
    path = save(tmp_path / "a.tar", blocked(MEMBERS[:3], 512)[:-512])
    with pytest.warns(DataWarning, match="half an end marker"):
        assert len(loader.open_shard(path)) == 3


def test_many_blocks_that_are_no_headers_take_a_moment() -> None:
    block = np.zeros(512, np.uint8)
    block[0], block[148:156] = 1, np.frombuffer(b"000001\0 ", np.uint8)
    raw = np.concatenate([np.frombuffer(blocked(MEMBERS[:1], 512), np.uint8), np.tile(block, 100_000)])
    begun = time.process_time()
    index = WebDataset().index(raw, "x")
    assert time.process_time() - begun < 5
    assert len(index) == 1 and index.notes


class TestNames:
    def test_a_name_for_all_members_is_refused_at_once(self, tmp_path: Path) -> None:
        out = io.BytesIO()
        headers = {"path": "x" * 60_000 + ".bin"}
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
            for i in range(2000):
                tar.addfile(tarfile.TarInfo(f"{i}.bin"))
        begun = time.process_time()
        with pytest.raises(FormatError, match="gives all members one name"):
            loader.open_shard(save(tmp_path / "a.tar", out.getvalue()))
        assert time.process_time() - begun < 1

    @pytest.mark.parametrize("size", [4096, 4097])
    def test_names_end_somewhere(self, tmp_path: Path, size: int) -> None:
        raw = tar_bytes([("x" * (size - 4) + ".bin", b"1"), ("x" * (size - 4) + ".bin", b"1")], tarfile.PAX_FORMAT)
        path = save(tmp_path / "a.tar", raw)
        if size > 4096:
            with pytest.raises(FormatError, match="a name of 4097"):
                loader.open_shard(path)
            return
        with pytest.raises(FormatError, match="repeats a field") as error:
            loader.open_shard(path)[0]
        assert len(error.value.what) < 400

    @pytest.mark.parametrize("name", ["BZh1.txt", "BZhexample/0001.txt"])
    @pytest.mark.parametrize("format", [None, "webdataset"])
    def test_one_that_begins_as_a_compressed_file_does(self, tmp_path: Path, name: str, format: str | None) -> None:
        path = save(tmp_path / "a.tar", tar_bytes([(name, b"text"), ("b.txt", b"more")]))
        assert [s["txt"].tobytes() for s in loader.open_shard(path, format=format)] == [b"text", b"more"]


@pytest.mark.parametrize("data", [bytes(593), bytes(100_000), bytes(1024) + b"x" * 700, bytes(4096) + RAW[4096:]])
def test_zeros_at_the_start_are_an_empty_tar_only_where_nothing_follows(tmp_path: Path, data: bytes) -> None:
    for format in (None, "webdataset"):
        with pytest.raises(FormatError, match="begins with zeros"):
            loader.open_shard(save(tmp_path / "a.tar", data), format=format)
