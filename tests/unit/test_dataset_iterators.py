"""Iterators that frameworks make and never read, and batches that they move."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import loader
from loader import Batch, ShardDataset
from loader.sample import FoldedBatch, Stamp
from loader.testing import write_tars

READERS: list[Callable[[ShardDataset], Any]] = [
    lambda ds: ds.batched(),
    loader.Loader,
    lambda ds: DataLoader(ds, batch_size=4, collate_fn=loader.collate),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [7, 5, 6, 3, 9])
    return folder


def make(folder: Path) -> ShardDataset:
    return ShardDataset(folder, batch_size=4, ids=True, seed=1)


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


@pytest.mark.parametrize("reader", READERS)
def test_an_iterator_that_is_not_read_begins_no_pass(folder: Path, reader: Any) -> None:
    epochs = [ids(make(folder).batched())]
    ds = make(folder)
    epochs += [ids(ds.batched()) for _ in range(3)][1:]
    ds = make(folder)
    batches = reader(ds)
    unread = [iter(batches), iter(batches)]
    assert ds.epoch == 0
    assert ds.state_dict() == make(folder).state_at(0)
    assert ids(batches) == epochs[0]
    ds.load_state_dict(make(folder).state_at(7 + 2))
    unread.append(iter(batches))
    assert ids(batches) == epochs[1][2:]
    assert ids(batches) == epochs[2]
    assert len(unread) == 3


def test_what_is_set_after_an_iterator_was_made_holds_for_it(folder: Path) -> None:
    ds = make(folder)
    first, second = ids(ds.batched()), ids(ds.batched())
    iterator = iter(ds.batched())
    ds.set_epoch(1)
    assert ids(iterator) == second
    iterator = iter(ds.batched())
    ds.load_state_dict(make(folder).state_at(3))
    assert ids(iterator) == first[3:]


@pytest.mark.parametrize("kind", [Batch, FoldedBatch])
def test_a_batch_is_moved_with_its_stamp(kind: type[Batch]) -> None:
    tensor = torch.zeros(2)
    batch = kind(x=tensor, ragged=[tensor, torch.zeros(3)], nested={"y": (tensor, "text")}, names=["a", "b"])
    batch.stamp = Stamp(0, 2, 2)
    moved = batch.to("meta", non_blocking=True)
    assert type(moved) is kind
    assert moved.stamp == batch.stamp
    assert moved["x"].device.type == moved["ragged"][1].device.type == moved["nested"]["y"][0].device.type == "meta"
    assert moved["nested"]["y"][1] == "text"
    assert moved["names"] == ["a", "b"]
    assert batch["x"] is tensor


def test_frameworks_are_imported_only_where_they_are_used(folder: Path) -> None:
    program = (
        "import sys, loader\n"
        f"ds = loader.ShardDataset({str(folder)!r}, batch_size=4)\n"
        "ds.set_epoch(1); next(iter(ds)); next(iter(loader.Loader(ds)))\n"
        "print([name for name in ('accelerate', 'torchdata', 'lightning') if name in sys.modules])\n"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"
