"""Megatron pairs: what an index may say, and what it may not; llm.c headers."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import loader
from cachefs.errors import ConfigError, EmptyDataset, FormatError, UnknownFormat
from loader.formats import LlmC, Megatron
from tests.fault.damage_cases.llmc import llmc
from tests.fault.damage_cases.megatron import pair


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder / "t.bin"


def tokens(sample: Any) -> list[int]:
    found: list[int] = sample["tokens"].tolist()
    return found


SEVEN = np.arange(7, dtype=np.uint16)


def test_empty_sequences_and_documents_keep_their_places(tmp_path: Path) -> None:
    path = write(tmp_path, pair([3, 0, 4], [0, 0, 2, 3, 3], SEVEN, None))
    assert [tokens(s) for s in loader.open_shard(path)] == [[0, 1, 2], [], [3, 4, 5, 6]]
    documents = loader.open_shard(path, Megatron(sample="document"))
    assert [tokens(s) for s in documents] == [[], [0, 1, 2], [3, 4, 5, 6], []]


def test_modes_are_seen_by_the_size_of_the_index(tmp_path: Path) -> None:
    path = write(tmp_path, pair([3, 0, 4], [0, 2, 3], SEVEN, [0, 1, 7]))
    assert [int(s["mode"]) for s in loader.open_shard(path)] == [0, 1, 7]
    first, second = loader.open_shard(path, Megatron(sample="document"))
    assert (first["mode"].tolist(), first["lengths"].tolist()) == ([0, 1], [3, 0])
    assert (second["mode"].tolist(), second["lengths"].tolist()) == ([7], [4])
    ds = loader.ShardDataset(path, batch_size=3, shuffle=False, fields=["mode"])
    assert next(iter(ds.batched()))["mode"].tolist() == [0, 1, 7]


@pytest.mark.parametrize("cut", [1, 2, 14])
@pytest.mark.parametrize("name", ["t.bin", "t.idx"])
def test_an_index_that_points_past_its_data_names_both_files_and_lengths(tmp_path: Path, cut: int, name: str) -> None:
    files = pair([3, 4], [0, 1, 2], SEVEN, None)
    files["t.bin"] = files["t.bin"][:-cut]
    path = write(tmp_path, files)
    with pytest.raises(FormatError) as e:
        loader.open_shard(tmp_path / name)
    for part in (str(path), str(tmp_path / "t.idx"), f"{14 - cut} bytes", f"{len(files['t.idx'])}"):
        assert part in str(e.value)


def test_an_empty_bin_is_an_empty_data_set_only_if_its_index_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, pair([], [0], SEVEN[:0], None))
    assert len(loader.open_shard(path)) == 0
    with pytest.raises(EmptyDataset):
        _ = loader.ShardDataset(path, batch_size=1, format="megatron").manifest
    write(tmp_path, {**pair([3, 4], [0, 2], SEVEN, None), "t.bin": b""})
    with pytest.raises(FormatError, match="0 bytes"):
        loader.open_shard(path)


def test_tokens_that_are_all_padding_are_no_empty_archive(tmp_path: Path) -> None:
    path = write(tmp_path, pair([500, 524], [0, 2], np.zeros(1024, np.uint16), None))
    assert [len(s["tokens"]) for s in loader.open_shard(path)] == [500, 524]


def test_tokens_that_no_sequence_holds_are_told_of(tmp_path: Path) -> None:
    path = write(tmp_path, pair([3, 2], [0, 2], SEVEN, None))
    with pytest.warns(loader.DataWarning, match="last 4 bytes"):
        assert len(loader.open_shard(path)) == 2


def test_gaps_between_sequences_rule_out_documents_and_windows(tmp_path: Path) -> None:
    files = pair([3, 4], [0, 2], SEVEN, None)
    idx = bytearray(files["t.idx"])
    struct.pack_into("<q", idx, 34 + 8 + 8, 4)
    struct.pack_into("<i", idx, 34 + 4, 3)
    path = write(tmp_path, {"t.bin": files["t.bin"], "t.idx": bytes(idx)})
    with pytest.warns(loader.DataWarning):
        assert [tokens(s) for s in loader.open_shard(path)] == [[0, 1, 2], [2, 3, 4]]
    for format in (Megatron(sample="document"), Megatron(length=2)):
        with pytest.raises(FormatError, match="does not start where"):
            loader.open_shard(path, format)


@pytest.mark.parametrize(
    ("at", "code", "value", "what"),
    [
        (9, "<Q", 2, "version 2"),
        (17, "<B", 0, "dtype code 0"),
        (17, "<B", 9, "dtype code 9"),
        (18, "<Q", 2**63, "declares"),
        (18, "<Q", 3, "declares"),
        (26, "<Q", 2**62, "declares"),
        (34, "<i", -1, "sequence 0"),
        (34, "<i", 2**31 - 1, "sequence 0"),
        (42, "<q", -2, "sequence 0"),
        (50, "<q", 2**63 - 1, "sequence 1"),
        (50, "<q", 5, "sequence 1"),
        (58, "<q", -1, "document bound 0"),
        (66, "<q", 3, "document bound 1"),
        (74, "<q", 0, "document bound 2"),
    ],
)
def test_numbers_that_cannot_be_are_told_with_their_place(
    tmp_path: Path, at: int, code: str, value: int, what: str
) -> None:
    files = pair([3, 4], [0, 1, 2], SEVEN, None)
    idx = bytearray(files["t.idx"])
    struct.pack_into(code, idx, at, value)
    path = write(tmp_path, {**files, "t.idx": bytes(idx)})
    with pytest.raises(FormatError, match=what) as e:
        loader.open_shard(path)
    assert e.value.url == str(tmp_path / "t.idx") and e.value.offset is not None


def test_an_index_that_changes_behind_the_data_set_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path, pair([3, 4], [0, 1, 2], SEVEN, None))
    ds = loader.ShardDataset(path, batch_size=1, format="megatron")
    assert len(ds) == 2
    (tmp_path / "t.idx").unlink()
    write(tmp_path, {"t.idx": pair([3, 2, 2], [0, 3], SEVEN, None)["t.idx"]})
    with pytest.raises(FormatError, match="has changed"):
        list(ds)


def test_an_index_that_changes_to_as_many_sequences_reads_nothing_outside_the_data(tmp_path: Path) -> None:
    path = write(tmp_path, pair([3, 4], [0, 1, 2], SEVEN, None))
    ds = loader.ShardDataset(path, batch_size=1, format="megatron", shuffle=False)
    assert len(ds) == 2
    (tmp_path / "t.idx").unlink()
    write(tmp_path, {"t.idx": pair([3, 6], [0, 2], SEVEN, None)["t.idx"]})
    samples = iter(ds)
    assert tokens(next(samples)) == [0, 1, 2]
    with pytest.raises(FormatError, match="of 14"):
        next(samples)


def test_a_bin_without_its_index_is_no_megatron_data(tmp_path: Path) -> None:
    files = pair([3, 4], [0, 2], SEVEN, None)
    (tmp_path / "t.bin").write_bytes(files["t.bin"])
    with pytest.raises(UnknownFormat):
        loader.open_shard(tmp_path / "t.bin")
    (tmp_path / "t.idx").write_bytes(b"0 512 0 1 2 3")
    with pytest.raises(UnknownFormat):
        loader.open_shard(tmp_path / "t.bin")


def test_writing_into_a_sample_is_private(tmp_path: Path) -> None:
    path = write(tmp_path, pair([3, 4], [0, 2], SEVEN, None))
    loader.open_shard(path)[0]["tokens"][:] = 9
    assert tokens(loader.open_shard(path)[0]) == [0, 1, 2]


def test_out_must_hold_what_the_file_may_hold(tmp_path: Path) -> None:
    path = write(tmp_path, pair([3, 4], [0, 2], SEVEN, None))
    with pytest.raises(ConfigError, match="cannot hold"):
        loader.open_shard(path, Megatron(out="int16"))
    assert loader.open_shard(path, Megatron(out="int32"))[0]["tokens"].dtype == np.int32
    wide = write(tmp_path, pair([3], [0, 1], np.array([1, 2, 70000], np.int32), None))
    with pytest.raises(ConfigError, match="cannot hold"):
        loader.open_shard(wide, Megatron(out="uint16"))


@pytest.mark.parametrize(
    "options",
    [{"sample": "row"}, {"labels": True}, {"stride": 3}, {"length": 0}, {"length": 3, "sample": "document"}],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Megatron(**options)


def test_options_survive_a_manifest() -> None:
    for format in (Megatron(sample="document"), Megatron(length=4, stride=2, labels=True, out="int64")):
        assert Megatron.from_options(format.options()) == format
    assert LlmC.from_options(LlmC(length=9).options()) == LlmC(length=9)
    assert Megatron(out="int64").identity() == Megatron().identity()


def test_llmc_of_llama_3_has_wide_tokens(tmp_path: Path) -> None:
    values = np.array([1, 128_000, 3], "<u4")
    (tmp_path / "t.bin").write_bytes(llmc(20240801, 7, values))
    [sample] = loader.open_shard(tmp_path / "t.bin")
    assert sample["tokens"].dtype == np.uint32 and tokens(sample) == values.tolist()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (llmc(20240520, 1, SEVEN)[:-1], "cut off"),
        (llmc(20240520, 1, SEVEN) + b"\0\0", "cut off"),
        (llmc(20240520, 2, SEVEN), "version 2"),
        (llmc(20240520, 1, SEVEN)[:1000], "too few"),
        (llmc(20240522, 1, SEVEN), "no header"),
    ],
)
def test_llmc_headers_that_cannot_be(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "t.bin").write_bytes(data)
    with pytest.raises(FormatError, match=what):
        loader.open_shard(tmp_path / "t.bin", "llmc")


def test_llmc_files_without_tokens_have_no_sample(tmp_path: Path) -> None:
    (tmp_path / "t.bin").write_bytes(llmc(20240520, 1, SEVEN[:0]))
    assert len(loader.open_shard(tmp_path / "t.bin")) == 0
    (tmp_path / "t.bin").write_bytes(llmc(20240520, 1, SEVEN))
    assert len(loader.open_shard(tmp_path / "t.bin", LlmC(length=8))) == 0
