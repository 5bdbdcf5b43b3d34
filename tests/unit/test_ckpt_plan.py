"""Who writes what: replicas, shards, ties, differences; boxes, labels, segments."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cachefs.errors import CheckpointMismatch
from ckptstore.boxes import Box, Placement, byte_range, intersect, shard, split, tiling_fault
from ckptstore.plan import plan_save, spread
from ckptstore.records import Held, Piece, PlannedChunk, Report, Rule, SavePlan, ranks_text
from ckptstore.segments import cut_segments, label, node_part, segment_layout, union


def held(
    name: str,
    shape: Sequence[int],
    *,
    offsets: Sequence[int] | None = None,
    extent: Sequence[int] | None = None,
    value: str = "v",
    dtype: str = "float32",
    rule: Rule = "equal",
    alias_of: str | None = None,
    chunk_bytes: int = 1 << 20,
) -> Held:
    """What a rank has; ``value`` stands for the content, so equal values give equal digests."""
    box = Box(tuple(offsets or (0,) * len(shape)), tuple(extent if extent is not None else shape))
    size = 4 if dtype == "float32" else 1
    digests = tuple(f"{value}:{b}" for b in split(box, size, chunk_bytes))
    return Held(name, dtype, tuple(shape), box.offsets, box.shape, digests, rule, alias_of)


def plan(*ranks: Sequence[Held], chunk_bytes: int = 1 << 20, per_rank: bool = False) -> SavePlan:
    reports = [Report(r, "node", 1, b"{}", tuple(tensors)) for r, tensors in enumerate(ranks)]
    return plan_save(reports, chunk_bytes=chunk_bytes, per_rank=lambda name: per_rank)


def written(outcome: SavePlan) -> list[tuple[int, str, tuple[int, ...], tuple[int, ...]]]:
    """(rank, label, offsets, shape) of every chunk."""
    return [
        (rank, piece.label, chunk.offsets, chunk.shape)
        for rank, segments in enumerate(outcome.segments)
        for pieces in segments
        for piece in pieces
        for chunk in piece.chunks
    ]


def test_a_replicated_tensor_is_written_once() -> None:
    outcome = plan([held("w", (4, 4))], [held("w", (4, 4))], [held("w", (4, 4))])
    assert [w[1:] for w in written(outcome)] == [("w", (0, 0), (4, 4))]


def test_replicas_are_spread_over_the_ranks_by_bytes() -> None:
    tensors = [held(f"w{i}", (100,)) for i in range(6)]
    outcome = plan(tensors, tensors, tensors)
    assert [sum(c.size for p in s for q in p for c in q.chunks) for s in outcome.segments] == [800, 800, 800]


def test_a_large_replica_is_cut_at_chunks() -> None:
    big = held("w", (8, 10), chunk_bytes=80)
    outcome = plan([big], [big], chunk_bytes=80)
    assert [len(p.chunks) for s in outcome.segments for f in s for p in f] == [2, 2]
    labels = [p.label for s in outcome.segments for f in s for p in f]
    assert labels == ["w#[0:4,0:10]", "w#[4:8,0:10]"]


def test_shards_stay_with_their_ranks() -> None:
    outcome = plan(
        [held("w", (5, 3), extent=(2, 3), value="a")],
        [held("w", (5, 3), offsets=(2, 0), extent=(2, 3), value="b")],
        [held("w", (5, 3), offsets=(4, 0), extent=(1, 3), value="c")],
        [held("w", (5, 3), offsets=(5, 0), extent=(0, 3))],
    )
    assert written(outcome) == [
        (0, "w#[0:2,0:3]", (0, 0), (2, 3)),
        (1, "w#[2:4,0:3]", (2, 0), (2, 3)),
        (2, "w#[4:5,0:3]", (4, 0), (1, 3)),
    ]


def test_replicated_shards_are_written_once_each() -> None:
    top = held("w", (4, 2), extent=(2, 2), value="a")
    low = held("w", (4, 2), offsets=(2, 0), extent=(2, 2), value="b")
    assert len(written(plan([top], [low], [top], [low]))) == 2


def test_a_shard_on_no_rank_is_an_error() -> None:
    with pytest.raises(CheckpointMismatch, match=r"'w': 6 of its 15 elements are on no rank"):
        plan([held("w", (5, 3), extent=(3, 3))])
    with pytest.raises(CheckpointMismatch, match="no rank holds any"):
        plan([held("w", (5, 3), offsets=(5, 0), extent=(0, 3))])


def test_shards_that_overlap_in_part_are_an_error() -> None:
    with pytest.raises(CheckpointMismatch, match="overlap"):
        plan([held("w", (4,), extent=(3,))], [held("w", (4,), offsets=(2,), extent=(2,))])


def test_a_difference_names_tensor_and_ranks() -> None:
    ranks = [[held("rng", (2,), value=v), held("lr", ())] for v in "abab"]
    with pytest.raises(CheckpointMismatch, match=r"'rng' differs between ranks 0,2 and ranks 1,3 \(.*per_rank"):
        plan(*ranks)


def test_a_difference_in_one_shard_names_its_place() -> None:
    with pytest.raises(CheckpointMismatch, match=r"'w\[0:2\]' differs between rank 0 and rank 2"):
        plan(
            [held("w", (4,), extent=(2,), value="a")],
            [held("w", (4,), offsets=(2,), extent=(2,), value="b")],
            [held("w", (4,), extent=(2,), value="c")],
        )


def test_different_shapes_or_types_are_an_error() -> None:
    with pytest.raises(CheckpointMismatch, match=r"rank 0 has float32 \[2\], rank 1 has float32 \[3\]"):
        plan([held("w", (2,))], [held("w", (3,))])


def test_many_differences_come_in_one_error() -> None:
    ranks = [[held(f"w{i}", (2,), value=f"{r}") for i in range(9)] for r in range(2)]
    with pytest.raises(CheckpointMismatch, match="and 5 more"):
        plan(*ranks)


def test_per_rank_values_are_kept_and_equal_ones_written_once() -> None:
    ranks = [[held("rng", (2,), value=v)] for v in "aba"]
    outcome = plan(*ranks, per_rank=True)
    pieces = [p for s in outcome.segments for f in s for p in f]
    assert sorted((p.label, p.ranks) for p in pieces) == [("rng#rank0", (0, 2)), ("rng#rank1", (1,))]
    part = node_part("a", 0, 1, dict(enumerate(outcome.segments)))
    assert sorted((t.name, t.per_rank) for t in part.tensors) == [("rng", 0), ("rng", 1), ("rng", 2)]
    owners = {t.per_rank: t.chunks for t in part.tensors}
    assert owners[0] == owners[2] != owners[1]


def test_per_rank_values_that_are_all_equal_are_everybodys() -> None:
    outcome = plan(*[[held("rng", (2,), rule="own")] for _ in range(3)])
    assert [w[1] for w in written(outcome)] == ["rng"]


def test_buffers_of_a_replicated_module_come_from_the_lowest_rank() -> None:
    ranks = [[held("bn", (2,), value=v, rule="first")] for v in "abc"]
    assert [(w[0], w[1]) for w in written(plan(*ranks))] == [(0, "bn")]


def test_tied_tensors_are_aliases_if_they_are_so_everywhere() -> None:
    tied = [held("a", (2,)), held("b", (2,), alias_of="a")]
    outcome = plan(tied, tied)
    assert [(b.name, b.alias_of) for b in outcome.bare] == [("b", "a")]
    assert [w[1] for w in written(outcome)] == ["a"]
    outcome = plan(tied, [held("a", (2,)), held("b", (2,))])
    assert outcome.bare == ()
    assert sorted(w[1] for w in written(outcome)) == ["a", "b"]


def test_empty_and_scalar_tensors() -> None:
    outcome = plan([held("e", (0, 3)), held("s", ())])
    assert [(b.name, b.shape) for b in outcome.bare] == [("e", (0, 3))]
    assert written(outcome) == [(0, "s", (), ())]


def test_boxes() -> None:
    a, b = Box((0, 2), (4, 4)), Box((2, 0), (4, 4))
    assert intersect(a, b) == Box((2, 2), (2, 2))
    assert intersect(a, Box((4, 0), (1, 1))) is None
    assert intersect(Box((), ()), Box((), ())) == Box((), ())
    assert byte_range(Box((2, 0), (2, 3)), Box((1, 0), (4, 3)), 4) == (12, 36)
    assert byte_range(Box((2, 0), (2, 2)), Box((1, 0), (4, 3)), 4) is None
    assert byte_range(Box((2, 1), (1, 2)), Box((1, 0), (4, 3)), 4) == (16, 24)
    assert byte_range(Box((), ()), Box((), ()), 8) == (0, 8)


def test_split_cuts_runs_of_bytes() -> None:
    assert split(Box((0, 0), (4, 4)), 1, 8) == [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]
    assert split(Box((1, 0), (1, 6)), 1, 4) == [Box((1, 0), (1, 4)), Box((1, 4), (1, 2))]
    assert split(Box((), ()), 8, 1) == [Box((), ())]
    assert split(Box((0, 0), (0, 4)), 1, 8) == []


def test_tiling() -> None:
    assert tiling_fault((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]) is None
    assert tiling_fault((4, 4), [Box((0, 0), (2, 4)), Box((2, 0), (2, 2)), Box((2, 2), (2, 2))]) is None
    assert tiling_fault((0,), []) is None
    assert "outside" in (tiling_fault((4,), [Box((0,), (5,))]) or "")


def test_shards_of_a_mesh() -> None:
    row = [Placement(0)]
    assert [shard((5, 3), (4,), (i,), row) for i in range(4)] == [
        Box((0, 0), (2, 3)),
        Box((2, 0), (2, 3)),
        Box((4, 0), (1, 3)),
        Box((5, 0), (0, 3)),
    ]
    assert shard((4, 4), (2, 2), (1, 0), [Placement(0), Placement(1)]) == Box((2, 0), (2, 2))
    assert shard((8,), (2, 2), (1, 0), [Placement(0), Placement(0)]) == Box((4,), (2,))
    # Two cuts of one axis from right to left, as data parallelism over tensor parallelism makes them.
    assert shard((8,), (2, 2), (1, 0), [Placement(0, 2), Placement(0)]) == Box((2,), (2,))
    assert shard((8,), (2,), (0,), [Placement(0, 2)]) is None
    assert shard((), (2,), (0,), [Placement(None)]) == Box((), ())


def test_spread_prefers_nobody_and_keeps_runs_together() -> None:
    assert spread([4, 4, 4, 4], [(0, 1)] * 4, 2) == [0, 0, 1, 1]
    assert spread([8, 4, 4], [(0,), (0, 1), (0, 1)], 2) == [0, 1, 1]
    assert spread([], [], 2) == []


def test_labels() -> None:
    assert label("w", (4,), [Box((0,), (4,))], ()) == "w"
    assert label("w", (4,), [Box((0,), (4,))], (3, 4)) == "w#rank3"
    assert label("w", (4,), [Box((0,), (1,)), Box((1,), (1,))], ()) == "w#[0:2]"
    odd = [Box((0, 2), (1, 2)), Box((1, 0), (1, 2))]
    assert union(odd) is None
    assert label("w", (4, 4), odd, ()) == "w#[0:1,2:4]-[1:2,0:2]"


def piece(name: str, size: int, dtype: str = "uint8") -> Piece:
    elements = size // (4 if dtype == "float32" else 1)
    return Piece(name, name, dtype, (elements,), 0, (PlannedChunk((0,), (elements,), size, "0" * 32),))


def test_segments_are_cut_by_size_and_ordered_by_alignment() -> None:
    pieces = [piece("a", 6), piece("b", 8, "float32"), piece("c", 6), piece("d", 100), piece("e", 1)]
    cut = list(cut_segments(pieces, 20))
    assert [[p.name for p in segment] for segment in cut] == [["b", "a", "c"], ["d"], ["e"]]
    assert all(start % 4 == 0 for start in segment_layout(cut[0], 1).starts[:1])


def test_ranks_in_words() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([5, 0, 1, 2]) == "ranks 0-2,5"
