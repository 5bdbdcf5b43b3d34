"""A DataLoader whose batches are not the data set's is told so, whatever its collate function."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import ChainDataset, DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import loader
from cachefs.errors import ConfigError, StateError


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    np.savez(tmp_path / "a.npz", x=np.arange(48).reshape(24, 2), y=np.arange(24))
    return tmp_path


pytestmark = pytest.mark.filterwarnings("ignore:'set_vital'")


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


def test_a_rank_s_batch_size_is_its_own_share(arrays: Path) -> None:
    """Of batches of 8 over 3 ranks: 2, 3 and 3 samples, the same in every batch."""
    parts = []
    for rank, share in enumerate((2, 3, 3)):
        ds = loader.ShardDataset(arrays, global_batch_size=8, rank=rank, world_size=3)
        parts.append([batch["y"].tolist() for batch in DataLoader(ds, batch_size=share)])
        assert [len(batch) for batch in parts[-1]] == [share] * 3
        with pytest.raises(ConfigError, match=f"makes batches of {5 - share}, the data set deals batches of {share}"):
            first(DataLoader(ds, batch_size=5 - share))
    assert sorted(y for part in parts for batch in part for y in batch) == list(range(24))


class Wrapped(IterableDataset[Any]):
    """Regroups the samples of a data set, by an iterator that has no Python call of its own."""

    def __init__(self, ds: Any, how: Callable[[Any], Any]) -> None:
        self.ds = ds
        self.how = how

    def __iter__(self) -> Any:
        return self.how(self.ds)


@pytest.mark.parametrize("how", [lambda ds: map(dict, ds), lambda ds: chain(ds), lambda ds: zip(ds, count())])
def test_a_wrapper_may_make_other_batches(arrays: Path, how: Callable[[Any], Any]) -> None:
    ds = loader.ShardDataset(arrays, batch_size=4)
    assert len(list(DataLoader(Wrapped(ds, how), batch_size=6))) == 4
    assert len(list(DataLoader(Wrapped(ds.batched(), how), batch_size=2))) == 3


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_single_samples_from_several_workers_are_an_error(arrays: Path, kind: Any) -> None:
    ds = loader.ShardDataset(arrays, batch_size=4, shuffle=False)
    with pytest.raises(ConfigError, match=r"takes single samples from 2 workers .*dataset\.batched\(\)"):
        first(kind(ds, batch_size=None, num_workers=2))
    ds = loader.ShardDataset(arrays, batch_size=4, shuffle=False)
    assert [int(sample["y"]) for sample in DataLoader(ds, batch_size=None, num_workers=1)] == list(range(24))
    ones = loader.ShardDataset(arrays, batch_size=1, shuffle=False)  # each is a whole batch
    assert [int(sample["y"]) for sample in kind(ones, batch_size=None, num_workers=2)] == list(range(24))


def test_a_sample_is_no_batch(arrays: Path) -> None:
    ds = loader.ShardDataset(arrays, batch_size=4)
    with pytest.raises(StateError, match=r"loader\.collate"):
        ds.state_after(first(ds))
