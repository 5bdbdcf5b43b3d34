"""MDS shards: column encodings, and damage that is found before anything outside the shard is touched."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import loader
from cachefs.errors import FormatError, NotFound, UnknownFormat
from loader.formats.mds_columns import make_column
from loader.layouts.mds_index import read_mds_index
from loader.testing import mds_bytes, write_mds


def raw(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(data), np.uint8)


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


class TestColumns:
    @pytest.mark.parametrize(
        ("encoding", "data", "value"),
        [
            ("int", struct.pack("<q", -5), -5),
            ("uint16", struct.pack("<H", 65535), 65535),
            ("float32", struct.pack("<f", 1.5), 1.5),
            ("str", "é".encode(), "é"),
            ("str_int", b"1000000000000000000000", 10**21),
            ("json", b'{"a": [1, null]}', {"a": [1, None]}),
        ],
    )
    def test_values(self, encoding: str, data: bytes, value: Any) -> None:
        column = make_column("x", encoding)
        assert column.decode(raw(data)) == value
        assert column.size in (None, len(data))

    def test_arrays_are_views(self) -> None:
        data = raw(bytes([17, (2 << 2) | 1]) + struct.pack("<2H", 1, 3) + np.array([1, 2, 3], "<i2").tobytes())
        value = make_column("x", "ndarray").decode(data)
        assert value.dtype == np.int16 and value.tolist() == [[1, 2, 3]]
        assert np.shares_memory(value, data)
        fixed = make_column("x", "ndarray:uint8:2,2").decode(raw(b"abcd"))
        assert fixed.shape == (2, 2)

    @pytest.mark.parametrize(
        ("encoding", "data"),
        [
            ("ndarray", b""),
            ("ndarray", b"\x07"),
            ("ndarray", b"\x08"),
            ("ndarray", bytes([8, (63 << 2) | 3, 1])),
            ("ndarray", bytes([8, (1 << 2), 200, 1])),
            ("ndarray:uint8", bytes([(2 << 2) | 3]) + struct.pack("<2Q", 2**40, 2**40)),
            ("json", b"{"),
            ("json", b"[" * 100_000),
            ("str", b"\xff"),
            ("str_int", b"1x"),
            ("str_float", b"one"),
            ("str_decimal", b"1.2.3"),
        ],
    )
    def test_bytes_that_are_no_such_value(self, encoding: str, data: bytes) -> None:
        with pytest.raises(ValueError):
            make_column("x", encoding).decode(raw(data))

    @pytest.mark.parametrize("encoding", ["pkl", "ndarray:object", "ndarray:uint8:-1", "uint128", "list[str]", "int:3"])
    def test_encodings_that_are_refused(self, encoding: str) -> None:
        with pytest.raises(ValueError, match="'x'"):
            make_column("x", encoding)

    def test_a_refused_column_only_matters_when_it_is_asked_for(self, tmp_path: Path) -> None:
        data = mds_bytes({"a": "str", "p": "pkl"}, [{"a": b"one", "p": b"\x80"}], [None, None])
        path = save(tmp_path / "x.mds", data)
        with pytest.raises(FormatError, match="pickles, which are refused"):
            loader.open_shard(path)[0]
        assert [dict(s) for s in loader.ShardDataset(path, batch_size=1, fields=["a"])] == [{"a": "one"}]


class TestDamage:
    GOOD = mds_bytes({"a": "str", "n": "int"}, [{"a": b"one", "n": bytes(8)}, {"a": b"two", "n": bytes(8)}], [None, 8])

    def check(self, tmp_path: Path, data: bytes, words: str) -> None:
        path = save(tmp_path / "x.mds", data)
        with pytest.raises(FormatError, match=words) as error:
            list(loader.open_shard(path, format="mds"))
        assert str(path) in str(error.value) and error.value.offset is not None

    def test_too_short(self, tmp_path: Path) -> None:
        self.check(tmp_path, b"\x01\x00\x00", "too few for an MDS shard")

    def test_a_count_that_does_not_fit(self, tmp_path: Path) -> None:
        self.check(tmp_path, struct.pack("<I", 2**31) + self.GOOD[4:], "declares 2147483648 samples")

    def test_cut_off(self, tmp_path: Path) -> None:
        self.check(tmp_path, self.GOOD[:-1], "cut off or damaged")

    def test_offsets_that_fall(self, tmp_path: Path) -> None:
        first = struct.unpack_from("<I", self.GOOD, 4)[0]
        self.check(tmp_path, self.GOOD[:8] + struct.pack("<I", first - 1) + self.GOOD[12:], "lies before")

    def test_sizes_that_do_not_fill_the_sample(self, tmp_path: Path) -> None:
        first = struct.unpack_from("<I", self.GOOD, 4)[0]
        data = self.GOOD[:first] + struct.pack("<I", 2**32 - 1) + self.GOOD[first + 4 :]
        self.check(tmp_path, data, "columns of sample 0 take")

    @pytest.mark.parametrize("header", [b"{}", b"[1]", b"\xff", b'{"column_names":[1]}'])
    def test_a_header_that_is_none(self, tmp_path: Path, header: bytes) -> None:
        at = 8 + len(header)
        self.check(tmp_path, struct.pack("<II", 0, at) + header, "description of the columns")

    def test_a_declared_size_that_is_not_the_encoding_s(self, tmp_path: Path) -> None:
        self.check(tmp_path, mds_bytes({"n": "int"}, [{"n": bytes(4)}], [4]), "declared as 4 bytes")

    def test_zstandard_damage_and_bombs(self, tmp_path: Path) -> None:
        packed = zstandard.compress(self.GOOD)
        assert len(loader.open_shard(save(tmp_path / "a.mds.zstd", packed))) == 2
        for data in (packed[:-3], packed[:20] + b"\xff" + packed[21:]):
            with pytest.raises(FormatError):
                loader.open_shard(save(tmp_path / "b.mds.zstd", data), format="mds")


class TestIndex:
    def test_counts_and_sizes_come_from_it(self, tmp_path: Path) -> None:
        blobs = write_mds(tmp_path, [3, 0, 2])
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)
        assert ds.manifest.counts.tolist() == [3, 0, 2]
        assert [s["blob"].tobytes() for s in ds] == blobs

    def test_a_shard_that_holds_another_number_is_damaged(self, tmp_path: Path) -> None:
        write_mds(tmp_path, [3, 2])
        index = json.loads((tmp_path / "index.json").read_text())
        index["shards"][1]["samples"] = 5
        (tmp_path / "index.json").write_text(json.dumps(index))
        with pytest.raises(FormatError, match=r"shard\.00001\.mds: holds 2 samples, the data set's index says 5"):
            list(loader.ShardDataset(tmp_path, batch_size=1, shuffle=False))

    def test_a_shard_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        write_mds(tmp_path, [3, 2])
        (tmp_path / "shard.00001.mds").unlink()
        with pytest.raises(NotFound, match=r"shard\.00001\.mds"):
            len(loader.ShardDataset(tmp_path, batch_size=1))

    @pytest.mark.parametrize("name", ["../x.mds", "/etc/x.mds", "a/../../x", "", "a//b", "a\\b"])
    def test_names_that_leave_the_folder_are_refused(self, name: Any) -> None:
        shard = {"format": "mds", "samples": 1, "raw_data": {"basename": name, "bytes": 1}}
        with pytest.raises(FormatError, match="not one inside its folder"):
            read_mds_index(json.dumps({"version": 2, "shards": [shard]}).encode(), "u")

    @pytest.mark.parametrize(
        ("document", "error"),
        [
            ("nope", FormatError),
            ('{"shards": 3}', FormatError),
            ('{"version": 1, "shards": []}', UnknownFormat),
            ('{"version": 2, "shards": [{"format": "jsonl"}]}', UnknownFormat),
            (
                '{"version": 2, "shards": [{"format": "mds", "samples": -1, "raw_data": {"basename": "a", "bytes": 1}}'
                "]}",
                FormatError,
            ),
            ('{"chunks": [], "config": {}}', UnknownFormat),
        ],
    )
    def test_documents_that_are_no_index(self, document: str, error: type[Exception]) -> None:
        with pytest.raises(error, match=r"^u: "):
            read_mds_index(document.encode(), "u")

    def test_a_compression_that_is_not_read_says_so(self) -> None:
        data = {"basename": "a.mds", "bytes": 1}
        zipped = {"basename": "a.mds.lz4", "bytes": 1}
        shard = {"format": "mds", "samples": 1, "raw_data": data, "zip_data": zipped, "compression": "lz4:9"}
        with pytest.raises(UnknownFormat, match="lz4:9, which is not read"):
            read_mds_index(json.dumps({"version": 2, "shards": [shard]}).encode(), "u")
