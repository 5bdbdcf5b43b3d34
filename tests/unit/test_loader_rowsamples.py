"""Samples that are rows of their batch: the values of samples read one by one, and batches that need no stacking."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from loader import ShardDataset, collate, formats

LENGTH = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    for number in range(6):
        rng.integers(0, 60000, LENGTH * 11 + 3, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    return tmp_path


def dataset(folder: Path, *, labels: bool = False, out: str | None = None, **options: Any) -> ShardDataset:
    kind = formats.Tokens(length=LENGTH, dtype="uint16", labels=labels, out=out)
    return ShardDataset(str(folder / "*.bin"), batch_size=4, format=kind, **options)


def untouched(sample: object, rng: np.random.Generator) -> object:
    return sample


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("out", [None, "int64"])
@pytest.mark.parametrize("drop_last", [False, True])
def test_values_are_those_of_samples_read_one_by_one(
    folder: Path, labels: bool, out: str | None, drop_last: bool
) -> None:
    options: dict[str, Any] = {"labels": labels, "out": out, "drop_last": drop_last}
    rows = list(dataset(folder, **options))
    single = list(dataset(folder, transform=untouched, **options))  # a transform is given samples one by one
    assert len(rows) == len(single)
    for ours, plain in zip(rows, single, strict=True):
        assert ours.keys() == plain.keys()
        assert ours.stamp == plain.stamp
        for name in ours:
            np.testing.assert_array_equal(ours[name], plain[name])
            assert ours[name].dtype == plain[name].dtype
            assert ours[name].flags.writeable


def test_a_batch_is_the_memory_its_samples_are_views_of(folder: Path) -> None:
    samples = [sample for sample, _ in zip(dataset(folder, labels=True), range(4), strict=False)]
    batch = collate(samples)
    assert batch.stamp is samples[0].stamp
    for name in ("tokens", "labels"):
        assert batch[name].data_ptr() == samples[0][name].ctypes.data
        assert np.shares_memory(batch[name].numpy(), samples[3][name])
    samples[2]["tokens"][:] = 7
    assert (batch["tokens"][2] == 7).all()


def test_what_a_user_put_in_place_of_a_row_counts(folder: Path) -> None:
    samples = [sample for sample, _ in zip(dataset(folder), range(4), strict=False)]
    own = np.arange(LENGTH, dtype=np.uint16)
    samples[1]["tokens"] = own
    batch = collate(samples)
    np.testing.assert_array_equal(batch["tokens"][1].numpy(), own)
    np.testing.assert_array_equal(batch["tokens"][2].numpy(), samples[2]["tokens"])
    turned = samples[:1] + samples[3:0:-1]
    np.testing.assert_array_equal(collate(turned)["tokens"][1].numpy(), samples[3]["tokens"])


def test_copies_take_no_other_samples_along(folder: Path) -> None:
    first = next(iter(dataset(folder)))
    assert first.rows is not None
    for made in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert made.rows is None
        assert made.stamp == first.stamp
        np.testing.assert_array_equal(made["tokens"], first["tokens"])
    assert len(pickle.dumps(first)) < 500


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_gives_the_same_batches_and_states(folder: Path, workers: int) -> None:
    plain = list(dataset(folder).batched())
    data = dataset(folder)
    through = DataLoader(data, batch_size=4, num_workers=workers, collate_fn=collate)
    found = [(batch["tokens"].clone(), data.state_after(batch)) for batch in through]
    assert len(found) == len(plain)
    for (tokens, state), batch in zip(found, plain, strict=True):
        assert torch.equal(tokens, batch["tokens"])
        assert state == data.state_after(batch)


def test_torchs_own_collate_gives_them_too(folder: Path) -> None:
    through = DataLoader(dataset(folder, out="int64"), batch_size=4)
    for ours, plain in zip(through, dataset(folder, out="int64").batched(), strict=True):
        assert torch.equal(ours["tokens"], plain["tokens"])
