"""Plain torch DataLoader with 0, 1 and several workers under every start method: same order, epochs, states."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import loader
from cachefs.errors import FormatError, StateError
from loader import ShardDataset
from loader.formats import Tokens
from loader.testing import tar_bytes, write_tars, write_tokens

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
# A spawned worker imports torch anew, which takes seconds: one test of them is in every run, the others are slow.
MODES = [(0, None), (1, "fork"), (3, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
START_METHODS = [(2, "fork"), *(pytest.param(2, name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [7, 5, 6, 3, 9])  # 30 samples
    return folder


def make(folder: Path, **options: Any) -> ShardDataset:
    return ShardDataset(folder, **{"batch_size": 4, "ids": True, "seed": 1, "drop_last": False, **options})


def load(ds: Any, workers: int, method: str | None, **options: Any) -> DataLoader[Any]:
    defaults = {"batch_size": 4, "collate_fn": loader.collate, "multiprocessing_context": method}
    return DataLoader(ds, num_workers=workers, **{**defaults, **options})


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def epochs(folder: Path, count: int, **options: Any) -> list[list[list[int]]]:
    """What an uninterrupted run without workers yields."""
    ds = make(folder, **options)
    return [ids(ds.batched()) for _ in range(count)]


def tenth(sample: Any, rng: Any) -> Any:
    return {**sample, "x": rng.random()}


@pytest.mark.parametrize(("workers", "method"), MODES)
def test_the_order_is_the_same_and_epochs_advance(folder: Path, workers: int, method: str | None) -> None:
    first, second, third = epochs(folder, 3)
    ds = make(folder)
    batches = load(ds, workers, method)
    assert len(batches) == 8
    assert [ids(batches), ids(batches)] == [first, second]
    assert ds.epoch == 2
    ds.set_epoch(0)
    assert ids(batches) == first
    whole = list(load(ds.batched(), workers, method, batch_size=None, collate_fn=None))
    assert ids(whole) == second
    assert ds.state_after(whole[4]) == make(folder).state_at(8 + 5)
    assert ids(ds.batched()) == third


@pytest.mark.parametrize(("workers", "method"), [(3, "fork"), (2, "spawn")])
def test_set_epoch_and_states_reach_persistent_workers(tmp_path: Path, workers: int, method: str) -> None:
    folder = tmp_path
    write_tars(folder, [7, 5, 6, 3, 9])
    first, second, third = epochs(folder, 3)
    ds = make(folder)
    state = make(folder).state_at(11)
    assert len(ds) == 30
    (folder / "later.tar").write_bytes(tar_bytes([("x.txt", b"")]))  # workers neither list nor count again
    batches = load(ds, workers, method, persistent_workers=True)
    assert [ids(batches), ids(batches)] == [first, second]
    ds.set_epoch(0)
    assert ids(batches) == first
    assert ids(islice(batches, 3)) == second[:3]
    assert ids(batches) == third  # also after a pass that was broken off
    ds.load_state_dict(state)
    assert ids(batches) == second[3:]
    assert ids(batches) == third


@pytest.mark.parametrize(("workers", "method"), MODES)
def test_resume_at_every_batch(folder: Path, workers: int, method: str | None) -> None:
    first, second = epochs(folder, 2)
    for taken in range(9) if method == "fork" or method is None else (0, 3, 8):
        ds = make(folder)
        ds.load_state_dict(json.loads(json.dumps(make(folder).state_at(taken))))
        batches = load(ds, workers, method)
        if taken < 8:
            assert ids(batches) == first[taken:]
        assert ids(batches) == second


@pytest.mark.parametrize(("workers", "method"), MODES)
def test_a_batch_says_where_the_user_is(folder: Path, workers: int, method: str | None) -> None:
    ds = make(folder)
    seen: list[list[int]] = []
    states = []
    for batch in load(ds, workers, method):
        seen += ids([batch])
        states.append(json.loads(json.dumps(ds.state_after(batch))))
    assert states == [make(folder).state_at(n) for n in range(1, 9)]
    again = make(folder)
    again.load_state_dict(states[4])
    assert seen[:5] + ids(load(again, workers, method)) == seen


@pytest.mark.parametrize("taken", range(1, 10))
def test_once_workers_read_the_parent_does_not_pretend_to_know(folder: Path, taken: int) -> None:
    """Wherever the user is, when the workers have read all there is; 9 is after the end."""
    read = multiprocessing.get_context("fork").Value("i", 0)

    def count(sample: Any, rng: Any) -> Any:
        with read.get_lock():
            read.value += 1
        return sample

    ds = make(folder, transform=count)
    iterator = iter(load(ds, 2, "fork", prefetch_factor=8))
    batches = list(islice(iterator, taken))
    deadline = time.monotonic() + 60
    while read.value < 30:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with pytest.raises(StateError, match=r"use state_after\(batch\).*or state_at"):
        ds.state_dict()
    state = ds.state_after(batches[-1])
    assert state == ds.state_at(min(taken, 8))
    ds.load_state_dict(state)
    assert ds.state_dict() == state


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("collate", [loader.collate, list])
@pytest.mark.parametrize("generator", [None, 7])
def test_a_break_moves_on_whenever_it_comes(
    folder: Path, persistent: bool, collate: Any, generator: int | None
) -> None:
    """Also with a collate_fn that knows nothing of the order, and with workers of one seed."""

    def numbers(batches: Any) -> list[list[int]]:
        return ids(batches) if collate is loader.collate else [[s["__id__"] for s in batch] for batch in batches]

    wanted = epochs(folder, 9)
    ds = make(folder)
    batches: Any = None
    for epoch, taken in enumerate([1, 7, 2, 8, 6, 9, 1, 1, 9]):
        if batches is None or not persistent:
            seed = None if generator is None else torch.Generator().manual_seed(generator)
            workers = 3 if persistent else 1 + epoch % 3
            batches = load(ds, workers, "fork", collate_fn=collate, generator=seed, persistent_workers=persistent)
        assert numbers(islice(batches, taken)) == wanted[epoch][:taken]
        assert ds.epoch == epoch + 1


def test_a_break_counts_for_a_rank_with_slow_steps_as_for_a_fast_one(folder: Path) -> None:
    wanted = epochs(folder, 3)
    for quick in (True, False):
        ds = make(folder)
        for epoch in range(3):
            iterator = iter(load(ds, 2, "fork", prefetch_factor=8))
            got = [next(iterator) for _ in range(4)]
            if not quick:
                got += [next(iterator) for _ in range(4)]  # all workers have come to their end
            del iterator
            assert ids(got) == wanted[epoch][: len(got)]


@pytest.mark.parametrize("workers", [0, 2])
def test_forked_ranks_own_what_they_inherit(folder: Path, workers: int) -> None:
    """The parent has read a pass; its children read theirs, at the same time, and no one moves another on."""
    wanted = epochs(folder, 4)
    ds = make(folder)
    assert ids(load(ds, 2, "fork")) == wanted[0]
    context = multiprocessing.get_context("fork")
    queues = [context.SimpleQueue() for _ in range(2)]
    ranks = [context.Process(target=_three_passes, args=(ds, workers, queue)) for queue in queues]
    for rank in ranks:
        rank.start()
    assert ids(ds.batched()) == wanted[1]
    for rank, queue in zip(ranks, queues, strict=True):
        assert queue.get() == wanted[1:]
        rank.join(60)
        assert rank.exitcode == 0
    assert ds.epoch == 2


def _three_passes(ds: ShardDataset, workers: int, queue: Any) -> None:
    queue.put([ids(load(ds, workers, "fork" if workers else None)) for _ in range(3)])


@pytest.mark.parametrize(("workers", "method"), START_METHODS)
def test_transforms_are_the_same_in_workers(folder: Path, workers: int, method: str) -> None:
    def table(batches: Any) -> dict[int, float]:
        return {i: x for b in batches for i, x in zip(b["__id__"].tolist(), b["x"].tolist(), strict=True)}

    wanted = table(make(folder, transform=tenth).batched())
    assert len(wanted) == 30
    assert table(load(make(folder, transform=tenth), workers, method)) == wanted


@pytest.mark.parametrize(("workers", "method"), START_METHODS)
def test_token_batches_from_workers(tmp_path: Path, workers: int, method: str) -> None:
    write_tokens(tmp_path / "t.bin", 5000)
    options = {"format": Tokens(length=32, labels=True, out="int64"), "batch_size": 8}
    wanted = list(make(tmp_path, **options).batched())
    found = list(load(make(tmp_path, **options).batched(), workers, method, batch_size=None, collate_fn=None))
    assert len(found) == len(wanted) == 20
    for a, b in zip(found, wanted, strict=True):
        assert a["labels"].dtype == torch.int64
        assert all(torch.equal(a[name], b[name]) for name in ("tokens", "labels", "__id__"))


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_that_a_launcher_spawns_find_their_own_place(folder: Path, workers: int) -> None:
    """The data set is made, looked at and read before there are ranks, then pickled to them; they read two epochs."""
    ds = make(folder, batch_size=2)
    assert len(ds) == 30
    next(iter(ds))
    context = multiprocessing.get_context("spawn")
    queues = [context.SimpleQueue() for _ in range(2)]
    ranks = [context.Process(target=_as_rank_of_two, args=(ds, r, workers, queue)) for r, queue in enumerate(queues)]
    for process in ranks:
        process.start()
    for number, (process, queue) in enumerate(zip(ranks, queues, strict=True)):
        alone = make(folder, batch_size=2, rank=number, world_size=2)
        alone.set_epoch(1)
        assert queue.get() == [ids(alone.batched()), ids(alone.batched())]
        process.join(60)
        assert process.exitcode == 0
    assert ds.epoch == 1  # the ranks' passes are their own
    assert len(ds) == 30


def _as_rank_of_two(ds: ShardDataset, rank: int, workers: int, queue: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    batches = load(ds, workers, "fork" if workers else None, batch_size=2)
    queue.put([ids(batches), ids(batches)])


def test_more_workers_than_batches(tmp_path: Path) -> None:
    write_tars(tmp_path, [8])
    parts = [ids(load(make(tmp_path, rank=r, world_size=2), 3, "fork")) for r in range(2)]
    assert sorted(chain(*parts[0], *parts[1])) == list(range(8))
    ds = make(tmp_path, rank=0, world_size=2)
    assert ids(load(ds, 3, "fork")) != ids(load(ds, 3, "fork"))
    assert ds.epoch == 2


def test_an_error_in_a_worker_names_the_shard(tmp_path: Path) -> None:
    write_tars(tmp_path, [4])
    (tmp_path / "bad.tar").write_bytes(tar_bytes([(f"{k}.cls", b"x") for k in range(4)]))
    for workers, method in ((0, None), (2, "fork")):
        with pytest.raises(FormatError, match=r"bad\.tar: field 'cls' of sample"):
            list(load(make(tmp_path), workers, method))


def test_skipped_samples_are_counted_over_all_workers(tmp_path: Path) -> None:
    members = [(f"{k}.cls", b"x" if k % 4 == 1 else b"1") for k in range(16)]
    (tmp_path / "some.tar").write_bytes(tar_bytes(members))
    ds = make(tmp_path, on_error="skip", shuffle=False)
    batches = load(ds, 2, "fork")
    assert [b["cls"].tolist() for b in batches] == [[1] * 4] * 4
    assert ds.skipped == 4


def late(worker: int) -> None:
    """The first worker reads long before the last one begins."""
    time.sleep(0.3 * worker)


class Within(IterableDataset[Any]):
    """Around a data set that the process which starts the workers cannot see."""

    def __init__(self, ds: ShardDataset) -> None:
        self.inner = ds.batched()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


@pytest.mark.parametrize("change", ["set_epoch", "load_state_dict"])
@pytest.mark.parametrize(
    ("method", "persistent"), [("fork", False), ("fork", True), pytest.param("spawn", False, marks=pytest.mark.slow)]
)
def test_what_is_set_after_an_iterator_was_made_holds_for_the_next(
    folder: Path, method: str, persistent: bool, change: str
) -> None:
    wanted = epochs(folder, 4)
    ds = make(folder)
    batches = load(ds, 2, method, worker_init_fn=late, persistent_workers=persistent)
    iterator = iter(batches)
    if change == "set_epoch":
        ds.set_epoch(3)
    else:
        ds.load_state_dict(make(folder).state_at(8 * 3))
    assert ids(iterator) == wanted[0]
    assert ids(batches) == wanted[3]


def test_workers_that_are_not_seen_keep_together_too(folder: Path) -> None:
    """A worker that begins after an epoch was set joins the pass that others of its team have begun before."""
    wanted = epochs(folder, 4)
    ds = make(folder)
    iterator = iter(load(Within(ds), 2, "fork", batch_size=None, collate_fn=None, worker_init_fn=late))
    begun = next(iterator)
    ds.set_epoch(3)
    assert ids([begun, *iterator]) == wanted[0]
    assert ids(load(Within(ds), 2, "fork", batch_size=None, collate_fn=None)) == wanted[3]


@pytest.mark.parametrize(("workers", "method"), [(0, None), *START_METHODS])
def test_to_set_the_epoch_of_an_iterator_that_is_about_to_be_read_changes_nothing(
    folder: Path, workers: int, method: str | None
) -> None:
    """As callbacks do at the start of an epoch, for which a framework has made the iterator already."""
    wanted = epochs(folder, 3)
    ds = make(folder)
    batches = load(ds, workers, method)
    for epoch in range(3):
        iterator = iter(batches)
        ds.set_epoch(epoch)
        assert ids(iterator) == wanted[epoch]
    ds.load_state_dict(make(folder).state_at(3))
    iterator = iter(batches)
    ds.set_epoch(0)
    assert ids(iterator) == wanted[0][3:]
    assert ids(batches) == wanted[1]
    ds.set_epoch(1)  # that one has been read: again
    assert ids(batches) == wanted[1]


@pytest.mark.parametrize(("workers", "method"), START_METHODS)
def test_each_iterator_with_workers_is_the_next_pass_whether_it_is_read_or_not(
    folder: Path, workers: int, method: str
) -> None:
    wanted = epochs(folder, 3)
    for _ in range(3):
        ds = make(folder)
        batches = load(ds, workers, method, worker_init_fn=late)
        first = iter(batches)
        assert ds.epoch == 1
        second = iter(batches)
        assert ds.epoch == 2
        del first  # before its last worker has begun
        assert ids(second) == wanted[1]
        assert ids(ds.batched()) == wanted[2]


class Recording(IterableDataset[Any]):
    """What StatefulDataLoader does in a worker: asks for the data set's state after each batch, and hands it back."""

    def __init__(self, ds: ShardDataset, states: list[dict[str, Any]] | None = None) -> None:
        self.ds = ds
        self.states = states

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        if self.states is not None:
            self.ds.load_state_dict(self.states[info.id])
        for batch in self.ds.batched():
            yield info.id, batch["__id__"].tolist(), self.ds.state_dict()


@pytest.mark.parametrize("taken", [0, 1, 3, 4, 8])
def test_a_worker_s_own_state(folder: Path, taken: int) -> None:
    """Each worker saves and loads its own position, at equal numbers of workers."""
    [first, second] = epochs(folder, 2)
    states: list[Any] = [None, None]
    seen = []
    recording = load(Recording(make(folder)), 2, "fork", batch_size=None, collate_fn=None)
    begun = list(islice(recording, max(taken, 2)))
    for worker, batch, state in begun[:taken]:
        seen.append(batch)
        states[worker] = json.loads(json.dumps(state))
    if None in states:
        return
    ds = make(folder)
    rest = load(Recording(ds, states), 2, "fork", batch_size=None, collate_fn=None)
    got = [batch for _, batch, _ in rest]
    # DataLoader asks worker 0 first, whichever worker's turn it was: torchdata's loader restores the turn itself.
    assert sorted(got) == sorted(first[taken:])
    assert seen == first[:taken]
    assert ids(load(ds, 2, "fork")) == second
    with pytest.raises(StateError, match="one DataLoader worker"):
        make(folder).load_state_dict(states[0])
