"""Which bytes of which segments fill which regions. Pure.

Whole chunks are read, because a digest covers a whole chunk. A chunk that several regions need is read once; small
neighbours in a file are read together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cachefs.errors import CheckpointDamaged

from .boxes import Box, intersect
from .catalog import Stored, StoredChunk

COALESCE_BYTES = 4 << 20
"""Chunks smaller than this are read together up to about this many bytes; larger ones are worth a request each."""


class Use(NamedTuple):
    """``region`` (in global coordinates) of a chunk goes to the target with this number."""

    target: int
    region: Box


class ChunkRead(NamedTuple):
    """A chunk and everything it is needed for; ``name`` for messages."""

    name: str
    dtype: str
    chunk: StoredChunk
    uses: tuple[Use, ...]


class Group(NamedTuple):
    """Chunks that lie one after the other in a file and are read in one go."""

    file: str
    start: int
    end: int
    reads: tuple[ChunkRead, ...]


def plan_reads(wants: Sequence[tuple[Stored, Box]], *, coalesce: int = COALESCE_BYTES) -> list[Group]:
    """Plan how to fill target ``i`` with the box ``wants[i][1]`` of the tensor ``wants[i][0]``.

    Raises :class:`CheckpointDamaged` where the chunks do not cover a box once.
    """
    chunks: dict[tuple[str, int, int], tuple[str, str, StoredChunk, list[Use]]] = {}
    for target, (stored, box) in enumerate(wants):
        filled = 0
        for chunk in stored.chunks:
            region = intersect(chunk.box, box)
            if region is None:
                continue
            filled += region.volume
            key = (chunk.file, chunk.start, chunk.end)
            chunks.setdefault(key, (stored.name, stored.dtype, chunk, []))[3].append(Use(target, region))
        if filled != box.volume:
            raise CheckpointDamaged(
                f"tensor {stored.name!r}: its chunks hold {filled} of the {box.volume} elements asked for"
            )
    reads = [ChunkRead(name, dtype, chunk, tuple(uses)) for _, (name, dtype, chunk, uses) in sorted(chunks.items())]
    return list(_grouped(reads, coalesce))


def _grouped(reads: Sequence[ChunkRead], coalesce: int) -> Iterator[Group]:
    open_: list[ChunkRead] = []
    for read in reads:
        chunk = read.chunk
        if open_:
            first, last = open_[0].chunk, open_[-1].chunk
            joined = chunk.file == last.file and chunk.start == last.end and chunk.end - first.start <= coalesce
            if not joined:
                yield _group(open_)
                open_ = []
        open_.append(read)
    if open_:
        yield _group(open_)


def _group(reads: list[ChunkRead]) -> Group:
    return Group(reads[0].chunk.file, reads[0].chunk.start, reads[-1].chunk.end, tuple(reads))
