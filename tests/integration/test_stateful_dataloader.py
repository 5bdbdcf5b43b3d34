"""torchdata's StatefulDataLoader: native resumes at equal workers, and ``state_from`` for all else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import loader
from cachefs.errors import ConfigError, StateError
from loader import ShardDataset
from loader.testing import write_tars

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital'")
BATCHES = 8  # of an epoch: 30 samples, so the last one is short


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [7, 5, 6, 3, 9])
    return folder


def make(folder: Path, **options: Any) -> ShardDataset:
    return ShardDataset(folder, **{"batch_size": 4, "ids": True, "seed": 1, "drop_last": False, **options})


def stateful(ds: Any, workers: int, **options: Any) -> StatefulDataLoader[Any]:
    defaults = {"batch_size": 4, "collate_fn": loader.collate}
    return StatefulDataLoader(ds, num_workers=workers, **{**defaults, **options})


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def endless(batches: Any) -> Iterator[Any]:
    """One pass after the other; what is behind it is asked for when its last batch has been used."""
    while True:
        yield from batches


def take(batches: Any, count: int) -> list[list[int]]:
    return ids(islice(endless(batches), count))


@pytest.fixture(scope="module")
def stream(folder: Path) -> list[list[int]]:
    """The batches of an uninterrupted run."""
    return take(make(folder).batched(), 6 * BATCHES)


def saved(batches: StatefulDataLoader[Any]) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(json.dumps(batches.state_dict()))
    return out


RUNS = [(3, 5, 1), (7, 10, 2), *(pytest.param(run, marks=pytest.mark.slow) for run in ((0, 3, 1), (8, 3, 8)))]
OPTIONS: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (2, {}),
    (2, {"persistent_workers": True, "snapshot_every_n_steps": 3}),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(("workers", "options"), OPTIONS)
def test_native_resumes_in_a_row(folder: Path, stream: Any, run: Any, workers: int, options: Any) -> None:
    seen: list[list[int]] = []
    state = None
    for count in run:
        batches = stateful(make(folder), workers, **options)
        if state is not None:
            batches.load_state_dict(state)
        seen += take(batches, count)
        state = saved(batches)
        assert seen == stream[: len(seen)]
    batches = stateful(make(folder), workers, **options)
    batches.load_state_dict(state)
    assert seen + take(batches, BATCHES) == stream[: len(seen) + BATCHES]


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(("workers", "options"), OPTIONS)
def test_a_pass_that_is_over_is_followed_by_the_next_one(
    folder: Path, stream: Any, before: int, workers: int, options: Any
) -> None:
    """The loop has heard of the end: StatefulDataLoader makes one iterator to load the state, and another to read."""
    ds = make(folder)
    ds.load_state_dict(ds.state_at(before))
    batches = stateful(ds, workers, **options)
    assert ids(batches) == stream[before:BATCHES]
    for epoch in (1, 2, 3):
        state = saved(batches)
        assert make(folder).state_from(state) == make(folder).state_at(epoch * BATCHES)
        batches = stateful(make(folder), workers, **options)
        batches.load_state_dict(state)
        assert ids(batches) == stream[epoch * BATCHES : (epoch + 1) * BATCHES]
    assert ids(batches) == stream[4 * BATCHES : 5 * BATCHES]


def readers(ds: ShardDataset) -> dict[str, Any]:
    return {
        "alone": ds.batched(),
        "Loader": loader.Loader(ds),
        "0 workers": DataLoader(ds, batch_size=4, collate_fn=loader.collate),
        "3 workers": DataLoader(ds, batch_size=4, collate_fn=loader.collate, num_workers=3),
    }


@pytest.mark.parametrize("workers", [0, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_its_states_load_elsewhere_in_a_row(folder: Path, stream: Any, workers: int) -> None:
    for offset, name in enumerate(readers(make(folder))):
        seen: list[list[int]] = []
        state: dict[str, Any] | None = None
        for count in (1 + offset, 5, 4, 7):
            ds = make(folder)
            if state is not None:
                ds.load_state_dict(json.loads(json.dumps(ds.state_from(state))))
                seen += take(readers(ds)[name], 2)
                ds.load_state_dict(make(folder).state_at(len(seen)))
            batches = stateful(ds, workers)
            seen += take(batches, count)
            state = saved(batches)
            assert ds.state_from(state) == make(folder).state_from(state) == make(folder).state_at(len(seen))
        assert seen == stream[: len(seen)]


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True}, {"snapshot_every_n_steps": 4}])
def test_every_position_of_a_pass(folder: Path, options: Any) -> None:
    batches = stateful(make(folder).batched(), 2, batch_size=None, collate_fn=None, **options)
    made = make(folder)
    for epoch in range(2):
        for used, _ in enumerate(batches, 1):
            assert made.state_from(saved(batches)) == made.state_at(epoch * BATCHES + used)


def test_ranks_and_batch_sizes_may_change(folder: Path, stream: Any) -> None:
    """Saved by two ranks with two workers each; loaded by one, by four, and with another batch size."""
    made = make(folder, batch_size=None, global_batch_size=4, drop_last=True)
    states = []
    for rank in range(2):
        ds = make(folder, batch_size=2, rank=rank, world_size=2, drop_last=True)
        batches = stateful(ds, 2, batch_size=2)
        take(batches, 3)
        states.append(made.state_from(saved(batches)))
    assert states == [make(folder, drop_last=True).state_at(3)] * 2
    one = make(folder, drop_last=True)
    one.load_state_dict(states[0])
    assert ids(one.batched()) == stream[3:7]
    four = [make(folder, batch_size=1, drop_last=True, rank=rank, world_size=4) for rank in range(4)]
    for ds in four:
        ds.load_state_dict(states[0])
    columns = zip(*(ids(ds.batched()) for ds in four), strict=True)
    assert [list(chain(*parts)) for parts in columns] == stream[3:7]
    six = make(folder, batch_size=6)
    six.load_state_dict(states[0])
    assert list(chain(*ids(six.batched()))) == list(chain(*stream[3:BATCHES]))


def test_what_cannot_be_is_refused(folder: Path) -> None:
    ds = make(folder)
    batches = stateful(ds, 2)
    take(batches, 3)
    state = saved(batches)
    with pytest.raises(StateError, match=r"state_from\(\)"):
        ds.load_state_dict(state)
    worker = state["_snapshot"]["_worker_snapshots"]["worker_1"]["dataset_state"]
    with pytest.raises(StateError, match="one DataLoader worker"):
        ds.state_from(worker)
    fewer = stateful(make(folder), 1)
    fewer.load_state_dict(state)
    with pytest.raises(StateError, match="worker 0 of 2 cannot be loaded in worker 0 of 1"):
        take(fewer, 1)
    larger = stateful(make(folder, batch_size=5), 2, batch_size=5)
    larger.load_state_dict(state)
    with pytest.raises(StateError, match="batches of 4 samples cannot be loaded where they have 5"):
        take(larger, 1)
    state["_snapshot"]["_snapshot_step"] = 2
    with pytest.raises(StateError, match="after 2 batches of the DataLoader its workers stand at batches"):
        ds.state_from(state)
    with pytest.raises(ConfigError, match="makes batches of 3, the data set deals batches of 4"):
        list(islice(stateful(make(folder), 2, batch_size=3, collate_fn=list), 1))


DAMAGE: list[tuple[str, Any]] = [
    ("_snapshot", None),
    ("_snapshot._worker_snapshots", []),
    ("_snapshot._worker_snapshots", {}),
    ("_snapshot._worker_snapshots", {"worker_1": {}}),
    ("_snapshot._worker_snapshots.worker_1", {}),
    ("_snapshot._worker_snapshots.worker_1.dataset_state", None),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.epoch", 1),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.worker", None),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.worker", {"index": 1, "count": 2, "batch": -1, "size": 4}),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.worker", {"index": 1, "count": 1, "batch": 3, "size": 4}),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.worker", {"index": 0, "count": 2, "batch": 3, "size": 4}),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.worker", {"index": 1, "count": 2, "batch": 3, "size": 0}),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.worker.batch", 5),
    ("_snapshot._worker_snapshots.worker_1.dataset_state.worker.batch", 2**70),
    ("_snapshot._snapshot_step", 4),
    ("_snapshot._snapshot_step", "3"),
    ("_steps_since_snapshot", -1),
    ("_steps_since_snapshot", None),
]


@pytest.fixture(scope="module")
def state(folder: Path) -> str:
    batches = stateful(make(folder), 2)
    take(batches, 3)
    return json.dumps(batches.state_dict())


@pytest.mark.parametrize(("where", "value"), DAMAGE)
def test_a_damaged_state_is_refused(folder: Path, state: str, where: str, value: Any) -> None:
    damaged = json.loads(state)
    *parents, last = where.split(".")
    part = damaged
    for name in parents:
        part = part[name]
    part[last] = value
    with pytest.raises(StateError):
        make(folder).state_from(damaged)


@pytest.mark.parametrize("wrong", [None, 3, [], {}, {"_num_yielded": 1}, {"_num_yielded": 1, "_dataset_state": 3}])
def test_what_is_no_state_is_refused(folder: Path, wrong: Any) -> None:
    with pytest.raises(StateError):
        make(folder).state_from(wrong)
