"""Stages of a Loader: map and filter, in threads and processes; full batches, exact states, what errors say."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import loader
from cachefs.errors import ConfigError, CountsUnknown, DeadlineExceeded, EmptyDataset, NearflashError, StateError
from loader import Filter, Loader, Map
from loader.stages_channel import Channel, Closed
from loader.stages_filter import Full, Kept, Point, Refill
from loader.testing import write_tars
from loader.transfer import Sent
from tests.unit.stage_functions import (
    all_kept,
    doubled,
    fails_at_seven,
    fails_then_never_ends,
    kept,
    kills_itself,
    never_ends,
    never_ends_at_four,
    number,
    raises_unportable,
    with_array,
)

COUNTS = [13, 0, 22, 7, 9]
TOTAL = sum(COUNTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, COUNTS)
    return folder


def numbers(batch: Any) -> list[int]:
    return [number({"bin": value}) for value in batch["bin"]]


def data(folder: Path, **options: Any) -> loader.ShardDataset:
    return loader.ShardDataset(folder, **{"global_batch_size": 4, "seed": 11, **options})


def stored(state: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = json.loads(json.dumps(state))
    return out


# --- the rule by itself ---


def kept_parts(plan: list[list[int]], point: Point, *, rounds: bool) -> Iterator[Kept]:
    """What a pass over these kept samples gives the refill, from ``point`` on."""
    now, batch = point.round, point.batch
    while True:
        for at in range(batch, len(plan)):
            last = rounds and at + 1 == len(plan)
            yield Kept(now, at, last, list(plan[at]))
        if not rounds:
            return
        now, batch = now + 1, 0


PLANS = st.lists(st.lists(st.integers(0, 99), max_size=5), min_size=1, max_size=8)


class TestRefill:
    def refill(self, plan: list[list[int]], point: Point, **options: Any) -> list[Full]:
        rounds = options.get("steps") is not None or options.get("fill", False)
        source = kept_parts(plan, point, rounds=rounds)
        options = {"whole": point == Point(), "earlier": 0, "steps": None, **options}
        return list(Refill(source, point, **options))

    @given(PLANS, st.integers(1, 7), st.sampled_from(["drop", "short", "fill"]))
    def test_as_many_as_there_are(self, plan: list[list[int]], size: int, end: str) -> None:
        everything = [value for part in plan for value in part]
        count = len(everything) // size
        wanted = [everything[at * size : (at + 1) * size] for at in range(count)]
        rest = everything[count * size :]
        if rest and end == "short":
            wanted.append(rest)
        if rest and end == "fill":
            wanted.append((rest + everything * size)[:size])
        options = {"size": size, "short": end == "short", "fill": end == "fill"}
        if not wanted:
            with pytest.raises(EmptyDataset):
                self.refill(plan, Point(), **options)
            return
        got = self.refill(plan, Point(), **options)
        assert [full.samples for full in got] == wanted
        assert [full.then is None for full in got] == [False] * (len(got) - 1) + [True]
        for k, full in enumerate(got[:-1], 1):
            assert full.then is not None and full.then.given == k
            assert [f.samples for f in self.refill(plan, full.then, **options)] == wanted[k:]

    @given(PLANS, st.integers(1, 7), st.integers(1, 20))
    def test_as_many_as_are_asked_for(self, plan: list[list[int]], size: int, steps: int) -> None:
        everything = [value for part in plan for value in part]
        if not everything:
            with pytest.raises(EmptyDataset):
                self.refill(plan, Point(), size=size, steps=steps)
            return
        endless = everything * (1 + steps * size)
        wanted = [endless[at * size : (at + 1) * size] for at in range(steps)]
        got = self.refill(plan, Point(), size=size, steps=steps)
        assert [full.samples for full in got] == wanted
        for k, full in enumerate(got[:-1], 1):
            assert full.then is not None and full.then.given == k and full.then.batch < len(plan)
            assert [f.samples for f in self.refill(plan, full.then, size=size, steps=steps)] == wanted[k:]
        assert got[-1].then is None


# --- map ---


class TestMap:
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("batched", [False, True])
    def test_in_the_order_of_the_data_set(self, folder: Path, threads: int, batched: bool) -> None:
        function = (lambda samples: list(map(doubled, samples))) if batched else doubled
        wanted = [numbers(batch) for batch in data(folder).batched()]
        with Loader(data(folder), threads=threads, stages=[Map(function, batched=batched)]) as batches:
            assert len(batches) == len(wanted)
            got = list(batches)
            assert [numbers(batch) for batch in got] == wanted
            assert [batch["twice"].tolist() for batch in got] == [[2 * n for n in batch] for batch in wanted]

    def test_states_are_the_data_set_s(self, folder: Path) -> None:
        wanted = [numbers(batch) for batch in data(folder).batched()]
        for k in range(len(wanted)):
            first, second = (Loader(data(folder), stages=[Map(doubled)]) for _ in range(2))
            stream = iter(first)
            batch = [next(stream) for _ in range(k + 1)][-1]
            assert first.state_dict() == data(folder).state_at(k + 1) == first.dataset.state_after(batch)
            second.load_state_dict(stored(first.state_dict()))
            assert [numbers(batch) for batch in second][: len(wanted) - k - 1] == wanted[k + 1 :]
            first.close()

    def test_ranks(self, folder: Path) -> None:
        wanted = [numbers(batch) for batch in data(folder).batched()]
        parts = [Loader(data(folder, rank=rank, world_size=2), stages=[Map(doubled)]) for rank in range(2)]
        got = [numbers(a) + numbers(b) for a, b in zip(*parts, strict=True)]
        assert got == wanted

    @pytest.mark.parametrize("processes", [0, 1])
    def test_an_exception_names_stage_and_sample(self, folder: Path, processes: int) -> None:
        stages = [Map(doubled), Map(fails_at_seven, processes=processes)]
        with Loader(data(folder, shuffle=False), stages=stages) as batches:
            stream = iter(batches)
            assert numbers(next(stream)) == [0, 1, 2, 3]
            with pytest.raises(KeyError, match="lost") as caught:
                list(stream)
            [note] = [note for note in caught.value.__notes__ if "stage 2" in note]
            assert note.startswith("in the map stage 2 (function fails_at_seven) of sample 7 of shard 0: ")
            assert note.endswith("000.tar")
            assert (caught.value.__cause__ is not None) == (processes > 0)

    def test_one_that_counts_wrongly(self, folder: Path) -> None:
        with (
            Loader(data(folder), stages=[Map(lambda samples: samples[1:], batched=True)]) as batches,
            pytest.raises(ConfigError, match="3 results for 4 samples") as caught,
        ):
            list(batches)
            assert "4 samples, the first sample" in caught.value.__notes__[0]

    def test_a_stop_iteration_ends_no_epoch(self, folder: Path) -> None:
        with (
            Loader(data(folder), stages=[Map(lambda sample: next(iter([])))]) as batches,
            pytest.raises(RuntimeError, match="StopIteration in the map stage 1"),
        ):
            list(batches)

    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda ds: Loader(ds, stages=Map(doubled)), "one stage"),  # type: ignore[arg-type]
            (lambda ds: Loader(ds, stages=[doubled]), "no stage"),  # type: ignore[list-item]
            (lambda ds: Map(3), "function"),  # type: ignore[arg-type]
            (lambda ds: Map(doubled, processes=-1), "processes"),
            (lambda ds: Filter(kept, timeout=0), "timeout"),
            (lambda ds: Filter(kept, timeout=float("inf")), "timeout"),
            (lambda ds: Filter(kept, timeout=float("nan")), "timeout"),
            (lambda ds: Filter(kept, timeout=1e12), "timeout"),
            (lambda ds: Filter(kept, timeout=True), "timeout"),
            (lambda ds: Loader(ds, stages=[Map(doubled)], steps=3), "without a filter"),
            (lambda ds: Loader(ds, stages=[Filter(kept)], steps=0), "steps"),
            (lambda ds: Loader(ds, stages=[Map(doubled)]).batched(), "leave out"),
        ],
    )
    def test_what_is_refused(self, folder: Path, make: Any, text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            make(data(folder))


# --- filter ---


def kept_in_order(folder: Path, epoch: int = 0, **options: Any) -> list[int]:
    """The samples of a rank's epoch that the filter keeps, in order; of one rank all of them."""
    ds = data(folder, **options)
    ds.set_epoch(epoch)
    return [n for batch in ds.batched() for n in numbers(batch) if n % 3 != 0]


