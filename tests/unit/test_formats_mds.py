"""MDS shards: column encodings, and damage that is found before anything outside the shard is touched."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
import zstandard

import loader
from cachefs.errors import ConfigError, FormatError, NotFound, UnknownFormat
from loader.formats import Mds
from loader.formats.mds_columns import make_column
from loader.layouts.mds_index import hashes, mismatch, read_mds_index
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


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "zstd": zstandard.compress,
    "br": lambda raw: bytes(pa.Codec("brotli").compress(raw, asbytes=True)),
    "snappy": lambda raw: bytes(pa.Codec("snappy").compress(raw, asbytes=True)),
}


def write_packed(folder: Path, codec: str, level: str = "", keep_raw: bool = False) -> list[bytes]:
    blobs = write_mds(folder, [3, 2])
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        path = folder / shard["raw_data"]["basename"]
        raw = path.read_bytes()
        packed = PACK[codec](raw)
        (folder / f"{path.name}.{codec}").write_bytes(packed)
        hashes = {"sha1": hashlib.sha1(packed).hexdigest(), "xxh64": xxhash.xxh64(packed).hexdigest(), "none": "1"}
        shard["zip_data"] = {"basename": f"{path.name}.{codec}", "bytes": len(packed), "hashes": hashes}
        shard["compression"] = codec + level
        if not keep_raw:
            path.unlink()
    (folder / "index.json").write_text(json.dumps(index))
    return blobs


class TestCompression:
    @pytest.mark.parametrize(
        ("codec", "level"), [("gz", ":5"), ("bz2", ""), ("zstd", ":3"), ("br", ":11"), ("snappy", "")]
    )
    def test_every_compression_reads(self, tmp_path: Path, codec: str, level: str) -> None:
        blobs = write_packed(tmp_path, codec, level)
        for source in (tmp_path, tmp_path / "index.json"):
            ds = loader.ShardDataset(source, batch_size=1, shuffle=False)
            assert [s["blob"].tobytes() for s in ds] == blobs
        shards = [loader.open_shard(tmp_path / f"shard.0000{i}.mds.{codec}") for i in range(2)]
        samples = [s for shard in shards for s in shard]
        assert [s["blob"].tobytes() for s in samples] == blobs
        assert all(s["blob"].flags.writeable for s in samples)

    def test_an_option_says_what_no_index_does(self, tmp_path: Path) -> None:
        write_packed(tmp_path, "br")
        (tmp_path / "index.json").unlink()
        path = tmp_path / "shard.00000.mds.br"
        assert len(loader.open_shard(path, format=Mds(compression="br:11"))) == 3
        with pytest.raises(FormatError):
            loader.open_shard(path, format="mds")

    def test_a_raw_shard_is_read_as_it_is(self, tmp_path: Path) -> None:
        blobs = write_packed(tmp_path, "snappy", keep_raw=True)
        (tmp_path / "shard.00001.mds.snappy").unlink()
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)
        assert [Path(shard.url).suffix for shard in ds.manifest.shards] == [".snappy", ".mds"]
        assert [s["blob"].tobytes() for s in ds] == blobs

    @pytest.mark.parametrize("codec", sorted(PACK))
    def test_a_size_that_is_not_the_index_s(self, tmp_path: Path, codec: str) -> None:
        write_packed(tmp_path, codec)
        index = json.loads((tmp_path / "index.json").read_text())
        index["shards"][0]["raw_data"]["bytes"] += 1
        (tmp_path / "index.json").write_text(json.dumps(index))
        with pytest.raises(FormatError, match="decompresses to"):
            list(loader.ShardDataset(tmp_path, batch_size=1, shuffle=False))

    @pytest.mark.parametrize("codec", ["br", "gz", "bz2", "zstd"])
    def test_bombs_are_bounded(self, tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("loader.formats.packed.MOST", 1 << 20)
        path = save(tmp_path / "x", PACK[codec](bytes(8 << 20)))
        with pytest.raises(FormatError, match="decompresses to more than"):
            loader.open_shard(path, format=Mds(compression=codec))

    def test_a_snappy_size_that_cannot_be_is_not_allocated(self, tmp_path: Path) -> None:
        path = save(tmp_path / "x", b"\xff\xff\xff\xff\x0f" + bytes(50))
        with pytest.raises(FormatError, match="no Snappy block"):
            loader.open_shard(path, format=Mds(compression="snappy"))

    @pytest.mark.parametrize("codec", ["gz", "bz2", "zstd"])
    def test_a_table_longer_than_the_first_bytes_is_looked_behind(self, tmp_path: Path, codec: str) -> None:
        rows = [{"n": struct.pack("<q", i)} for i in range(3000)]
        path = save(tmp_path / "x", PACK[codec](mds_bytes({"n": "int"}, rows, [8])))
        shard = loader.open_shard(path)
        assert shard.format.name == "mds" and shard[2999] == {"n": 2999}

    def test_options_that_make_no_sense(self) -> None:
        with pytest.raises(ConfigError, match="'lz4'"):
            Mds(compression="lz4")

    def test_options_go_and_come_back(self) -> None:
        format = Mds(compression="br", allow_pickle=True)
        assert Mds.from_options(format.options()) == format
        assert Mds(allow_pickle=True).completed(Mds(compression="br")) == format


class TestMoreColumns:
    @pytest.mark.parametrize("encoding", ["jpeg_array", "jpegarray"])
    def test_arrays_of_images(self, encoding: str) -> None:
        found = make_column("x", encoding).decode(raw(struct.pack("<3I", 2, 1, 2) + b"abb"))
        assert [view.tobytes() for view in found] == [b"a", b"bb"]

    @pytest.mark.parametrize("encoding", ["list[jpeg]", "list[png]", "list[pil]"])
    def test_lists_of_images(self, encoding: str) -> None:
        data = raw(struct.pack("<4I", 0, 2, 0, 2) + b"bb")
        found = make_column("x", encoding).decode(data)
        assert [view.tobytes() for view in found] == [b"", b"bb"]
        assert np.shares_memory(found[1], data)

    @pytest.mark.parametrize("data", [b"", b"\x01\0\0\0", struct.pack("<2I", 1, 9), struct.pack("<I", 2**32 - 1)])
    def test_lists_that_are_cut_off(self, data: bytes) -> None:
        for encoding, head in (("jpeg_array", b""), ("list[png]", bytes(4))):
            with pytest.raises(ValueError):
                make_column("x", encoding).decode(raw(head + data))

    def test_pickles_where_they_are_allowed(self, tmp_path: Path) -> None:
        values = [pickle.dumps({"any": {1}}), b"\x80nonsense"]
        path = save(tmp_path / "x.mds", mds_bytes({"p": "pkl"}, [{"p": value} for value in values], [None]))
        shard = loader.open_shard(path, format=Mds(allow_pickle=True))
        assert shard[0] == {"p": {"any": {1}}}
        with pytest.raises(FormatError, match="the pickle cannot be loaded"):
            shard[1]
        ds = loader.ShardDataset(path, batch_size=1, on_error="skip", format=Mds(allow_pickle=True))
        assert len(ds) == 2


class TestDigests:
    def test_digests_are_those_of_the_files(self, tmp_path: Path) -> None:
        write_packed(tmp_path, "gz", keep_raw=True)
        found = hashes((tmp_path / "index.json").read_bytes(), "u")
        assert sorted(found) == ["shard.00000.mds.gz", "shard.00001.mds.gz"]
        for name, digests in found.items():
            data = bytearray((tmp_path / name).read_bytes())
            assert mismatch(raw(data), digests) is None
            data[-1] ^= 1
            assert mismatch(raw(data), digests) == "sha1"
            assert mismatch(raw(data), {"xxh64": digests["xxh64"]}) == "xxh64"

    def test_splits_below_one_folder_are_read_in_order(self, tmp_path: Path) -> None:
        blobs = [blob for split in ("train", "val") for blob in write_mds(tmp_path / split, [2, 1])]
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)
        assert [s["blob"].tobytes() for s in ds] == blobs
        one = loader.ShardDataset(tmp_path / "val", batch_size=1, shuffle=False)
        assert [s["blob"].tobytes() for s in one] == blobs[3:]

    def test_a_merged_index_above_its_splits(self, tmp_path: Path) -> None:
        blobs = write_mds(tmp_path / "a", [2, 1])
        index = json.loads((tmp_path / "a" / "index.json").read_text())
        for shard in index["shards"]:
            shard["raw_data"]["basename"] = "a/" + shard["raw_data"]["basename"]
        (tmp_path / "index.json").write_text(json.dumps(index))
        ds = loader.ShardDataset(tmp_path / "index.json", batch_size=1, shuffle=False)
        assert [s["blob"].tobytes() for s in ds] == blobs
