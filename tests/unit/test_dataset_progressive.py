"""Data sets that are counted while they are read: what is opened when, and that nothing else shows."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import loader
from cachefs.errors import ConfigError, CountsUnknown, DeadlineExceeded, EmptyDataset, FormatError, StateError
from cachefs.shard import ObjectStat
from loader import DataWarning, ShardDataset
from loader.epochs import Orders
from loader.formats import Parquet, Tokens, WebDataset
from loader.manifest import LEAST_BYTES, LEAST_SHARDS, is_progressive
from loader.testing import write_tars

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
COUNTS = np.random.default_rng(7).integers(0, 7, 130).tolist()
BATCH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    write_tars(folder, COUNTS)
    return folder


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The shards that are opened from now on in this process, by number."""
    import loader.buffers
    import loader.tally
    from loader.opening import open_mapped

    seen: list[int] = []

    def noted(client: Any, url: str, *args: Any, **options: Any) -> Any:
        seen.append(int(Path(url).stem))
        return open_mapped(client, url, *args, **options)

    for module in (loader.buffers, loader.tally):
        monkeypatch.setattr(module, "open_mapped", noted)
    return seen


def make(folder: Path, **options: Any) -> ShardDataset:
    return ShardDataset(folder, **{"global_batch_size": BATCH, "ids": True, "seed": 3, **options})


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def sequence(epoch: int = 0, counts: list[int] = COUNTS, folder: Path | None = None, **options: Any) -> list[int]:
    """The epoch's samples in order, from the pure functions and all counts."""
    sizes = np.array([path.stat().st_size for path in sorted((folder or Path()).glob("*.tar"))])
    known = np.array(counts, dtype=np.int64)
    orders = Orders.begin(known, sizes, batch=BATCH, seed=3, **{"shuffle": True, **options}, cut=False)
    order = orders(epoch)
    shard, row = order.locate(np.arange(order.total))
    return (shard << 32 | row).tolist()


def batches_of(samples: list[int], size: int = BATCH) -> list[list[int]]:
    return [samples[at : at + size] for at in range(0, len(samples) - size + 1, size)]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(json.dumps(state))
    return out


def counting_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nearflash-count"]


