"""WebDataset tars: keys and fields, odd entries, and damage that is named and never hidden."""

from __future__ import annotations

import gzip
import io
import tarfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import loader
from cachefs.errors import ConfigError, FormatError, MissingField
from loader import DataWarning
from loader.formats import WebDataset
from loader.formats.packed import gunzip
from loader.testing import tar_bytes

GOOD = [("d/2.jpg", b"jpg 2"), ("d/2.json", b'{"2":2}')]
THREE = [(f"{i}.bin", bytes([i]) * 700) for i in range(3)]


def save(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def one_line(error: pytest.ExceptionInfo[FormatError], path: Path, offset: int | None = None) -> str:
    text = str(error.value)
    assert "\n" not in text and str(path) in text
    assert error.value.__context__ is None or error.value.__suppress_context__
    if offset is not None:
        assert error.value.offset == offset
    return text


class TestNames:
    def test_the_first_dot_of_the_base_name_splits(self, tmp_path: Path) -> None:
        names = ["clip 3.5 (take 2).flac", "clip 3.5 (take 2).txt", "v1.2/0007.seg.png", "v1.2/0007.json"]
        path = save(tmp_path / "a.tar", tar_bytes([(n, n.encode()) for n in [*names, ".hidden", "README"]]))
        with loader.open_shard(path) as reader:
            assert [(s["__key__"], sorted(set(s) - {"__key__"})) for s in reader] == [
                ("clip 3", ["5 (take 2).flac", "5 (take 2).txt"]),
                ("v1.2/0007", ["json", "seg.png"]),
            ]
            assert reader.skipped == 2

    def test_the_last_dot_splits_where_asked(self, tmp_path: Path) -> None:
        names = ["clip 3.5 (take 2).flac", "clip 3.5 (take 2).txt", "v1.2/0007.seg.png"]
        path = save(tmp_path / "a.tar", tar_bytes([(n, b"") for n in names]))
        reader = loader.open_shard(path, format=WebDataset(split="last"))
        assert [(s["__key__"], sorted(set(s) - {"__key__"})) for s in reader] == [
            ("clip 3.5 (take 2)", ["flac", "txt"]),
            ("v1.2/0007.seg", ["png"]),
        ]
        with pytest.raises(ConfigError, match="split="):
            WebDataset(split="middle")  # type: ignore[arg-type]

    def test_field_names_are_lower_cased_and_keys_are_not(self, tmp_path: Path) -> None:
        path = save(
            tmp_path / "a.tar", tar_bytes([("A.JPG", b"1"), ("A.Left.png", b"2"), ("A.json", b"3"), ("b.jpg", b"4")])
        )
        reader = loader.open_shard(path)
        assert list(reader[0]) == ["__key__", "jpg", "left.png", "json"]
        assert reader[0]["__key__"] == "A"
        assert list(reader[1]) == ["__key__", "jpg"]

    def test_an_absent_field_lists_those_present(self, tmp_path: Path) -> None:
        sample = loader.open_shard(save(tmp_path / "a.tar", tar_bytes(GOOD)))[0]
        with pytest.raises(MissingField, match=r"'cls'.*__key__, jpg, json"):
            sample["cls"]
        assert sample.get("cls") is None and "cls" not in sample

    def test_names_that_are_not_utf8_are_kept(self, tmp_path: Path) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
            info = tarfile.TarInfo("caf\xe9.txt")
            tar.addfile(info)
        [sample] = loader.open_shard(save(tmp_path / "a.tar", out.getvalue()))
        assert sample["__key__"].encode("utf-8", "surrogateescape") == b"caf\xe9"


class TestEntries:
    def test_directories_links_and_devices_are_no_members(self, tmp_path: Path) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
                info = tarfile.TarInfo(f"x{kind.decode()}.txt")
                info.type = kind
                info.linkname = "a.txt"
                tar.addfile(info)
            info = tarfile.TarInfo("a.txt")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        [sample] = loader.open_shard(save(tmp_path / "a.tar", out.getvalue()))
        assert sample["txt"].tobytes() == b"abc"

    def test_an_empty_member_is_an_empty_field(self, tmp_path: Path) -> None:
        [sample] = loader.open_shard(save(tmp_path / "a.tar", tar_bytes([("a.txt", b""), ("a.cls", b"1")])))
        assert sample["txt"].shape == (0,) and sample["cls"].tobytes() == b"1"

    def test_a_sparse_member_is_refused(self, tmp_path: Path) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo("a.bin")
            info.pax_headers = {"GNU.sparse.major": "1"}
            tar.addfile(info)
        with pytest.raises(FormatError, match=r"'a\.bin' is sparse"):
            loader.open_shard(save(tmp_path / "a.tar", out.getvalue()))

    def test_global_pax_headers_and_long_link_names_go_by(self, tmp_path: Path) -> None:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "all"}) as tar:
            tar.addfile(tarfile.TarInfo("a.txt"))
        gnu = io.BytesIO()
        with tarfile.open(fileobj=gnu, mode="w", format=tarfile.GNU_FORMAT) as tar:
            info = tarfile.TarInfo("l.txt")
            info.type, info.linkname = tarfile.SYMTYPE, "x" * 300
            tar.addfile(info)
            tar.addfile(tarfile.TarInfo("b.txt"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert [s["__key__"] for s in loader.open_shard(save(tmp_path / "a.tar", out.getvalue()))] == ["a"]
            assert [s["__key__"] for s in loader.open_shard(save(tmp_path / "b.tar", gnu.getvalue()))] == ["b"]

    def test_sizes_in_base_256(self, tmp_path: Path) -> None:
        raw = bytearray(tar_bytes([("a.bin", b"12345")], tarfile.GNU_FORMAT))
        raw[124:136] = b"\x80" + (5).to_bytes(11, "big")
        _fix_checksum(raw, 0)
        [sample] = loader.open_shard(save(tmp_path / "a.tar", bytes(raw)))
        assert sample["bin"].tobytes() == b"12345"

    def test_a_checksum_over_signed_bytes_is_right_too(self, tmp_path: Path) -> None:
        raw = bytearray(tar_bytes([("caf\xe9.txt", b"x")], tarfile.GNU_FORMAT))
        block = bytes(raw[:148]) + b" " * 8 + bytes(raw[156:512])
        raw[148:156] = b"%06o\0 " % sum(np.frombuffer(block, np.int8).tolist())
        assert len(loader.open_shard(save(tmp_path / "a.tar", bytes(raw)))) == 1

    def test_a_gzipped_archive_of_two_gzip_members(self, tmp_path: Path) -> None:
        raw = tar_bytes(THREE)
        path = save(tmp_path / "a.tar", gzip.compress(raw[:1000]) + gzip.compress(raw[1000:]) + bytes(512))
        assert [s["bin"].tobytes() for s in loader.open_shard(path)] == [data for _, data in THREE]

    def test_a_cut_gzip_stream_is_an_error(self, tmp_path: Path) -> None:
        packed = gzip.compress(tar_bytes(THREE))
        path = save(tmp_path / "a.tar.gz", packed[: len(packed) - 20])
        with pytest.raises(FormatError) as error:
            loader.open_shard(path, format="webdataset")
        assert "gzip" in one_line(error, path)


class TestHostile:
    """A megabyte that takes a moment, not minutes, whatever it holds."""

    def pax(self, records: dict[str, str], members: int) -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT, pax_headers=records) as tar:
            for i in range(members):
                tar.addfile(tarfile.TarInfo(f"{i}.txt"))
        return out.getvalue()

    def test_many_global_records_before_many_members(self, tmp_path: Path) -> None:
        raw = self.pax({f"k{i}": "" for i in range(60_000)}, 1200)
        begun = time.process_time()
        assert len(loader.open_shard(save(tmp_path / "a.tar", raw))) == 1200
        assert time.process_time() - begun < 2

    def test_a_large_extended_header_is_refused(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.tar", self.pax({"k": "x" * (1 << 20)}, 1))
        with pytest.raises(FormatError, match="extended header of") as error:
            loader.open_shard(path)
        one_line(error, path, offset=0)

    def test_a_long_name_is_refused(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.tar", tar_bytes([("x" * 70_000, b"")], tarfile.PAX_FORMAT))
        with pytest.raises(FormatError, match="a name of 70000") as error:
            loader.open_shard(path)
        one_line(error, path)

    def test_many_empty_gzip_members(self) -> None:
        raw = np.frombuffer(gzip.compress(b"") * 150_000 + gzip.compress(b"end"), np.uint8)
        begun = time.process_time()
        assert gunzip(raw, "x").tobytes() == b"end"
        assert time.process_time() - begun < 2

    @pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 5_000, 3_000_000])
    def test_members_of_any_size_come_out_whole(self, size: int) -> None:
        data = np.random.default_rng(size).bytes(size)
        raw = np.frombuffer(gzip.compress(data) + gzip.compress(b"") + gzip.compress(data[:100]) + bytes(600), np.uint8)
        assert gunzip(raw, "x").tobytes() == data + data[:100]


class TestRepeatedMember:
    MEMBERS = (("d/1.jpg", b"aaaaa"), ("d/1.json", b"bbbbb"), ("d/1.jpg", b"ccccc"), *GOOD)

    def test_one_error_names_shard_member_and_offset(self, tmp_path: Path) -> None:
        path = save(tmp_path / "twice.tar", tar_bytes(self.MEMBERS, tarfile.USTAR_FORMAT))
        reader = loader.open_shard(path)
        assert len(reader) == 2
        with pytest.raises(FormatError) as error:
            reader[0]
        assert "'d/1.jpg'" in one_line(error, path, offset=2 * 1024)
        assert reader[1]["jpg"].tobytes() == b"jpg 2"

    def test_with_skip_the_stream_goes_on(self, tmp_path: Path) -> None:
        path = save(tmp_path / "twice.tar", tar_bytes(self.MEMBERS))
        ds = loader.ShardDataset(path, batch_size=2, shuffle=False, on_error="skip")
        with pytest.warns(DataWarning, match="d/1.jpg"):
            keys = [sample["__key__"] for sample in ds]
        assert keys == ["d/2", "d/2"]  # the damaged sample keeps its slot
        assert ds.skipped == 1

    def test_without_skip_the_epoch_ends_with_that_error(self, tmp_path: Path) -> None:
        path = save(tmp_path / "twice.tar", tar_bytes(self.MEMBERS))
        with pytest.raises(FormatError, match=r"'d/1\.jpg' repeats"):
            list(loader.ShardDataset(path, batch_size=1, shuffle=False))

    def test_the_same_name_in_two_tars_is_no_repeat(self, tmp_path: Path) -> None:
        for name in ("a.tar", "b.tar"):
            save(tmp_path / name, tar_bytes([("d/1.jpg", name.encode())]))
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False)
        assert [sample["jpg"].tobytes() for sample in ds] == [b"a.tar", b"b.tar"]

    def test_names_that_differ_in_case_only_are_a_repeat(self, tmp_path: Path) -> None:
        reader = loader.open_shard(save(tmp_path / "a.tar", tar_bytes([("a.jpg", b""), ("a.JPG", b"")])))
        with pytest.raises(FormatError, match=r"a\.JPG"):
            reader[0]


