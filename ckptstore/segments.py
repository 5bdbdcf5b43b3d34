"""From pieces to files: names, order and byte places of what a rank writes. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .boxes import Box, span
from .dtypes import itemsize
from .layout import segment_name
from .manifest import Chunk, FileRef, Part, TensorEntry
from .records import Bare, Piece
from .safetensors import Layout, Slot, layout

CHUNK_BYTES = 32 << 20
"""Most bytes under one digest. A load reads whole chunks, so this bounds what a small region costs."""

SEGMENT_BYTES = 1 << 30
"""A segment takes tensors until it has this many bytes; one larger tensor is a segment of its own."""

SEGMENT_PIECES = 1 << 16
"""Nor does a segment take more than this many, so that its header stays within what readers accept."""


def label(name: str, shape: Sequence[int], boxes: Sequence[Box], ranks: Sequence[int]) -> str:
    """A piece's name in a safetensors file: the tensor's own where it is all there.

    Else ``#rank<r>`` (the first rank whose value it is) and ``#[0:2,0:8]`` follow, where a run of chunks that is no
    box names its first and last: ``#[0:1,0:4]-[1:2,0:2]``. Leaf names (see :mod:`.tree`) have ``#`` at the start of a
    component only and never before ``[`` or ``r``, so labels do not collide.
    """
    text = f"{name}#rank{ranks[0]}" if ranks else name
    if sum(b.volume for b in boxes) == math.prod(shape):
        return text
    whole = union(boxes)
    return f"{text}#{span(whole)}" if whole else f"{text}#{span(boxes[0])}-{span(boxes[-1])}"


def union(boxes: Sequence[Box]) -> Box | None:
    """The box that a run of disjoint boxes fills, if it is one."""
    axes = range(len(boxes[0].shape))
    low = tuple(min(b.offsets[d] for b in boxes) for d in axes)
    high = tuple(max(b.offsets[d] + b.shape[d] for b in boxes) for d in axes)
    whole = Box(low, tuple(h - o for o, h in zip(low, high, strict=True)))
    return whole if whole.volume == sum(b.volume for b in boxes) else None


def cut_segments(pieces: Iterable[Piece], limit: int) -> Iterable[tuple[Piece, ...]]:
    """Deal a rank's pieces into files, each ordered by element size so that all data is aligned."""
    gathered: list[Piece] = []
    size = 0
    for piece in pieces:
        if gathered and (size + piece.size > limit or len(gathered) == SEGMENT_PIECES):
            yield _aligned(gathered)
            gathered, size = [], 0
        gathered.append(piece)
        size += piece.size
    if gathered:
        yield _aligned(gathered)


def _aligned(pieces: list[Piece]) -> tuple[Piece, ...]:
    return tuple(sorted(pieces, key=lambda piece: -itemsize(piece.dtype)))


def segment_layout(pieces: Sequence[Piece], step: int) -> Layout:
    """Header and byte places of one segment, the same wherever it is computed."""
    return layout([Slot(p.label, p.dtype, _shape(p)) for p in pieces], {"format": "pt", "step": step})


def _shape(piece: Piece) -> tuple[int, ...]:
    whole = union([Box(c.offsets, c.shape) for c in piece.chunks])
    return whole.shape if whole else (sum(math.prod(c.shape) for c in piece.chunks),)


def node_part(
    attempt: str,
    node: int,
    step: int,
    written: Mapping[int, Sequence[Sequence[Piece]]],
    bare: Sequence[Bare] = (),
    objects: object = None,
) -> Part:
    """The part of a node whose ranks write these segments (``written``: rank to its segments)."""
    entries: dict[tuple[str, int | None], tuple[Piece | Bare, list[Chunk]]] = {}
    files: list[FileRef] = []
    for rank, segments in written.items():
        for number, pieces in enumerate(segments):
            file = segment_name(attempt, rank, number)
            places = segment_layout(pieces, step)
            files.append(FileRef(file, places.size))
            for piece, start in zip(pieces, places.starts, strict=True):
                chunks = _chunks(piece, file, start)
                for owner in piece.ranks or (None,):
                    entries.setdefault((piece.name, owner), (piece, []))[1].extend(chunks)
    for tensor in bare:
        for owner in tensor.ranks or (None,):
            entries[tensor.name, owner] = (tensor, [])
    return Part(
        attempt=attempt,
        node=node,
        tensors=tuple(
            TensorEntry(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                chunks=tuple(chunks),
                alias_of=tensor.alias_of if isinstance(tensor, Bare) else None,
                per_rank=owner,
            )
            for (name, owner), (tensor, chunks) in entries.items()
        ),
        files=tuple(files),
        objects=objects,
    )


def _chunks(piece: Piece, file: str, start: int) -> list[Chunk]:
    chunks = []
    for chunk in piece.chunks:
        chunks.append(Chunk(chunk.offsets, chunk.shape, file, start, start + chunk.size, chunk.digest))
        start += chunk.size
    return chunks
