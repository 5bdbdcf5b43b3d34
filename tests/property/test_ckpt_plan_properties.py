"""Laws of the decisions: boxes, sharding as torch does it, spreading, and a save's plan for random layouts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckptstore.boxes import Box, Placement, byte_range, intersect, shard, split, tiling_fault
from ckptstore.plan import plan_save, spread
from ckptstore.records import Held, Report

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: Any, shape: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True)))


@st.composite
def shape_and_boxes(draw: Any) -> tuple[tuple[int, ...], Box, Box]:
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


def numbered(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape)).reshape(shape)


@given(shape_and_boxes(), st.integers(1, 3), st.integers(1, 64))
def test_split_is_the_boxs_bytes_in_order(case: Any, itemsize: int, limit: int) -> None:
    shape, box, _ = case
    array = numbered(shape)[box.slices()]
    parts = split(box, itemsize, limit)
    joined = [numbered(shape)[p.slices()].reshape(-1) for p in parts]
    assert np.array_equal(np.concatenate([*joined, []]), array.reshape(-1))
    assert all(p.volume * itemsize <= max(limit, itemsize) and p.volume for p in parts)


@given(shape_and_boxes())
def test_intersection_is_what_both_have(case: Any) -> None:
    shape, a, b = case
    array = numbered(shape)
    common = set(array[a.slices()].reshape(-1).tolist()) & set(array[b.slices()].reshape(-1).tolist())
    both = intersect(a, b)
    assert (set(array[both.slices()].reshape(-1).tolist()) if both else set()) == common


@given(shape_and_boxes(), st.integers(1, 3))
def test_byte_range_is_right_or_none(case: Any, itemsize: int) -> None:
    shape, outer, other = case
    inner = intersect(outer, other)
    if inner is None:
        return
    flat = numbered(shape)[outer.slices()].reshape(-1)
    wanted = numbered(shape)[inner.slices()].reshape(-1)
    run = byte_range(inner, outer, itemsize)
    positions = np.flatnonzero(np.isin(flat, wanted))
    if run is None:
        assert positions[-1] - positions[0] + 1 != len(positions)
    else:
        assert np.array_equal(flat[run[0] // itemsize : run[1] // itemsize], wanted)


@given(shape_and_boxes())
def test_two_boxes_tile_only_if_they_cover_everything_once(case: Any) -> None:
    shape, a, b = case
    count = np.zeros(shape, int)
    for box in {a, b}:
        count[box.slices()] += 1
    exact = bool((count == 1).all())
    assert (tiling_fault(shape, list({a, b})) is None) == exact


@st.composite
def layouts(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], list[Any]]:
    """A shape, a mesh and placements of one kind that torch knows."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=2)))
    placements: list[Any] = []
    for _ in mesh:
        dim = draw(st.integers(0, len(shape) - 1))
        placements.append(draw(st.sampled_from([Replicate(), Shard(dim)])))
    if len(mesh) == 2 and all(isinstance(p, Shard) for p in placements) and draw(st.booleans()):
        placements[0] = _StridedShard(placements[1].dim, split_factor=mesh[1])
    return shape, mesh, placements


def ours(placements: list[Any]) -> list[Placement]:
    return [
        Placement(None) if isinstance(p, Replicate) else Placement(p.dim, getattr(p, "split_factor", 1))
        for p in placements
    ]


@given(layouts())
def test_shards_are_where_torch_puts_them(layout: Any) -> None:
    shape, mesh, placements = layout
    for coordinate in np.ndindex(*mesh):
        box = shard(shape, mesh, coordinate, ours(placements))
        local, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        if box is not None:
            assert box.shape == tuple(local)
            if box.volume:
                assert box.offsets == tuple(offsets)


@given(layouts())
def test_the_shards_of_a_mesh_cover_the_tensor(layout: Any) -> None:
    shape, mesh, placements = layout
    found = {shard(shape, mesh, coordinate, ours(placements)) for coordinate in np.ndindex(*mesh)}
    if None not in found:
        assert tiling_fault(shape, [b for b in found if b is not None]) is None


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 100), st.integers(-1, 5)), max_size=40))
def test_spread_is_level(world: int, items: list[tuple[int, int]]) -> None:
    """Items that one rank has, and items that all have."""
    everybody = tuple(range(world))
    candidates = [everybody if owner < 0 or owner >= world else (owner,) for _, owner in items]
    sizes = [size for size, _ in items]
    writers = spread(sizes, candidates, world)
    assert all(writer in able for writer, able in zip(writers, candidates, strict=True))
    load = [sum(s for s, w in zip(sizes, writers, strict=True) if w == rank) for rank in everybody]
    fixed = [sum(s for s, c in zip(sizes, candidates, strict=True) if c == (rank,)) for rank in everybody]
    shared = [s for s, c in zip(sizes, candidates, strict=True) if c == everybody]
    level = max(max(fixed), sum(sizes) / world)
    assert max(load) <= level + max(shared, default=0)
    for rank in everybody:  # what all could write comes in one run to each
        mine = [i for i, (w, c) in enumerate(zip(writers, candidates, strict=True)) if w == rank and c == everybody]
        all_ = [i for i, c in enumerate(candidates) if c == everybody]
        if mine and world > 1:
            assert all_.index(mine[-1]) - all_.index(mine[0]) + 1 == len(mine)


@given(layouts(), st.integers(1, 40), st.integers(1, 2))
def test_a_plan_writes_every_element_once_from_a_rank_that_has_it(layout: Any, chunk_bytes: int, replicas: int) -> None:
    shape, mesh, placements = layout
    array = numbered(shape)
    reports, boxes = [], []
    for _ in range(replicas):
        for coordinate in np.ndindex(*mesh):
            box = shard(shape, mesh, coordinate, ours(placements))
            if box is None:
                return
            parts = split(box, 1, chunk_bytes)
            digests = tuple(repr(array[p.slices()].tolist()) for p in parts)
            held = Held("w", "uint8", shape, box.offsets, box.shape, digests)
            reports.append(Report(len(reports), "n", 1, b"{}", (held,)))
            boxes.append(box)
    plan = plan_save(reports, chunk_bytes=chunk_bytes)
    count = np.zeros(shape, int)
    for rank, segments in enumerate(plan.segments):
        for piece in (p for s in segments for p in s):
            for i, chunk in enumerate(piece.chunks):
                box = Box(chunk.offsets, chunk.shape)
                assert split(boxes[rank], 1, chunk_bytes)[piece.first + i] == box
                assert chunk.digest == repr(array[box.slices()].tolist())
                count[box.slices()] += 1
    assert (count == 1).all()
