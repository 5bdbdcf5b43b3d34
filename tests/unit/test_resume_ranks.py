"""One rank stops within a batch, several go on, and one again: every state on the way loads."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from loader import ShardDataset
from loader.testing import write_tars


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_tars(folder, [20, 30])
    return folder


def make(folder: Path, batch: int, rank: int = 0, world: int = 1, **options: Any) -> ShardDataset:
    return ShardDataset(folder, global_batch_size=batch, rank=rank, world_size=world, ids=True, seed=1, **options)


def ids(samples: Any) -> list[int]:
    return [sample["__id__"] for sample in samples]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(json.dumps(state))
    return out


@pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"pad": True}])
@pytest.mark.parametrize("cut", [7, 31, 35, 38])
def test_states_of_many_ranks_that_went_on_within_a_batch(folder: Path, cut: int, options: dict[str, Any]) -> None:
    whole = ids(make(folder, 1, lanes=4))
    alone = make(folder, 20, lanes=4, **options)
    assert ids(islice(alone, cut)) == whole[:cut]
    state = stored(alone.state_dict())
    for batches in range(8):
        two = make(folder, 4, 0, 2, **options)
        two.load_state_dict(state)
        between = stored(two.state_at(batches))
        again = make(folder, 4, 1, 2, **options)
        again.load_state_dict(between)
        assert again.state_at(0) == between
        assert two.state_at(batches) == between
        one = make(folder, 4, **options)
        one.load_state_dict(between)
        if between["epoch"] == 0:
            assert between["position"] == cut + 4 * batches
            rest = whole[between["position"] : between["position"] + 2]
            assert ids(islice(one, len(rest))) == rest