class TestCutOff:
    RAW = tar_bytes(THREE, tarfile.USTAR_FORMAT)  # headers at 0, 1536, 3072; payloads of 700 bytes

    @pytest.mark.parametrize(
        ("length", "offset", "words"),
        [(3072 + 512 + 3, 3072, "'2.bin' needs 700 bytes, 3 are there"), (1536 + 200, 1536, "within a header")],
    )
    def test_a_cut_is_an_error_that_names_url_and_offset(
        self, tmp_path: Path, length: int, offset: int, words: str
    ) -> None:
        path = save(tmp_path / "cut.tar", self.RAW[:length])
        with pytest.raises(FormatError) as error:
            loader.open_shard(path)
        assert words in one_line(error, path, offset)

    @pytest.mark.parametrize("length", [3072 + 512 + 700, 4608, 4608 + 300])
    def test_only_the_end_marker_may_be_missing(self, tmp_path: Path, length: int) -> None:
        path = save(tmp_path / "cut.tar", self.RAW[:length])
        with pytest.warns(DataWarning, match="no end marker"):
            reader = loader.open_shard(path)
        assert [s["bin"].tobytes() for s in reader] == [data for _, data in THREE]

    @pytest.mark.parametrize("length", [3072 + 512 + 3, 1536 + 200])
    def test_with_skip_the_good_tars_come_out_whole(self, tmp_path: Path, length: int) -> None:
        save(tmp_path / "a.tar", tar_bytes([("a.txt", b"a"), ("b.txt", b"b")]))
        save(tmp_path / "b.tar", self.RAW[:length])
        save(tmp_path / "c.tar", tar_bytes([("c.txt", b"c")]))
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False, on_error="skip")
        with pytest.warns(DataWarning, match=r"1 damaged shard.*b\.tar"):
            assert [s["__key__"] for s in ds] == ["a", "b", "c"]
        assert list(ds.manifest.damaged) == [1]
        with pytest.raises(FormatError, match=r"b\.tar at byte"):
            len(loader.ShardDataset(tmp_path, batch_size=1))

    def test_data_behind_the_end_marker_is_warned_of(self, tmp_path: Path) -> None:
        path = save(tmp_path / "joined.tar", self.RAW + self.RAW)
        with pytest.warns(DataWarning, match="behind the tar's end marker"):
            assert len(loader.open_shard(path)) == 3

    def test_a_wrong_checksum_is_found(self, tmp_path: Path) -> None:
        raw = bytearray(self.RAW)
        raw[1536 + 5] ^= 1
        path = save(tmp_path / "bad.tar", bytes(raw))
        with pytest.raises(FormatError, match="checksum") as error:
            loader.open_shard(path)
        one_line(error, path, offset=1536)

    def test_a_header_that_ends_the_archive_is_no_member(self, tmp_path: Path) -> None:
        raw = tar_bytes([("a.txt", b"x"), ("b" * 200 + ".txt", b"x")], tarfile.PAX_FORMAT)
        path = save(tmp_path / "a.tar", raw[: 1024 + 1024] + bytes(1024))
        with pytest.raises(FormatError, match="extended header"):
            loader.open_shard(path)