def wait_until(condition: Any, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


class TestOrder:
    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_it_is_the_order_of_all_counts_on_any_number_of_ranks(self, folder: Path, world: int) -> None:
        wanted = batches_of(sequence(folder=folder))
        ranks = [make(folder, rank=rank, world_size=world) for rank in range(world)]
        got = zip(*(ids(ds.batched()) for ds in ranks), strict=True)
        assert [[i for part in parts for i in part] for parts in got] == wanted
        second = zip(*(ids(ds.batched()) for ds in ranks), strict=True)
        assert [[i for part in parts for i in part] for parts in second] == batches_of(sequence(1, folder=folder))

    @pytest.mark.parametrize("workers", [0, 2, 3])
    def test_and_of_workers(self, folder: Path, workers: int) -> None:
        ds = make(folder)
        got = ids(DataLoader(ds.batched(), batch_size=None, num_workers=workers))
        assert got == batches_of(sequence(folder=folder))
        assert ids(DataLoader(ds, batch_size=BATCH, num_workers=workers, collate_fn=loader.collate)) == batches_of(
            sequence(1, folder=folder)
        )

    def test_and_of_the_loader(self, folder: Path) -> None:
        with loader.Loader(make(folder), threads=3) as fast:
            assert ids(fast) == batches_of(sequence(folder=folder))

    @pytest.mark.parametrize("options", [{"shuffle": False}, {"exchange": True}, {"block_shards": 1}, {"lanes": 50}])
    def test_and_of_other_settings(self, folder: Path, options: Any) -> None:
        ds = make(folder, **options)
        for epoch in range(2):
            assert ids(ds.batched()) == batches_of(sequence(epoch, folder=folder, **options))

    @pytest.mark.parametrize("world", [1, 2])
    def test_the_last_batch(self, folder: Path, world: int) -> None:
        samples = sequence(folder=folder)
        rest = len(samples) % BATCH
        assert rest > world
        short = [ids(make(folder, drop_last=False, rank=r, world_size=world).batched()) for r in range(world)]
        assert [i for rank in short for i in rank[-1]] == samples[-rest:]
        padded = [ids(make(folder, pad=True, rank=r, world_size=world).batched()) for r in range(world)]
        assert [i for rank in padded for i in rank[-1]] == samples[-rest:] + samples[: BATCH - rest]

    def test_more_ranks_than_samples_in_the_last_batch_are_refused_when_it_comes(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [1] * (LEAST_SHARDS + 1))
        ds = make(tmp_path, drop_last=False, global_batch_size=8, rank=0, world_size=2)
        batches = iter(ds.batched())
        assert len(list(islice(batches, 8))) == 8
        with pytest.raises(ConfigError, match="last batch"):
            next(batches)

    def test_the_kind_is_a_property_of_the_data(self, folder: Path, tmp_path: Path) -> None:
        def stats(number: int, size: int) -> tuple[ObjectStat, ...]:
            return tuple(ObjectStat(f"s3://b/{i}", size, "v") for i in range(number))

        assert is_progressive(stats(LEAST_SHARDS, 10), WebDataset())
        assert not is_progressive(stats(LEAST_SHARDS - 1, 10), WebDataset())
        assert is_progressive(stats(2, LEAST_BYTES // 2), WebDataset())
        assert not is_progressive(stats(1, LEAST_BYTES), WebDataset())
        assert not is_progressive(stats(1000, LEAST_BYTES), Parquet())
        assert not is_progressive(stats(1000, LEAST_BYTES), Tokens(length=8))
        write_tars(tmp_path / "few", COUNTS[: LEAST_SHARDS - 1])
        few = make(tmp_path / "few")
        assert not few.manifest.progressive
        assert few.manifest.complete
        assert make(folder).manifest.progressive


class TestFirstBatch:
    def test_it_takes_the_first_shards_only(self, folder: Path, opened: list[int]) -> None:
        ds = make(folder)
        batches = iter(ds.batched())
        assert next(batches)["__id__"].tolist() == sequence(folder=folder)[:BATCH]
        assert len(set(opened)) <= 3 * 12
        assert not ds.manifest.complete
        batches.close()  # type: ignore[attr-defined]
        assert wait_until(lambda: not counting_threads())
        assert len(set(opened)) <= 3 * 12, "and then no more"

    def test_what_is_counted_is_never_far_ahead(self, folder: Path, opened: list[int]) -> None:
        ds = make(folder, block_shards=2)
        batches = iter(ds.batched())
        for _ in range(5):
            next(batches)
        most = max(len(set(opened)), 1)
        assert most < len(COUNTS) * 3 // 4
        batches.close()  # type: ignore[attr-defined]

    def test_each_shard_is_counted_once(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import loader.tally

        counted = []
        original = loader.tally.open_mapped
        monkeypatch.setattr(
            loader.tally,
            "open_mapped",
            lambda client, url, *args, **options: counted.append(url) or original(client, url, *args, **options),
        )
        ds = make(folder)
        ids(ds.batched())
        assert len(counted) == len(set(counted)) == len(COUNTS)


class TestLength:
    def test_len_is_a_type_error_until_all_is_counted(self, folder: Path) -> None:
        ds = make(folder)
        for ask in (lambda: len(ds), lambda: ds.steps, lambda: len(ds.batched()), lambda: ds.manifest.total):
            with pytest.raises(TypeError, match="130 of 130 shards are not counted"):
                ask()
        assert issubclass(CountsUnknown, TypeError)
        assert abs(ds.estimated_len() - sum(COUNTS)) < sum(COUNTS) // 2
        told: list[tuple[int, int]] = []
        ds.count(lambda counted, of: told.append((counted, of)))
        assert told[-1] == (130, 130)
        assert [counted for counted, _ in told] == sorted(counted for counted, _ in told)
        whole = sum(COUNTS) // BATCH * BATCH
        assert len(ds) == ds.estimated_len() == whole == len(list(ds))
        assert ds.manifest.counts.tolist() == COUNTS
        assert not counting_threads() or wait_until(lambda: not counting_threads())

    @pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"pad": True}])
    def test_an_estimate_is_not_refused(self, folder: Path, options: dict[str, Any]) -> None:
        guess = make(folder)._definition.estimated_total()
        for size in (guess - 1, guess, guess + 1, 10 * guess):
            ds = make(folder, global_batch_size=size, rank=1, world_size=2, **options)
            assert 0 <= ds.estimated_len() <= 2 * size
            ds.count()
            if sum(COUNTS) >= size or options.get("pad"):
                assert ds.estimated_len() == len(ds)
            elif not options:
                for ask in (ds.estimated_len, lambda ds=ds: len(ds)):
                    with pytest.raises(EmptyDataset):  # by now it is certain
                        ask()

    def test_lists_and_dataloaders_do_without(self, folder: Path) -> None:
        whole = sum(COUNTS) // BATCH * BATCH
        assert len(list(make(folder))) == whole
        batches = DataLoader(make(folder).batched(), batch_size=None)
        with pytest.raises(TypeError):
            len(batches)
        assert len(list(batches)) == whole // BATCH == len(batches)
        with loader.Loader(make(folder)) as fast:
            assert len(list(fast)) == whole // BATCH

    def test_digest_and_order_are_the_same_with_all_counts(self, folder: Path, tmp_path: Path) -> None:
        ds, counted = make(folder), make(folder)
        digest = ds.manifest.digest
        counted.count()
        assert counted.manifest.digest == digest
        assert ids(counted.batched()) == ids(ds.batched())
        assert ds.manifest.digest == digest
        make(folder).save_manifest(tmp_path / "all.manifest")
        saved = make(tmp_path / "all.manifest")
        assert len(saved) == sum(COUNTS) // BATCH * BATCH
        assert saved.manifest.progressive
        assert saved.manifest.digest == digest
        assert ids(saved.batched()) == batches_of(sequence(folder=folder))
        assert saved.state_at(5) == make(folder).state_at(5)

    def test_no_sample_at_all(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [0] * LEAST_SHARDS)
        with pytest.raises(EmptyDataset, match="no sample"):
            list(make(tmp_path))
        with pytest.raises(EmptyDataset):
            make(tmp_path).estimated_len()


class TestResume:
    @pytest.mark.parametrize("seed", range(6))
    def test_from_any_position_without_what_is_used_up(self, folder: Path, opened: list[int], seed: int) -> None:
        samples = sequence(folder=folder)
        wanted = batches_of(samples)
        random = np.random.default_rng(seed)
        at = int(random.integers(1, len(wanted)))
        source = make(folder)
        if seed % 2:
            source.count()
        state = stored(source.state_at(at))
        assert len(json.dumps(state)) < 2000
        opened.clear()
        ds = make(folder)
        ds.load_state_dict(state)
        assert stored(ds.state_dict()) == state
        assert ids(ds.batched()) == wanted[at:]
        used = {sample >> 32 for sample in samples[: at * BATCH]} - {sample >> 32 for sample in samples[at * BATCH :]}
        assert not used & set(opened)
        assert ids(ds.batched()) == batches_of(sequence(1, folder=folder)), "all is counted for the next epoch"

    def test_three_times_at_other_ranks_and_workers(self, folder: Path) -> None:
        wanted = batches_of(sequence(folder=folder))
        state, at = make(folder).state_at(0), 0
        for world, workers, count in ((2, 0, 7), (3, 2, 6), (1, 2, 5)):
            parts = []
            for rank in range(world):
                ds = make(folder, rank=rank, world_size=world)
                ds.load_state_dict(stored(state))
                rest = DataLoader(ds.batched(), batch_size=None, num_workers=workers)
                parts.append(list(islice(rest, count)))
            got = [[i for batch in step for i in batch["__id__"].tolist()] for step in zip(*parts, strict=True)]
            assert got == wanted[at : at + count]
            state, at = ds.state_after(parts[-1][-1]), at + count
        assert state == make(folder).state_at(at)

    def test_at_the_epochs_end(self, folder: Path) -> None:
        steps = sum(COUNTS) // BATCH
        state = stored(make(folder).state_at(steps))
        assert (state["epoch"], state["position"]) == (1, 0)
        ds = make(folder)
        ds.load_state_dict(state)
        assert ids(ds.batched()) == batches_of(sequence(1, folder=folder))
        late = stored(make(folder).state_at(steps - 1))
        ds.load_state_dict(late)
        assert ids(ds.batched()) == batches_of(sequence(folder=folder))[-1:]
        padded = make(folder, pad=True)
        padded.load_state_dict(late)
        assert ids(padded.batched())[-1][-1] in sequence(folder=folder)[:BATCH]

    def test_with_the_loader_and_its_state(self, folder: Path) -> None:
        wanted = batches_of(sequence(folder=folder))
        with loader.Loader(make(folder), threads=2) as fast:
            assert ids(islice(fast, 9)) == wanted[:9]
            state = stored(fast.state_dict())
        with loader.Loader(make(folder), threads=2) as fast:
            fast.load_state_dict(state)
            assert ids(fast) == wanted[9:]

    def test_a_process_that_was_forked_or_spawned_later_goes_on_too(self, folder: Path) -> None:
        wanted = batches_of(sequence(folder=folder))
        ds = make(folder)
        ds.load_state_dict(stored(make(folder).state_at(11)))
        copy = pickle.loads(pickle.dumps(ds))
        assert ids(copy.batched()) == wanted[11:]
        assert ids(DataLoader(ds.batched(), batch_size=None, num_workers=2)) == wanted[11:]

    def test_a_state_of_other_data_or_with_false_counts_is_refused(self, folder: Path, tmp_path: Path) -> None:
        state = stored(make(folder).state_at(11))
        write_tars(tmp_path, [*COUNTS[:-1], COUNTS[-1] + 30])
        with pytest.raises(StateError, match="belongs to data set"):
            make(tmp_path).load_state_dict(state)
        for wrong in ([[1]] * 12, state["known"][:-1], [[10**9, *lane[1:]] for lane in state["known"]], "known"):
            for counted in (False, True):
                ds = make(folder)
                if counted:
                    ds.count()
                with pytest.raises(StateError):
                    ds.load_state_dict({**state, "known": wrong})
        with pytest.raises(StateError, match="does not say"):
            make(folder).load_state_dict({**{k: v for k, v in state.items() if k != "known"}, "format": 1})

    @pytest.mark.parametrize("counted", [False, True])
    def test_what_a_state_raises_does_not_depend_on_what_is_known(self, folder: Path, counted: bool) -> None:
        """The epoch's last batch is too short for two ranks: that is an error there, and not before."""
        size = sum(COUNTS) // 3
        size -= (sum(COUNTS) % size) == 0
        while sum(COUNTS) % size != 1:
            size -= 1
        ds = make(folder, global_batch_size=size, rank=0, world_size=2, drop_last=False)
        if counted:
            ds.count()
        whole, positions = sum(COUNTS) // size, []
        with pytest.raises(ConfigError, match="last batch of 1 samples"):
            for number, _ in enumerate(ds.batched(), 1):
                if number < whole:
                    positions.append(ds.state_dict()["position"])
        assert positions == [size * number for number in range(1, whole)]

    def test_between_two_samples_of_a_batch_the_epochs_end_must_be_known(self, folder: Path) -> None:
        for counted in (False, True):
            ds = make(folder)
            if counted:
                ds.count()
            samples = iter(ds)
            got = [next(samples)["__id__"] for _ in range(BATCH + 5)]
            if not counted:
                with pytest.raises(StateError, match="count"):
                    ds.state_dict()
                continue
            again = make(folder)
            again.load_state_dict(stored(ds.state_dict()))
            rest = [sample["__id__"] for sample in again]
            assert got + rest == [i for batch in batches_of(sequence(folder=folder)) for i in batch]


class TestSharing:
    def test_workers_count_for_one_another_and_for_their_parent(self, folder: Path, opened: list[int]) -> None:
        ds = make(folder)
        batches = list(DataLoader(ds.batched(), batch_size=None, num_workers=2))
        assert ds.manifest.counts.tolist() == COUNTS
        assert len(ds) == len(batches) * BATCH
        assert ds.state_after(batches[4]) == make(folder).state_at(5)
        del opened[:]
        ds.state_at(9)
        assert opened == []

    def test_copies_know_what_was_known(self, folder: Path) -> None:
        ds = make(folder)
        list(islice(ds.batched(), 3))
        known = ds.manifest.counts
        assert (known >= 0).any()
        copy = pickle.loads(pickle.dumps(ds))
        assert (copy.manifest.counts >= 0).sum() >= (known >= 0).sum()
        copy.count()
        assert copy.manifest.counts.tolist() == COUNTS

    def test_a_fork_while_others_count(self, folder: Path) -> None:
        ds = make(folder)
        batches = iter(ds.batched())
        next(batches)
        process = multiprocessing.get_context("fork").Process(target=_reads_all, args=(ds, len(COUNTS)))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        batches.close()  # type: ignore[attr-defined]


def _reads_all(ds: ShardDataset, shards: int) -> None:
    ds.count()
    assert ds.manifest.complete
    ds.set_epoch(1)
    assert len(list(ds.batched())) == ds.steps


class TestDamage:
    @pytest.fixture
    def damaged(self, tmp_path: Path) -> tuple[Path, int]:
        """A shard in the middle of the order is no tar."""
        write_tars(tmp_path, COUNTS)
        order = [sample >> 32 for sample in sequence(folder=tmp_path)]
        bad = order[len(order) // 2]
        path = tmp_path / f"{bad:03d}.tar"
        path.write_bytes(b"\x01" * path.stat().st_size)
        return tmp_path, bad

    def test_it_is_raised_where_it_is_needed_the_same_on_every_rank(self, damaged: tuple[Path, int]) -> None:
        folder, bad = damaged
        ends = []
        for rank in range(3):
            got: list[Any] = []
            with pytest.raises(FormatError, match=f"{bad:03d}.tar"):
                got.extend(make(folder, rank=rank, world_size=3).batched())  # keeps what came before
            batches = iter(make(folder, rank=rank, world_size=3).batched())
            count = 0
            with pytest.raises(FormatError, match=f"{bad:03d}.tar"):
                while next(batches) is not None:
                    count += 1
            ends.append(count)
        assert len(set(ends)) == 1
        assert 0 < ends[0] < sum(COUNTS) // BATCH

    def test_of_several_it_is_the_same_one_whatever_is_found_first(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import loader.tally

        low, high, found = 20, 90, threading.Event()

        def failing(client: Any, url: str, *args: Any, **options: Any) -> Any:
            number = int(Path(url).stem)
            if number == low:
                assert found.wait(30)
                time.sleep(0.2)
            if number == high:
                found.set()
            raise FormatError("no tar", url=url)

        monkeypatch.setattr(loader.tally, "open_mapped", failing)
        tally = make(folder)._definition.tally
        assert tally is not None
        with pytest.raises(FormatError, match=f"{low:03d}.tar"):
            tally.need(np.array([low, high]))

    def test_with_workers_too(self, damaged: tuple[Path, int]) -> None:
        folder, bad = damaged
        ends = []
        for workers in (0, 2):
            batches = iter(DataLoader(make(folder).batched(), batch_size=None, num_workers=workers))
            count = 0
            with pytest.raises(FormatError, match=f"{bad:03d}.tar"):
                while next(batches) is not None:
                    count += 1
            ends.append(count)
        assert ends[0] == ends[1]

    def test_with_skip_it_counts_as_empty_everywhere(self, damaged: tuple[Path, int]) -> None:
        folder, bad = damaged
        counts = [0 if number == bad else count for number, count in enumerate(COUNTS)]
        wanted = batches_of(sequence(folder=folder, counts=counts))
        with pytest.warns(DataWarning, match="damaged shard"):
            ds = make(folder, on_error="skip")
            assert ids(ds.batched()) == wanted
        assert list(ds.manifest.damaged) == [bad]
        with pytest.warns(DataWarning, match="damaged shard"):
            two = make(folder, on_error="skip")
            got = ids(DataLoader(two.batched(), batch_size=None, num_workers=2))
            two.count()
            two.manifest.damaged[bad]
            list(two)
        assert got == wanted
        assert f"{bad:03d}.tar" in str(two.manifest.damaged[bad])


class TestStopping:
    def test_breaking_off_leaves_nothing_behind(self, folder: Path) -> None:
        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        for _ in make(folder).batched():
            break
        assert wait_until(lambda: not counting_threads())
        before = descriptors()
        for _ in range(30):
            for _ in make(folder).batched():
                break
        assert wait_until(lambda: not counting_threads())
        assert descriptors() <= before + 2

    def test_a_wait_ends(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import loader.tally

        release = threading.Event()
        monkeypatch.setattr(loader.tally, "WAIT", 0.3)
        monkeypatch.setattr(loader.tally, "open_mapped", lambda *_, **__: release.wait(30))
        tally = make(folder)._definition.tally
        assert tally is not None
        try:
            tally.want(self, np.arange(4))  # which keeps all threads busy
            assert wait_until(lambda: len(tally._desk().busy) == 4)
            with pytest.raises(DeadlineExceeded, match="to be counted"):
                tally.need(np.array([7]))
        finally:
            tally.forget(self)
            release.set()
        assert wait_until(lambda: not counting_threads())

    def test_a_wait_does_not_end_while_the_shard_is_being_counted(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import loader.tally
        from loader.opening import open_mapped

        def slow(*args: Any, **options: Any) -> Any:
            time.sleep(0.5)
            return open_mapped(*args, **options)

        monkeypatch.setattr(loader.tally, "WAIT", 0.1)
        monkeypatch.setattr(loader.tally, "open_mapped", slow)
        tally = make(folder)._definition.tally
        assert tally is not None
        tally.need(np.array([7]))
        assert tally.of(7) == COUNTS[7]

    def test_a_thread_that_cannot_be_started_is_not_waited_for(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started, allowed = threading.Thread.start, [0]

        def start(thread: threading.Thread) -> None:
            if thread.name == "nearflash-count":
                if not allowed[0]:
                    raise RuntimeError("can't start new thread")
                allowed[0] -= 1
            started(thread)

        monkeypatch.setattr(threading.Thread, "start", start)
        ds = make(folder)
        for _ in range(6):
            with pytest.raises(RuntimeError, match="can't start"):
                next(iter(ds.batched()))
        allowed[0] = 10**6
        ds.set_epoch(0)
        assert ids(ds.batched()) == batches_of(sequence(folder=folder))
        tally = make(folder)._definition.tally
        assert tally is not None
        allowed[0] = 1
        with tally._desk().changed:  # the one that starts cannot end before the next is tried
            tally.want(self, np.arange(8))
        allowed[0] = 10**6
        tally.need(np.arange(8))
        assert [tally.of(number) for number in range(8)] == COUNTS[:8]

    def test_what_may_work_later_is_tried_again(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import loader.tally
        from cachefs.errors import Unavailable
        from loader.opening import open_mapped

        failing = [True]

        def sometimes(client: Any, url: str, *args: Any, **options: Any) -> Any:
            if failing[0]:
                raise Unavailable("no answer", url=url)
            return open_mapped(client, url, *args, **options)

        monkeypatch.setattr(loader.tally, "open_mapped", sometimes)
        ds = make(folder)
        with pytest.raises(Unavailable):
            next(iter(ds.batched()))
        assert wait_until(lambda: not counting_threads())  # by now what was only wanted ahead has failed as well
        failing[0] = False
        ds.set_epoch(0)
        assert ids(ds.batched()) == batches_of(sequence(folder=folder))


def test_formats_that_are_indexed(tmp_path: Path) -> None:
    lines = 0
    for shard in range(LEAST_SHARDS):
        count = shard % 5
        text = "".join(json.dumps({"n": lines + i}) + "\n" for i in range(count))
        (tmp_path / f"{shard:03d}.jsonl").write_text(text)
        lines += count
    ds = ShardDataset(tmp_path, batch_size=4, format="jsonl")
    assert sorted(int(sample["n"]) for sample in ds) == sorted(range(lines)) or lines % 4
    assert ds.manifest.progressive
