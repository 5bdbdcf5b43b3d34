"""Batches of tars made field by field are what ``collate`` makes of the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loader
from cachefs.errors import DataError, FormatError, MissingField, NearflashError
from loader.members import MemberGather
from loader.sample import FoldedBatch
from loader.testing import tar_bytes

Members = list[tuple[str, bytes]]


def regular(count: int, *, ragged: bool) -> Members:
    out: Members = []
    for i in range(count):
        size = 3 + i % 5 if ragged else 4
        out += [
            (f"k{i}.BIN", bytes([i]) * size),
            (f"k{i}.cls", str(i).encode()),
            (f"k{i}.a.json", b'{"n": %d}' % i),
            (f"k{i}.txt", f"text {i}".encode()),
        ]
    return out


def shards(folder: Path, *all_members: Members) -> Path:
    folder.mkdir()
    for number, members in enumerate(all_members):
        (folder / f"{number}.tar").write_bytes(tar_bytes(members))
    return folder


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def same(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    """The batches, after a check that the short way was taken for them and gave what the long one gives."""
    short: list[bool] = []
    batch = MemberGather.batch

    def watched(self: MemberGather, *args: Any) -> Any:
        found = batch(self, *args)
        short.append(found is not None)
        return found

    with monkeypatch.context() as m:
        m.setattr(MemberGather, "batch", watched)
        found = list(loader.ShardDataset(folder, batch_size=4, **options).batched())
    long = list(loader.ShardDataset(folder, batch_size=4, **options).batched(loader.collate))
    assert len(found) == len(long) == len(short)
    for one, other in zip(found, long, strict=True):
        assert type(one) is type(other) is FoldedBatch and one.stamp == other.stamp
        assert list(one) == list(other)
        assert plain(dict(one)) == plain(dict(other))
    return short


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False, "drop_last": False},
        {"decode": "bytes"},
        {"decode": "torch"},
        {"decode": {"BIN": lambda view: float(view[0]), "cls": len}},
        {"fields": ["Bin", "a.json"]},
        {"ids": True},
        {"fields": []},
    ],
    ids=["plain", "in order", "bytes", "torch", "own", "fields", "ids", "no fields"],
)
def test_regular_samples_take_the_short_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ragged: bool, options: dict[str, Any]
) -> None:
    folder = shards(tmp_path / "t", regular(9, ragged=ragged), regular(6, ragged=ragged), regular(7, ragged=ragged))
    assert all(same(folder, monkeypatch, **options))


def test_repeats_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shards(tmp_path / "t", regular(9, ragged=True))
    assert same(folder, monkeypatch, pad=True, drop_last=False) == [True, True, False]


def test_the_order_of_members_is_no_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = [("x.cls", b"7"), ("x.bin", b"abcd"), ("y.bin", b"efgh"), ("y.cls", b"8")] * 2
    turned = [(f"{i // 2}{name}", data) for i, (name, data) in enumerate(turned)]
    assert same(shards(tmp_path / "t", turned), monkeypatch, shuffle=False) == [False]


@pytest.mark.parametrize(
    ("members", "options", "error"),
    [
        ([("a.bin", b"1"), ("b.bin", b"2"), ("b.cls", b"2")], {}, DataError),
        ([("a.bin", b"1"), ("b.bin", b"2")], {"fields": ["cls"]}, MissingField),
        ([("a.cls", b"1"), ("b.cls", b"no number")], {}, FormatError),
        ([("a.bin", b"1"), ("b.bin", b"2"), ("b.bin", b"3")], {}, FormatError),
    ],
    ids=["other fields", "missing", "undecodable", "damaged"],
)
def test_what_is_wrong_is_told_as_on_the_long_way(
    tmp_path: Path, members: Members, options: dict[str, Any], error: type[NearflashError]
) -> None:
    folder = shards(tmp_path / "t", members)
    told = []
    for collate in (None, loader.collate):
        with pytest.raises(error) as caught:
            list(loader.ShardDataset(folder, batch_size=2, shuffle=False, **options).batched(collate))
        told.append(str(caught.value))
    assert told[0] == told[1]


def test_what_is_written_into_a_view_is_seen_in_no_later_epoch(tmp_path: Path) -> None:
    dataset = loader.ShardDataset(shards(tmp_path / "t", regular(8, ragged=True)), batch_size=8, shuffle=False)
    for _ in range(2):
        (batch,) = dataset.batched()
        assert [view[0] for view in batch["bin"]] == list(range(8))
        for view in batch["bin"]:
            view[:] = 255