class TestEmpty:
    def test_empty_tars_add_nothing(self, tmp_path: Path) -> None:
        empty = tar_bytes([])
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            info = tarfile.TarInfo("only/")
            info.type = tarfile.DIRTYPE
            tar.addfile(info)
        for name, data in (("0", empty), ("1", tar_bytes(THREE)), ("2", empty), ("3", out.getvalue())):
            save(tmp_path / f"{name}.tar", data)
        ds = loader.ShardDataset(tmp_path, batch_size=1)
        assert ds.manifest.counts.tolist() == [0, 3, 0, 0]
        assert len(list(ds)) == 3
        assert len(loader.open_shard(tmp_path / "0.tar")) == 0

    def test_no_sample_at_all_is_said_once(self, tmp_path: Path) -> None:
        save(tmp_path / "0.tar", tar_bytes([]))
        with pytest.raises(ValueError, match=r"no sample in 1 shard\(s\)"):
            list(loader.ShardDataset(tmp_path, batch_size=1))

    def test_a_file_of_no_bytes_is_no_tar(self, tmp_path: Path) -> None:
        path = save(tmp_path / "0.tar", b"")
        for format in (None, "webdataset"):
            with pytest.raises(FormatError, match="empty file"):
                loader.open_shard(path, format=format)


def _fix_checksum(raw: bytearray, offset: int) -> None:
    raw[offset + 148 : offset + 156] = b" " * 8
    raw[offset + 148 : offset + 156] = b"%06o\0 " % sum(raw[offset : offset + 512])
