"""The cell that tells workers where a pass starts, and the ranks and workers that read it."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import ConfigError
from loader.epochcell import Base, EpochCell, Start
from loader.epochs import OrderSettings
from loader.workers import Place, Worker, find_place

SETTINGS = OrderSettings(seed=7, lanes=4, block_shards=8, shuffle=True, exchange=False, balance="bytes", cut=True)


def team(number: int, count: int) -> list[Worker]:
    """The workers of one iteration of a DataLoader."""
    return [Worker(index, count, number) for index in range(count)]


def begin(cell: EpochCell, workers: list[Worker]) -> list[int]:
    return [cell.begin(worker).epoch for worker in workers]


class TestCell:
    @given(
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=8),
        st.randoms(use_true_random=False),
    )
    def test_each_iteration_is_the_next_epoch_for_all_of_its_workers(self, runs: list[Any], random: Any) -> None:
        """Whatever the number of workers and the order in which they begin; a repeated team is a repeated seed."""
        cell = EpochCell(Base(3, 10))
        for number, (count, seed) in enumerate(runs):
            workers = team(16 * seed + count, count)
            random.shuffle(workers)
            starts = [cell.begin(worker) for worker in workers]
            assert {(start.epoch, start.position) for start in starts} == {(3 + number, 0 if number else 10)}
            assert cell.next_pass().epoch == 4 + number

    @given(st.integers(1, 4), st.integers(1, 6), st.data())
    def test_workers_that_stay_begin_every_pass_together(self, count: int, passes: int, data: st.DataObject) -> None:
        """Though a quick one may be sent into later passes before a slow one has begun this one."""
        cell = EpochCell()
        at = [0] * count
        begun: dict[int, set[int]] = {}
        while min(at) < passes:
            index = data.draw(st.sampled_from([i for i in range(count) if at[i] < passes]))
            worker = Worker(index, count, 9).in_iteration(at[index])
            begun.setdefault(at[index], set()).add(cell.begin(worker).epoch)
            at[index] += 1
        assert begun == {number: {number} for number in range(passes)}

    def test_others_may_begin_passes_in_between(self) -> None:
        cell = EpochCell()
        assert [cell.begin(worker.in_iteration(0)).epoch for worker in team(9, 3)] == [0, 0, 0]
        assert cell.begin(None).epoch == 1
        assert [cell.begin(worker.in_iteration(1)).epoch for worker in team(9, 3)] == [2, 2, 2]
        assert begin(cell, team(70, 2)) == [3, 3]
        assert [cell.begin(worker.in_iteration(2)).epoch for worker in team(9, 3)] == [4, 4, 4]

    def test_iterations_that_are_open_at_one_time_stay_apart(self) -> None:
        cell = EpochCell()
        one, two = team(100, 2), team(300, 2)
        mixed = [cell.begin(worker).epoch for worker in (one[0], two[0], one[1], two[1])]
        assert mixed == [0, 1, 0, 1]

    def test_what_is_set_wins_over_what_was_begun(self) -> None:
        cell = EpochCell()
        begin(cell, team(9, 2))
        cell.write(Base(9))
        assert cell.next_pass().epoch == 9
        assert begin(cell, team(9, 2)) == [9, 9]

    @given(st.integers(1, 20), st.integers(2, 4), st.randoms(use_true_random=False))
    def test_a_team_keeps_the_pass_that_it_began(self, writes: int, count: int, random: Any) -> None:
        """Whatever was set since, as long as the base is kept."""
        cell = EpochCell(Base(3, 10, SETTINGS))
        cell.begin(None)
        workers = team(9, count)
        random.shuffle(workers)
        first = cell.begin(workers[0])
        for number in range(writes):
            cell.write(Base(50 + number))
        later = {cell.begin(worker) for worker in workers[1:]}
        assert later == {first if writes < 16 else Start(writes + 1, 0, Base(50 + writes - 1))}
        assert cell.begin(Worker(0, 1, 77)).epoch == 50 + writes - 1 + (writes >= 16)

    def test_the_latest_pass_is_known(self) -> None:
        cell = EpochCell()
        own = cell.begin(None)
        assert cell.is_latest(own)
        cell.begin(Worker(0, 1, 5))
        assert not cell.is_latest(own)
        own = cell.begin(None)
        cell.write(own.base)
        assert not cell.is_latest(own)

    @pytest.mark.parametrize("seeds", [(5, 6), (5, 5)])
    @pytest.mark.parametrize("first", ["load", "iterate"])
    def test_several_workers_adopt_one_state_and_again_later(self, first: str, seeds: tuple[int, int]) -> None:
        cell = EpochCell()
        base = Base(5, 40, SETTINGS, None)
        for seed in seeds:
            starts = []
            for worker in team(seed, 3):
                start = cell.begin(worker) if first == "iterate" else None
                cell.adopt(base, worker, start)
                if start is None or start.generation != cell.next_pass().generation:
                    start = cell.begin(worker)
                starts.append(start)
            assert {(start.epoch, start.position) for start in starts} == {(5, 40)}
            assert len({start.generation for start in starts}) == 1
            assert cell.next_pass().epoch == 6

    @given(
        st.integers(0, 2**40),
        st.integers(0, 2**60),
        st.none() | st.integers(0, 2**60),
        st.none()
        | st.builds(
            OrderSettings,
            seed=st.integers(-(2**63), 2**64 - 1),
            lanes=st.integers(1, 2**30),
            block_shards=st.integers(1, 2**30),
            shuffle=st.booleans(),
            exchange=st.booleans(),
            balance=st.sampled_from(["bytes", "samples"]),
            cut=st.booleans(),
        ),
    )
    def test_a_base_comes_back_as_it_was(self, epoch: int, position: int, stop: int | None, settings: Any) -> None:
        base = Base(epoch, position, settings, stop)
        cell = EpochCell(base)
        assert cell.base() == base
        copy = pickle.loads(pickle.dumps(cell))
        assert copy.base() == base
        copy.write(Base(1))
        assert cell.base() == base

    def test_a_copy_goes_on_with_the_pass_that_is_next(self) -> None:
        assert Start(1, 2, Base(3, 10, None, 20)).epoch == 5
        assert Start(1, 2, Base(3, 10, None, 20)).position == 0
        assert Start(1, 2, Base(3, 10, None, 20)).stop is None


class FakeMesh:
    def __init__(self, names: tuple[str, ...], places: dict[str, tuple[int, int]]) -> None:
        self.mesh_dim_names = names
        self.ndim = len(names)
        self._places = places

    def __getitem__(self, name: str) -> FakeMesh:
        return FakeMesh((name,), self._places)

    def get_local_rank(self) -> int:
        return self._places[self.mesh_dim_names[0]][0]

    def size(self) -> int:
        return self._places[self.mesh_dim_names[0]][1]


class TestPlace:
    def test_arguments_then_environment_then_alone(self) -> None:
        env = {"RANK": "2", "WORLD_SIZE": "4"}
        assert find_place(1, 3, environ=env) == Place(1, 3)
        assert find_place(None, None, environ=env) == Place(2, 4)
        assert find_place(None, None, environ={}) == Place(0, 1)
        assert find_place(None, None, environ={"RANK": "2"}) == Place(0, 1)

    def test_torch_distributed_is_asked_where_it_is_set_up(self) -> None:
        import torch.distributed as dist

        stale = {"RANK": "3", "WORLD_SIZE": "4"}
        assert find_place(None, None, environ=stale) == Place(3, 4)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            assert find_place(None, None, environ=stale) == Place(0, 1)
            assert find_place(1, 2, environ=stale) == Place(1, 2)
        finally:
            dist.destroy_process_group()

    def test_a_mesh_says_it_by_its_data_parallel_part(self) -> None:
        places = {"dp": (1, 2), "tp": (3, 4)}
        assert find_place(None, None, FakeMesh(("dp",), places)) == Place(1, 2)
        assert find_place(None, None, FakeMesh(("dp", "tp"), places)) == Place(1, 2)
        with pytest.raises(ConfigError, match=r"mesh\[\"dp\"\]"):
            find_place(None, None, FakeMesh(("x", "tp"), places))
        with pytest.raises(ConfigError, match="either mesh or rank"):
            find_place(0, 1, FakeMesh(("dp",), places))

    @pytest.mark.parametrize("env", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
    def test_an_environment_that_cannot_be(self, env: dict[str, str]) -> None:
        with pytest.raises(ConfigError):
            find_place(None, None, environ=env)
