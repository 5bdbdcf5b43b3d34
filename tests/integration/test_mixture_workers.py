"""Mixtures read by the workers of a DataLoader, as real processes."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import loader
from loader import Mixture, ShardDataset
from loader.formats import Tokens
from loader.testing import write_tars, write_tokens

Pairs = list[tuple[int, int]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    for name, counts in {"a": [7, 0, 11, 4, 8], "b": [3, 2], "c": [1]}.items():
        write_tars(folder / name, counts)
    for name, size in (("x", 640), ("y", 96)):
        write_tokens(folder / name / "0.bin", size)
    return folder


def mix(root: Path, batch: int = 4, **options: Any) -> Mixture:
    sources = {name: ShardDataset(root / name, batch_size=1, seed=7, lanes=2) for name in "abc"}
    return Mixture(sources, **{"weights": [6, 3, 1], "global_batch_size": batch, "ids": True, "samples": 40, **options})


def of(batch: Any) -> Pairs:
    return list(zip(batch["__source__"].tolist(), batch["__id__"].tolist(), strict=True))


def epochs(root: Path, count: int) -> list[list[Pairs]]:
    mixture = mix(root)
    return [[of(batch) for batch in mixture.batched()] for _ in range(count)]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(json.dumps(state))
    return out


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_that_stay_read_one_epoch_after_the_other_and_get_states(root: Path, method: str) -> None:
    expected = epochs(root, 4)
    mixture = mix(root)
    workers: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    made = DataLoader(mixture, batch_size=4, collate_fn=loader.collate, **workers)
    assert [[of(batch) for batch in made] for _ in range(2)] == expected[:2]
    mixture.load_state_dict(stored(mix(root, batch=4).state_at(13)))  # the third batch of the second epoch is used
    assert [of(batch) for batch in made] == expected[1][3:]
    mixture.set_epoch(3)
    assert [of(batch) for batch in made] == expected[3]
    mixture.set_epoch(0)
    for batch in made:
        state = stored(mixture.state_after(batch))
        break
    resumed = mix(root, batch=2)
    resumed.load_state_dict(state)
    again = [pair for batch in DataLoader(resumed.batched(), batch_size=None) for pair in of(batch)]
    assert again == [pair for batch in expected[0][1:] for pair in batch]


def test_a_stateful_loader_resumes_and_its_state_loads_at_other_workers(root: Path) -> None:
    expected = [pair for batch in epochs(root, 1)[0] for pair in batch]
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "collate_fn": loader.collate}
    made = StatefulDataLoader(mix(root), **options)
    used = [pair for batch in islice(made, 5) for pair in of(batch)]
    state = made.state_dict()
    same = StatefulDataLoader(mix(root), **options)
    same.load_state_dict(state)
    assert used + [pair for batch in same for pair in of(batch)] == expected
    mixture = mix(root, batch=5)
    mixture.load_state_dict(stored(mixture.state_from(state)))
    other = DataLoader(mixture.batched(), batch_size=None, num_workers=2)
    assert used + [pair for batch in other for pair in of(batch)] == expected


def test_token_batches_cross_from_workers(root: Path) -> None:
    def tokens() -> Mixture:
        sources = [ShardDataset(root / name, batch_size=1, format=Tokens(length=16)) for name in "xy"]
        return Mixture(sources, global_batch_size=4, weights=[2, 1], ids=True)

    expected = [(of(batch), batch["tokens"].tolist()) for batch in tokens().batched()]
    made = DataLoader(tokens().batched(), batch_size=None, num_workers=2)
    assert [(of(batch), batch["tokens"].tolist()) for batch in made] == expected