def cut(values: list[int], size: int) -> list[list[int]]:
    return [values[at : at + size] for at in range(0, len(values) - size + 1, size)]


class TestFilter:
    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("stages", [[Filter(kept)], [Filter(all_kept, batched=True)], [Map(doubled), Filter(kept)]])
    def test_batches_are_full_and_in_order(self, folder: Path, threads: int, stages: list[Any]) -> None:
        with Loader(data(folder), threads=threads, stages=stages) as batches:
            for epoch in range(2):
                got = list(batches)
                assert [numbers(batch) for batch in got] == cut(kept_in_order(folder, epoch), 4)
            with pytest.raises(CountsUnknown):
                len(batches)
            assert all("__repeat__" not in batch for batch in got)

    def test_what_is_left(self, folder: Path) -> None:
        everything = kept_in_order(folder, drop_last=False)
        assert len(everything) % 4
        with Loader(data(folder, drop_last=False), stages=[Filter(kept)]) as batches:
            assert [numbers(batch) for batch in batches][-1] == everything[-(len(everything) % 4) :]
        with Loader(data(folder, pad=True), stages=[Filter(kept)]) as batches:
            got = list(batches)
        padded = [n for batch in data(folder, pad=True).batched() for n in numbers(batch) if n % 3 != 0]
        short = -len(padded) % 4
        assert [n for batch in got for n in numbers(batch)] == padded + padded[:short]
        assert got[-1]["__repeat__"].tolist()[4 - short :] == [True] * short

    def test_a_predicate_that_gives_no_truth(self, folder: Path) -> None:
        stages = [Filter(lambda sample: sample["bin"] > 3)]
        with Loader(data(folder, shuffle=False), stages=stages) as batches, pytest.raises(ValueError) as caught:
            list(batches)
        note = caught.value.__notes__[0]
        assert note.startswith("in the filter stage 1") and "sample 0 of shard 0" in note

    def test_batches_on_their_way_to_a_device(self, folder: Path) -> None:
        class Noted:
            """Counts what is sent, and what is received."""

            def __init__(self) -> None:
                self.sent: list[Any] = []
                self.received: list[Any] = []

            def send(self, batch: Any) -> Sent:
                self.sent.append(batch)
                return Sent({**batch, "moved": True}, None, batch)

            def receive(self, sent: Sent) -> Any:
                self.received.append(sent)
                return sent.batch

            def close(self) -> None:
                pass

        noted = Noted()
        with Loader(data(folder), stages=[Filter(kept)], transfer=noted) as batches:
            got = list(batches)
        assert all(batch["moved"] for batch in got) and len(noted.received) == len(got) == len(noted.sent)
        assert [numbers(batch) for batch in got] == cut(kept_in_order(folder), 4)

    @pytest.mark.parametrize("steps", [None, 30])
    def test_of_a_mixture(self, folder: Path, tmp_path: Path, steps: int | None) -> None:
        write_tars(tmp_path, [25])

        def make() -> Loader:
            sources = {"a": loader.ShardDataset(folder, batch_size=1), "b": loader.ShardDataset(tmp_path, batch_size=1)}
            mixture = loader.Mixture(sources, weights={"a": 2, "b": 1}, batch_size=4, seed=3)
            return Loader(mixture, stages=[Filter(kept)], steps=steps)

        with make() as batches:
            seen = [(numbers(batch), batches.state_dict()) for batch in batches]
        whole = [values for values, _ in seen]
        assert steps is None or len(whole) == steps
        for k in (0, 7, len(whole) - 2):
            with make() as again:
                again.load_state_dict(stored(seen[k][1]))
                assert [numbers(batch) for batch in again] == whole[k + 1 :]

    def test_a_batch_has_no_place_in_the_plan(self, folder: Path) -> None:
        with Loader(data(folder), stages=[Filter(kept)]) as batches:
            batch = next(iter(batches))
            with pytest.raises(StateError, match="where it is from"):
                batches.dataset.state_after(batch)

    @pytest.mark.parametrize("threads", [1, 4])
    @pytest.mark.parametrize("steps", [None, 4, 30])
    def test_resuming_after_every_batch(self, folder: Path, threads: int, steps: int | None) -> None:
        make = partial(Loader, threads=threads, stages=[Filter(kept)], steps=steps)
        whole: list[list[int]] = []
        states = []
        with make(data(folder)) as batches:
            for _ in range(2):
                for batch in batches:
                    whole.append(numbers(batch))
                    states.append(stored(batches.state_dict()))
        if steps is not None:
            assert len(whole) == 2 * steps
        for k in {*random.Random(3).sample(range(len(states)), min(len(states), 12)), len(states) // 2 - 1}:
            with make(data(folder, seed=99)) as again:
                again.load_state_dict(states[k])
                assert stored(again.state_dict()) == states[k]
                got: list[list[int]] = []
                while len(got) < len(whole) - k - 1:
                    before = len(got)
                    got += [numbers(batch) for batch in again]
                    assert len(got) > before
                assert got[: len(whole) - k - 1] == whole[k + 1 :], k

    def test_every_rank_gives_as_many_batches(self, folder: Path) -> None:
        steps = 9
        for rank in range(3):
            ds = data(folder, rank=rank, world_size=3, global_batch_size=6)
            with Loader(ds, stages=[Filter(kept)], steps=steps) as batches:
                assert len(batches) == steps
                got = list(batches)
            own = kept_in_order(folder, rank=rank, world_size=3, global_batch_size=6)
            assert len(got) == steps and len(own) < 2 * steps
            assert [n for batch in got for n in numbers(batch)] == (own * steps)[: 2 * steps]
            marks = [mark for batch in got for mark in batch["__repeat__"].tolist()]
            assert marks == [False] * len(own) + [True] * (2 * steps - len(own))

    def test_many_ranks_without_steps_are_refused(self, folder: Path) -> None:
        with (
            Loader(data(folder, rank=0, world_size=2), stages=[Filter(kept)]) as batches,
            pytest.raises(ConfigError, match="steps=N"),
        ):
            iter(batches)

    def test_ranks_resume_by_states_of_their_own(self, folder: Path) -> None:
        def make(rank: int, world: int = 2) -> Loader:
            return Loader(data(folder, rank=rank, world_size=world), stages=[Filter(kept)], steps=12)

        states, rest = [], []
        for rank in range(2):
            with make(rank) as batches:
                stream = iter(batches)
                for _ in range(5):
                    next(stream)
                states.append(stored(batches.state_dict()))
                rest.append([numbers(batch) for batch in stream])
        for rank in range(2):
            with make(rank) as again:
                again.load_state_dict(states[rank])
                assert [numbers(batch) for batch in again] == rest[rank]
                with pytest.raises(StateError, match="rank"):
                    again.load_state_dict(states[1 - rank])
        common = Loader.common_state(states)
        assert common["position"] == min(state["position"] for state in states)
        for world in (1, 2, 4):
            parts = []
            for rank in range(world):
                with make(rank, world) as again:
                    again.load_state_dict(common)
                    got = [n for batch in again for n in numbers(batch)]
                    assert len(got) == 7 * 4 // world
                    parts.append(got)
            if world == 1:
                position = common["position"]
                everything = [n for batch in data(folder).batched() for n in numbers(batch)][position:]
                assert parts[0][: len(everything) // 2] == [n for n in everything if n % 3][: len(everything) // 2]

    def test_another_number_of_ranks(self, folder: Path) -> None:
        with Loader(data(folder), stages=[Filter(kept)], steps=9) as batches:
            stream = iter(batches)
            states = [stored(batches.state_dict()) for _ in stream]
        within = next(state for state in states if state["filter"]["kept"])
        whole = next(state for state in states if not state["filter"]["kept"])
        with Loader(data(folder, rank=1, world_size=2), stages=[Filter(kept)], steps=9) as other:
            with pytest.warns(loader.DataWarning, match="come again"):
                other.load_state_dict(within)
            other.load_state_dict(whole)
            assert other.state_dict()["filter"]["kept"] == 0
        for other_kind in (Loader(data(folder)), Loader(data(folder), stages=[Map(doubled)]), data(folder)):
            with pytest.raises(StateError, match="filter stages"):
                other_kind.load_state_dict(within)
            other_kind.load_state_dict(whole)

    @pytest.mark.parametrize("raw", [3, "x", [1], {}, {"kept": "many"}])
    def test_a_damaged_point_is_refused_without_stages_too(self, folder: Path, raw: Any) -> None:
        ds = data(folder)
        state = {**ds.state_dict(), "filter": raw}
        for target in (ds, Loader(ds), Loader(ds, stages=[Map(doubled)])):
            with pytest.raises(StateError, match="filter"):
                target.load_state_dict(state)

    def test_a_common_state_is_of_all_ranks(self, folder: Path) -> None:
        def saved(rank: int, world: int = 3, size: int = 6) -> dict[str, Any]:
            ds = data(folder, rank=rank, world_size=world, global_batch_size=size)
            return Loader(ds, stages=[Filter(kept)], steps=5).state_dict()

        every = [saved(rank) for rank in range(3)]
        common = Loader.common_state(every)
        wrong = [
            (every[:1], "no state of rank 1, 2 of 3"),
            (every[1:], "no state of rank 0 of 3"),
            ([*every, every[1]], "several states of rank 1"),
            ([*every[:2], saved(1, 2)], "different numbers of ranks"),
            ([*every[:2], saved(2, size=3)], "different numbers of ranks or batch sizes"),
            ([common], "common state"),
            ([*every[:2], {**every[2], "filter": {**every[2]["filter"], "rank": 9}}], "rank 9 among 3"),
            ([*every[:1], *[{**every[0], "filter": {**every[0]["filter"], "world": 2**48}}]], "different numbers"),
            ([{**every[0], "filter": {**every[0]["filter"], "world": 2**48}}], r"rank 1, 2, .*\.\.\. of"),
            ([], "no state"),
        ]
        for states, text in wrong:
            with pytest.raises(StateError, match=text):
                Loader.common_state(states)

    @pytest.mark.parametrize("raw", [3, {}, {"kept": -1}, {"kept": True}])
    def test_states_that_are_damaged(self, folder: Path, raw: Any) -> None:
        with Loader(data(folder), stages=[Filter(kept)]) as batches:
            state = batches.state_dict()
            bad = {**state, "filter": {**state["filter"], **raw} if raw else raw} if isinstance(raw, dict) else raw
            bad = bad if isinstance(bad, dict) else {**state, "filter": raw}
            with pytest.raises(StateError, match="filter"):
                batches.load_state_dict(bad)

    def test_fewer_steps_than_the_state_has_given(self, folder: Path) -> None:
        with Loader(data(folder), stages=[Filter(kept)], steps=5) as batches:
            stream = iter(batches)
            states = [stored(batches.state_dict()) for _ in stream]
        for used, steps in ((4, 4), (4, 2), (2, 1)):
            with Loader(data(folder), stages=[Filter(kept)], steps=steps) as again:
                again.load_state_dict(states[used - 1])
                assert again.state_dict()["epoch"] == 1
                got = [n for batch in again for n in numbers(batch)]
                assert got == kept_in_order(folder, 1)[: 4 * steps]

    def test_one_that_keeps_nothing(self, folder: Path) -> None:
        for steps in (None, 3):
            with (
                Loader(data(folder), stages=[Filter(lambda sample: False)], steps=steps) as batches,
                pytest.raises(EmptyDataset, match="filter stages keep"),
            ):
                list(batches)

    def test_of_a_data_set_that_is_counted_meanwhile(self, tmp_path: Path) -> None:
        counts = np.random.default_rng(5).integers(0, 5, 66).tolist()
        write_tars(tmp_path, counts)
        make = partial(Loader, stages=[Filter(kept)], steps=40)
        with make(data(tmp_path)) as batches:
            stream = iter(batches)
            first = [numbers(next(stream)) for _ in range(9)]
            state = stored(batches.state_dict())
            rest = [numbers(batch) for batch in stream]
        with make(data(tmp_path)) as again:
            again.load_state_dict(state)
            assert [numbers(batch) for batch in again] == rest
        everything = kept_in_order(tmp_path)
        assert [n for batch in first + rest for n in batch] == (everything * 9)[:160]

    def test_set_epoch(self, folder: Path) -> None:
        with Loader(data(folder), stages=[Filter(kept)]) as batches:
            next(iter(batches))
            batches.set_epoch(5)
            assert batches.state_dict()["epoch"] == 5
            assert numbers(next(iter(batches))) == kept_in_order(folder, 5)[:4]

    def test_closing_ends_the_pass(self, folder: Path) -> None:
        with Loader(data(folder), stages=[Filter(kept)]) as batches:
            stream = iter(batches)
            next(stream)
            batches.close()
            with pytest.raises(NearflashError, match="ended by close"):
                list(stream)


# --- processes ---


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def left(before: set[threading.Thread]) -> tuple[set[threading.Thread], set[int]]:
    """Threads that were not there before, and processes."""
    gc.collect()
    return set(threading.enumerate()) - before, children()


def files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


class TestProcesses:
    def test_map_and_filter(self, folder: Path) -> None:
        wanted = kept_in_order(folder)
        stages = [Map(with_array, processes=2), Filter(kept, processes=1)]
        with Loader(data(folder), stages=stages) as batches:
            got = list(batches)
            assert [numbers(batch) for batch in got] == cut(wanted, 4)
            for batch in got:
                assert batch["array"].shape == (4, 3, 1000)
                assert batch["array"][:, 0, 0].tolist() == numbers(batch)
            pids = {pid for batch in got for pid in batch["pid"].tolist()}
            assert os.getpid() not in pids and pids <= children()
            assert [numbers(batch) for batch in batches] == cut(kept_in_order(folder, 1), 4)
            assert len(children()) <= 3
        assert not children()

    def test_breaking_off_leaves_nothing(self, folder: Path) -> None:
        def broken_off(*, closed: bool) -> None:
            batches = Loader(data(folder), stages=[Map(with_array, processes=1)], threads=1)
            for _ in batches:
                break
            assert children()
            if closed:
                batches.close()
                assert not children()

        broken_off(closed=True)  # which starts what multiprocessing keeps
        threads, open_files = set(threading.enumerate()), files()
        for closed in (True, False):
            broken_off(closed=closed)
            assert left(threads) == (set(), set())
            assert files() <= open_files

    def test_a_process_that_is_killed(self, folder: Path) -> None:
        with (
            Loader(data(folder), stages=[Map(kills_itself, processes=1)], threads=1) as batches,
            pytest.raises(NearflashError, match=r"process \d+ was killed by SIGKILL in the map stage 1"),
        ):
            list(batches)
        with Loader(data(folder), stages=[Map(with_array, processes=1)], threads=1) as batches:
            first = next(iter(batches))
            os.kill(int(first["pid"][0]), signal.SIGKILL)
            batches.close()
            assert numbers(next(iter(batches)))  # with another one

    @pytest.mark.parametrize(("how", "filtered"), [("close", False), ("break", True), ("error", True)])
    def test_nobody_waits_for_what_never_ends(
        self, folder: Path, how: str, filtered: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("loader.pipeline.STOP_SECONDS", 60.0)  # threads that end at all do so, however slowly
        before = set(threading.enumerate())
        function = fails_then_never_ends if how == "error" else never_ends_at_four
        stages = [Map(function, processes=2), *([Filter(all_kept, batched=True)] if filtered else [])]
        ds = data(folder, shuffle=False, batch_size=2, global_batch_size=None)
        steps = 50 if filtered else None  # without, a batch is held back until the next is there
        batches = Loader(ds, stages=stages, threads=1, steps=steps)
        stream = iter(batches)
        assert numbers(next(stream)) == ([1, 2] if filtered else [0, 1])
        if how == "close":
            batches.close()
            assert not children()
        elif how == "break":
            stream.close()  # type: ignore[attr-defined]
        else:
            with pytest.raises(KeyError, match="lost"):
                list(stream)
        assert {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("loader")} == set()
        batches.close()
        assert not children()

    def test_what_cannot_be_sent(self, folder: Path) -> None:
        with (
            Loader(data(folder), stages=[Map(lambda sample: sample, processes=1)]) as batches,
            pytest.raises(ConfigError, match="cannot be sent to a process"),
        ):
            list(batches)
        with (
            Loader(data(folder), stages=[Map(lambda s: threading.Lock()), Map(doubled, processes=1)]) as batches,
            pytest.raises(ConfigError, match="samples cannot be sent"),
        ):
            list(batches)

    def test_an_exception_that_cannot_be_sent(self, folder: Path) -> None:
        with (
            Loader(data(folder), stages=[Map(raises_unportable, processes=1)]) as batches,
            pytest.raises(RuntimeError, match="Unportable: 1 2"),
        ):
            list(batches)


class TestChannel:
    @pytest.fixture
    def ends(self) -> Iterator[tuple[Channel, Channel]]:
        here, there = socket.socketpair()
        channels = Channel(here), Channel(there)
        yield channels
        for channel in channels:
            channel.close()
            channel.close()

    @given(st.lists(st.integers(0, 3000), max_size=5))
    def test_arrays_and_tensors(self, sizes: list[int]) -> None:
        here, there = map(Channel, socket.socketpair())
        values = [np.arange(size, dtype=np.int16) for size in sizes] + [torch.arange(size) for size in sizes]
        here.send({"values": values, "text": "x"})
        back = there.receive()
        for one, other in zip(values, back["values"], strict=True):
            assert type(one) is type(other) and one.dtype == other.dtype and one.tolist() == other.tolist()
            other += 1  # writable
        here.close()
        with pytest.raises(Closed):
            there.receive()
        there.close()

    def test_odd_values(self, ends: tuple[Channel, Channel]) -> None:
        here, there = ends
        tensors = [
            torch.ones(2, 3).t(), torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.bfloat16),
            torch.ones(0, 4), torch.tensor(3),
        ]  # fmt: skip
        arrays = [np.ones((2, 3))[:, ::2], np.array(["a", None], dtype=object), np.array(3)]
        here.send((tensors, arrays))
        back, others = there.receive()
        assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True))
        assert all(np.array_equal(one, other) for one, other in zip(arrays, others, strict=True))

    def test_nobody_answers(self, ends: tuple[Channel, Channel]) -> None:
        here, there = ends
        with pytest.raises(TimeoutError):
            here.receive(0.01)
        with pytest.raises((pickle.PicklingError, TypeError, AttributeError)):
            here.send(threading.Lock())
        here.send("still usable")
        assert there.receive() == "still usable"
        there.close()
        with pytest.raises(Closed):
            for _ in range(9):
                here.send(bytes(1000))


def test_a_deadline(folder: Path) -> None:
    with (
        Loader(data(folder), stages=[Map(never_ends, processes=1, timeout=0.2)], threads=1) as batches,
        pytest.raises(DeadlineExceeded, match=r"took more than 0\.2 s in the map stage 1 \(function never_ends\)"),
    ):
        list(batches)
