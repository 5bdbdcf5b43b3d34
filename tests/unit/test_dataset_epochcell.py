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
from loader.workers import ALONE, Place, Worker, find_place

SETTINGS = OrderSettings(seed=7, lanes=4, block_shards=8, shuffle=True, exchange=False, balance="bytes", cut=True)


def finish(cell: EpochCell, count: int, rank: int = 0) -> None:
    """A pass that all of ``count`` workers read to its end."""
    starts = [cell.next_pass(rank) for _ in range(count)]
    for index, start in enumerate(starts):
        cell.started(start, rank, Worker(index, count))
    for index, start in enumerate(starts):
        cell.finished(start, rank, Worker(index, count))


class TestCell:
    @pytest.mark.parametrize("counts", [[1, 1, 1], [2, 2], [3, 1, 2, 5, 4, 1], [8, 2, 8]])
    def test_epochs_advance_when_all_workers_are_through(self, counts: list[int]) -> None:
        cell = EpochCell(Base(3, 10))
        for number, count in enumerate(counts):
            start = cell.next_pass(0)
            assert (start.epoch, start.position) == (3 + number, 0 if number else 10)
            finish(cell, count)
        assert cell.next_pass(0).epoch == 3 + len(counts)

    def test_a_broken_pass_begins_again_with_any_number_of_workers(self) -> None:
        cell = EpochCell()
        finish(cell, 3)
        start = cell.next_pass(0)
        for index in (0, 2):
            cell.finished(start, 0, Worker(index, 3))
        assert cell.next_pass(0).epoch == 1
        cell.finished(start, 0, Worker(0, 2))
        assert cell.next_pass(0).epoch == 1
        cell.finished(start, 0, Worker(1, 2))
        assert cell.next_pass(0).epoch == 2

    def test_what_is_set_wins_over_stragglers(self) -> None:
        cell = EpochCell()
        old = cell.next_pass(0)
        cell.finished(old, 0, Worker(0, 2))
        cell.write(Base(9))
        cell.finished(old, 0, Worker(1, 2))
        assert cell.next_pass(0).epoch == 9

    def test_an_old_iterator_that_ends_late_takes_nothing_back(self) -> None:
        cell = EpochCell()
        old = cell.next_pass(0)
        cell.finished(old, 0, ALONE)
        cell.finished(cell.next_pass(0), 0, ALONE)
        cell.finished(old, 0, ALONE)
        assert cell.next_pass(0).epoch == 2

    def test_ranks_that_share_a_cell_keep_their_passes_apart(self) -> None:
        cell = EpochCell()
        finish(cell, 2, rank=0)
        assert (cell.next_pass(0).epoch, cell.next_pass(1).epoch) == (1, 0)

    def test_it_is_known_whether_workers_are_reading(self) -> None:
        cell = EpochCell()
        assert not cell.being_read(0)
        start = cell.next_pass(0)
        cell.started(start, 0, Worker(0, 2))
        assert cell.being_read(0) and not cell.being_read(1)
        finish(cell, 2)
        assert not cell.being_read(0)

    def test_several_workers_adopt_one_state(self) -> None:
        cell = EpochCell()
        base = Base(5, 40, SETTINGS, None)
        for index in range(3):
            cell.adopt(base, 0)
            assert cell.next_pass(0).base == base
            cell.started(cell.next_pass(0), 0, Worker(index, 3))
        generations = {cell.next_pass(0).generation}
        finish(cell, 3)
        assert {cell.next_pass(0).generation} == generations
        assert cell.next_pass(0).epoch == 6

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
