"""A seeded sample of the matrices of tests/property/test_order_matrix.py, through real data sets and real workers."""

from __future__ import annotations

import json
import random
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import loader
from loader import ShardDataset
from loader.testing import write_mds, write_tars

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
BATCH = 12
DATA_SETS = [
    [1],
    [29],
    [2, 0, 1],
    [1] * 40,
    [0, 13, 0, 0, 12, 0],
    [3, 9, 1, 0, 7, 12, 5, 5, 8, 2],
    [30] + [1] * 30,
    [1, 2] * 40,  # tars: counted while they are read
]


def some_nodes(rng: random.Random, world: int) -> Any:
    even = [count for count in (1, 2, 3, world) if world % count == 0]
    return rng.choice([None, *even, [rng.choice("abc") for _ in range(world)]])


class Leg:
    """A part of a run: its ranks, each with its workers, one after the other in this process."""

    def __init__(self, rng: random.Random, folder: Path, options: dict[str, Any], state: Any) -> None:
        world, workers = rng.choice((1, 2, 3, 4, 6, 8, 12)), rng.choice((0, 1, 3))
        nodes = some_nodes(rng, world)
        self.told = f"{world} ranks, nodes {nodes}, {workers} workers"
        self.ranks = []
        for rank in range(world):
            ds = ShardDataset(
                folder, global_batch_size=BATCH, ids=True, rank=rank, world_size=world, nodes=nodes, **options
            )
            if state is not None:
                ds.load_state_dict(state)
            method = "fork" if workers else None
            collated = rng.random() < 0.5 and BATCH % world == 0
            source = ds if collated else ds.batched()
            size: Any = BATCH // world if collated else None
            how: dict[str, Any] = {"collate_fn": loader.collate} if collated else {}
            batches = DataLoader(source, size, num_workers=workers, multiprocessing_context=method, **how)
            self.ranks.append((ds, batches))

    def read(self, count: int) -> tuple[list[list[int]], Any]:
        """So many global batches of one pass, as sets, and the state behind them."""
        parts, states = [], []
        for ds, batches in self.ranks:
            got = list(islice(batches, count))
            parts.append([batch["__id__"].tolist() for batch in got])
            states.append(json.loads(json.dumps(ds.state_after(got[-1]))))
        assert all(state == states[0] for state in states), self.told
        return [sorted(chain(*batch)) for batch in zip(*parts, strict=True)], states[0]


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_a_run_in_legs_is_the_uninterrupted_one(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    counts = rng.choice(DATA_SETS)
    (write_tars if len(counts) > 64 else write_mds)(tmp_path, counts)
    options: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "pad": True,
        "shuffle": rng.random() < 0.8,
        "exchange": rng.random() < 0.3,
        "lanes": rng.choice((2, 4, 6, 12)),
        "block_shards": rng.choice((1, 2, 8)),
    }
    alone = ShardDataset(tmp_path, global_batch_size=BATCH, ids=True, **options)
    whole = [sorted(batch["__id__"].tolist()) for _ in range(2) for batch in alone.batched()]
    each, seen, state = len(whole) // 2, 0, None
    while seen < len(whole):
        leg = Leg(rng, tmp_path, options, state)
        taken = rng.randint(1, each - seen % each)
        got, state = leg.read(taken)
        assert got == whole[seen : seen + taken], leg.told
        seen += taken
