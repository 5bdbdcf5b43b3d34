"""The coordinator's decisions in a save. Pure: what all ranks report goes in, everybody's orders come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from cachefs.errors import CheckpointMismatch

from .layout import part_name
from .manifest import FileRef, PartRef, encode_part, part_ref
from .plan import PER_RANK_HINT, conflict_text, plan_save, shortened
from .records import Go, Orders, Report, SavePlan
from .segments import node_part
from .structure import merge


@dataclass(frozen=True)
class Directed:
    """The coordinator's decisions: the name of the save, each rank's orders, and what the commit record will list."""

    go: Go
    orders: tuple[Orders, ...]
    parts: tuple[PartRef, ...]
    files: tuple[FileRef, ...]
    tensors: int


def direct(
    reports: Sequence[Report],
    go: Go,
    *,
    step: int,
    may_differ: Callable[[str], bool],
    chunk_bytes: int,
    segment_bytes: int,
) -> Directed:
    """From all ranks' reports to everybody's orders for the save ``go``.

    Raises :class:`CheckpointMismatch` that names tensors, values and ranks; see :func:`.plan.plan_save`.
    """
    own = tuple({name for report in reports for name in report.own})

    below = tuple(f"{name}/" for name in own)

    def allowed(name: str) -> bool:
        return may_differ(name) or name in own or name.startswith(below)

    structure = joined_structure(reports, allowed)
    plan = plan_save(reports, chunk_bytes=chunk_bytes, segment_bytes=segment_bytes, per_rank=allowed)
    nodes: dict[str, list[int]] = {}
    for report in reports:
        nodes.setdefault(report.node, []).append(report.rank)
    orders = [Orders(segments) for segments in plan.segments]
    parts: list[PartRef] = []
    files: list[FileRef] = []
    for number, ranks in enumerate(nodes.values()):
        part = node_part(
            go.attempt,
            number,
            step,
            {rank: plan.segments[rank] for rank in ranks},
            plan.bare if number == 0 else (),
            {"state": msgspec.Raw(structure)} if number == 0 else None,
        )
        file, content = part_name(go.attempt, number), encode_part(part)
        parts.append(part_ref(file, content))
        files.extend(part.files)
        orders[ranks[0]] = Orders(plan.segments[ranks[0]], (file, content))
    return Directed(go, tuple(orders), tuple(parts), tuple(files), _count(plan))


def joined_structure(reports: Sequence[Report], may_differ: Callable[[str], bool]) -> bytes:
    """The structures of all ranks as one. Raises :class:`CheckpointMismatch` where values differ without leave."""
    groups: dict[bytes, tuple[int, ...]] = {}
    for report in reports:
        groups[report.structure] = (*groups.get(report.structure, ()), report.rank)
    if len(groups) == 1:
        return reports[0].structure
    merged = merge([(ranks, msgspec.json.decode(text)) for text, ranks in groups.items()], may_differ)
    if merged.conflicts:
        raise CheckpointMismatch(shortened([conflict_text(c) for c in merged.conflicts]), hint=PER_RANK_HINT)
    return msgspec.json.encode(merged.node)


def _count(plan: SavePlan) -> int:
    return len({p.name for rank in plan.segments for s in rank for p in s} | {b.name for b in plan.bare})
