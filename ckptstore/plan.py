"""Who writes what: the decisions of a save. Pure functions of what the ranks report; no tensors, no I/O.

Each rank reports the boxes it holds with a digest per chunk (:class:`.records.Report`). The coordinator finds out
which ranks hold the same bytes, refuses what differs without leave, checks that every sharded tensor is there once and
whole, and deals the distinct chunks to the ranks so that all write about equally much (:func:`plan_save`). A rank is
given chunks that it holds only, so no tensor moves between ranks.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from cachefs.errors import CheckpointMismatch

from .boxes import Box, span, split, tiling_fault
from .dtypes import itemsize
from .records import Bare, Held, Piece, PlannedChunk, Report, SavePlan, ranks_text
from .segments import CHUNK_BYTES, SEGMENT_BYTES, cut_segments, label
from .structure import Conflict

PER_RANK_HINT = "make them equal, or keep each rank's own: per_rank=True, or per_rank=[names]"


Group = tuple[tuple[int, ...], list[tuple[int, Held]]]
"""Whose value it is (empty: everybody's), and which ranks hold what of it."""


class _Share(Struct, gc=False):
    """One chunk that must be written, and who could."""

    held: Held
    index: int
    box: Box
    size: int
    candidates: tuple[int, ...]
    ranks: tuple[int, ...]


def plan_save(
    reports: Sequence[Report],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    segment_bytes: int = SEGMENT_BYTES,
    per_rank: Callable[[str], bool] = lambda name: False,
) -> SavePlan:
    """Decide what each rank writes. ``reports`` are those of ranks 0 … N−1 in order.

    ``per_rank(name)`` tells whether ranks may keep different values under a name. Raises
    :class:`CheckpointMismatch` that names tensors and ranks where they differ without that leave, or where the boxes
    of a sharded tensor overlap in part or leave something out.
    """
    holders: dict[str, list[tuple[int, Held]]] = defaultdict(list)
    for report in reports:
        for held in report.tensors:
            holders[held.name].append((report.rank, held))
    shares: list[_Share] = []
    bare: list[Bare] = []
    faults: list[str] = []
    groups_of: dict[str, list[Group]] = {}
    for name, holding in holders.items():
        groups, fault = _groups(name, holding, per_rank(name))
        groups_of[name] = groups
        if fault:
            faults.append(fault)
    if faults:
        raise CheckpointMismatch(shortened(faults), hint=PER_RANK_HINT)
    for name, groups in groups_of.items():
        alias = _common_alias(name, groups_of)
        for ranks, holding in groups:
            held = holding[0][1]
            if alias is not None or math.prod(held.shape) == 0:
                bare.append(Bare(name, held.dtype, held.shape, alias, ranks))
            else:
                shares.extend(_shares(holding, ranks, chunk_bytes))
    writers = spread([s.size for s in shares], [s.candidates for s in shares], len(reports))
    return SavePlan(
        segments=tuple(
            tuple(cut_segments(_pieces(s for s, w in zip(shares, writers, strict=True) if w == rank), segment_bytes))
            for rank in range(len(reports))
        ),
        bare=tuple(bare),
    )


def spread(sizes: Sequence[int], candidates: Sequence[tuple[int, ...]], world: int) -> list[int]:
    """Choose a writer for each item among its candidates so that the ranks' sums of bytes come out level.

    Items with the same candidates go to them in runs, in order: what belongs together stays together. Items that only
    one rank can write count first, then the others by number of candidates, each group filled up to a common level
    ("water filling"), so where all candidate sets are one rank or all ranks no rank exceeds the unavoidable level by
    more than one item.
    """
    load = [0] * world
    result = [0] * len(sizes)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, ranks in enumerate(candidates):
        groups[ranks].append(i)
    for ranks, items in sorted(groups.items(), key=lambda g: (len(g[0]), g[0])):
        quota = _levels([load[r] for r in ranks], sum(sizes[i] for i in items))
        place, room = 0, quota[0]
        for i in items:
            while place < len(ranks) - 1 and room < sizes[i] / 2:
                place += 1
                room += quota[place]
            result[i] = ranks[place]
            load[ranks[place]] += sizes[i]
            room -= sizes[i]
    return result


def _levels(loads: Sequence[int], amount: int) -> list[float]:
    """How much of ``amount`` each gets if it is poured over them like water."""
    ordered = sorted(loads)
    level = float(ordered[0])
    rest = float(amount)
    for k in range(1, len(ordered) + 1):
        top = ordered[k] if k < len(ordered) else math.inf
        step = min(rest, (top - level) * k)
        level += step / k
        rest -= step
        if rest <= 0:
            break
    return [max(0.0, level - load) for load in loads]


def _groups(name: str, holding: list[tuple[int, Held]], may_differ: bool) -> tuple[list[Group], str | None]:
    """Holders of one name, one group for each value that is kept; or what is wrong with them."""
    contents: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, held in holding:
        contents[held.content].append(rank)
    if len(contents) == 1 and holding[0][1].whole:
        return [((), holding)], None
    first = holding[0][1]
    own = may_differ or any(held.rule == "own" for _, held in holding)
    if own and all(held.whole for _, held in holding):
        return [
            (tuple(ranks), [(r, h) for r, h in holding if h.content == content]) for content, ranks in contents.items()
        ], None
    kinds = {(h.dtype, h.shape) for _, h in holding}
    if len(kinds) > 1:
        seen = {(h.dtype, h.shape): r for r, h in reversed(holding)}
        shown = ", ".join(f"rank {r} has {d} {list(s)}" for (d, s), r in sorted(seen.items(), key=lambda x: x[1]))
        return [], f"{name!r} is not the same tensor on all ranks: {shown}"
    boxes: dict[Box, list[tuple[int, Held]]] = defaultdict(list)
    for rank, held in holding:
        boxes[held.box].append((rank, held))
    kept: list[tuple[int, Held]] = []
    for box, same in boxes.items():
        if all(held.rule == "first" for _, held in same):
            same = [(r, h) for r, h in same if h.digests == same[0][1].digests]
        elif len({held.digests for _, held in same}) > 1:
            return [], _difference(name, box, same)
        kept.extend(same)
    fault = tiling_fault(first.shape, list(boxes))
    return [((), kept)], f"{name!r}: {fault}" if fault else None


def _difference(name: str, box: Box, same: list[tuple[int, Held]]) -> str:
    values: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for rank, held in same:
        values[held.digests].append(rank)
    where = name if same[0][1].whole else f"{name}{span(box)}"
    return conflict_text((where, [tuple(ranks) for ranks in values.values()]))


def _common_alias(name: str, groups_of: dict[str, list[Group]]) -> str | None:
    """The tensor that ``name`` is tied to on every rank that holds it, if there is one and both are shared by all."""
    groups = groups_of[name]
    targets = {held.alias_of for _, holding in groups for _, held in holding}
    target = targets.pop() if len(targets) == 1 else None
    if target is None or len(groups) != 1 or len(groups_of[target]) != 1:
        return None
    ranks, target_ranks = ({r for r, _ in groups_of[n][0][1]} for n in (name, target))
    return target if ranks == target_ranks else None


def _shares(holding: list[tuple[int, Held]], ranks: tuple[int, ...], chunk_bytes: int) -> Iterable[_Share]:
    boxes: dict[Box, list[int]] = defaultdict(list)
    example: dict[Box, Held] = {}
    for rank, held in holding:
        boxes[held.box].append(rank)
        example[held.box] = held
    for box, candidates in boxes.items():
        held = example[box]
        size = itemsize(held.dtype)
        for i, part in enumerate(split(box, size, chunk_bytes)):
            yield _Share(held, i, part, part.volume * size, tuple(candidates), ranks)


def _pieces(shares: Iterable[_Share]) -> list[Piece]:
    """Chunks of one rank, in order, joined to runs."""
    runs: list[list[_Share]] = []
    for share in shares:
        last = runs[-1][-1] if runs else None
        if last is not None and last.held is share.held and last.index + 1 == share.index and last.ranks == share.ranks:
            runs[-1].append(share)
        else:
            runs.append([share])
    return [_piece(run) for run in runs]


def _piece(run: list[_Share]) -> Piece:
    held, ranks = run[0].held, run[0].ranks
    return Piece(
        name=held.name,
        label=label(held.name, held.shape, [s.box for s in run], ranks),
        dtype=held.dtype,
        shape=held.shape,
        first=run[0].index,
        chunks=tuple(PlannedChunk(s.box.offsets, s.box.shape, s.size, held.digests[s.index]) for s in run),
        ranks=ranks,
    )


def shortened(faults: Sequence[str], most: int = 4) -> str:
    """Several faults in one line."""
    rest = f"; and {len(faults) - most} more" if len(faults) > most else ""
    return "; ".join(faults[:most]) + rest


def conflict_text(conflict: Conflict, most: int = 4) -> str:
    """A value that differs between ranks, in words."""
    name, groups = conflict
    sides = [ranks_text(ranks) for ranks in groups]
    sides[most:] = [f"{len(sides) - most} more"] if len(sides) > most else []
    return f"{name!r} differs between {', '.join(sides[:-1])} and {sides[-1]}"
