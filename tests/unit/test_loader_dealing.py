"""A DataLoader whose batches are not the data set's is told so, whatever its collate function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ChainDataset, DataLoader

import loader
from cachefs.errors import ConfigError, StateError


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    np.savez(tmp_path / "a.npz", x=np.arange(48).reshape(24, 2), y=np.arange(24))
    return tmp_path


def first(batches: Any) -> Any:
    return next(iter(batches))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("collate", [None, loader.collate], ids=["torch's", "ours"])
def test_another_batch_size_is_an_error(arrays: Path, workers: int, size: int, collate: Any) -> None:
    ds = loader.ShardDataset(arrays, batch_size=4)
    with pytest.raises(ConfigError, match=f"makes batches of {size}, the data set deals batches of 4"):
        first(DataLoader(ds, batch_size=size, num_workers=workers, collate_fn=collate))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_one_is_not(arrays: Path, workers: int) -> None:
    ds = loader.ShardDataset(arrays, batch_size=5, drop_last=False, ids=True)
    batches = list(DataLoader(ds, batch_size=5, num_workers=workers))
    assert [len(batch["y"]) for batch in batches] == [5, 5, 5, 5, 4]
    assert ds.state_after(batches[1]) == ds.state_at(2)  # torch's own collate keeps what says where it is from


def test_batches_of_batches_are_an_error(arrays: Path) -> None:
    ds = loader.ShardDataset(arrays, batch_size=4)
    for collate in (None, loader.collate):
        with pytest.raises(ConfigError, match=r"batch_size=None"):
            first(DataLoader(ds.batched(), batch_size=4, collate_fn=collate))
    assert first(DataLoader(ds.batched(), batch_size=None))["x"].shape == (4, 2)


def test_sample_by_sample_is_fine(arrays: Path) -> None:
    ds = loader.ShardDataset(arrays, batch_size=4)
    assert len(list(DataLoader(ds, batch_size=None))) == 24
    ds.set_epoch(0)
    assert len(list(ds)) == 24
    ds.set_epoch(0)
    # somebody else's wrapper asks: it may do as it likes
    assert len(list(DataLoader(ChainDataset([ds]), batch_size=6))) == 4


def test_ranks_without_one_batch_size_need_whole_batches(arrays: Path) -> None:
    ds = loader.ShardDataset(arrays, global_batch_size=8, rank=1, world_size=3)
    with pytest.raises(ConfigError, match=r"batched\(\)"):
        first(DataLoader(ds, batch_size=3))
    assert len(list(DataLoader(ds.batched(), batch_size=None))) == 3


def test_a_sample_is_no_batch(arrays: Path) -> None:
    ds = loader.ShardDataset(arrays, batch_size=4)
    with pytest.raises(StateError, match=r"loader\.collate"):
        ds.state_after(first(ds))
