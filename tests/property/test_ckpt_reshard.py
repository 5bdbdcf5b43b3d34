"""A state saved by N ranks and loaded by M, under every sharding: what comes back is what was there."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptstore import CheckpointStore, SaveOptions, Sharded
from ckptstore.boxes import Box, Placement, shard
from ckptstore.testing.job import run_job, values
from ckptstore.testing.model import ModelStore

TINY = SaveOptions(chunk_bytes=24, segment_bytes=64)


def cut(tensor: torch.Tensor, axis: int | None, rank: int, world: int) -> Any:
    """A rank's part of a tensor that is sharded along an axis, or all of it."""
    if axis is None or axis >= tensor.dim():
        return tensor.clone()
    box = shard(tuple(tensor.shape), (world,), (rank,), [Placement(axis)])
    assert box is not None
    return Sharded(tensor[box.slices()].clone(), tuple(tensor.shape), box.offsets)


def blank(part: Any) -> Any:
    """The same part with nothing in it."""
    if isinstance(part, Sharded):
        return Sharded(torch.full_like(part.local, -1), part.global_shape, part.offsets)
    return torch.full_like(part, -1)


def local(part: Any) -> torch.Tensor:
    return part.local if isinstance(part, Sharded) else part


def save_then_load(
    tensors: dict[str, torch.Tensor], n: int, saved: dict[str, int | None], m: int, loaded: dict[str, int | None]
) -> None:
    model = ModelStore()

    def save(store: CheckpointStore, rank: int) -> None:
        store.save(1, {name: cut(t, saved[name], rank, n) for name, t in tensors.items()})

    def load(store: CheckpointStore, rank: int) -> None:
        wanted = {name: cut(t, loaded[name], rank, m) for name, t in tensors.items()}
        got = {name: blank(part) for name, part in wanted.items()}
        store.load(got)
        for name, part in wanted.items():
            assert local(got[name]).shape == local(part).shape
            assert torch.equal(local(got[name]), local(part)), name
        assert store.verify() == []

    values(run_job(n, save, lambda rank: model.storage(f"rank{rank}"), save_options=TINY))
    values(run_job(m, load, lambda rank: model.storage(f"rank{rank}")))


FIXED = {
    "5x3": torch.arange(15.0).reshape(5, 3),
    "one row": torch.arange(3.0).reshape(1, 3),
    "no row": torch.empty(0, 3),
    "scalar": torch.tensor(3.5),
    "narrow": torch.arange(7, dtype=torch.int16),
    "deep": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4),
}


@pytest.mark.parametrize("n, m", list(itertools.product((1, 2, 3, 4), repeat=2)))
def test_every_n_to_every_m(n: int, m: int) -> None:
    rows, columns, whole = (dict.fromkeys(FIXED, axis) for axis in (0, 1, None))
    save_then_load(FIXED, n, rows, m, rows if (n + m) % 2 else columns)
    save_then_load(FIXED, n, whole, m, columns)
    save_then_load(FIXED, n, columns, m, whole)


def test_five_rows_over_four_ranks_on_six() -> None:
    rows: dict[str, int | None] = dict.fromkeys(FIXED, 0)
    save_then_load(FIXED, 4, rows, 6, rows)


shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


@st.composite
def cases(draw: Any) -> tuple[dict[str, torch.Tensor], dict[str, int | None], dict[str, int | None]]:
    tensors = {}
    for i in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        dtype = draw(st.sampled_from([torch.uint8, torch.bfloat16, torch.float64, torch.complex128]))
        tensors[f"t{i}"] = torch.arange(math.prod(shape)).to(dtype).reshape(shape)
    axes = st.fixed_dictionaries({name: st.sampled_from([None, 0, 1, 2]) for name in tensors})
    return tensors, draw(axes), draw(axes)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(1, 4), st.integers(1, 4))
def test_random_shardings(case: Any, n: int, m: int) -> None:
    tensors, saved, loaded = case
    save_then_load(tensors, n, saved, m, loaded)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases(), st.integers(1, 6), st.integers(1, 6))
def test_random_shardings_at_length(case: Any, n: int, m: int) -> None:
    tensors, saved, loaded = case
    save_then_load(tensors, n, saved, m, loaded)


def test_boxes_that_no_mesh_makes() -> None:
    """Parts of an odd shape, given outright."""
    whole = torch.arange(20.0).reshape(4, 5)
    parts = [Box((0, 0), (3, 2)), Box((0, 2), (1, 3)), Box((1, 2), (2, 3)), Box((3, 0), (1, 5))]
    model = ModelStore()

    def save(store: CheckpointStore, rank: int) -> None:
        store.save(1, {"x": Sharded(whole[parts[rank].slices()], (4, 5), parts[rank].offsets)})

    values(run_job(4, save, lambda rank: model.storage(f"rank{rank}"), save_options=TINY))
    assert torch.equal(values(run_job(1, lambda s, r: s.load()["x"], lambda r: model.storage()))[0], whole)
