"""Brings a step, or part of one, from one store into another: every byte verified on the way, committed at the end.

The copy is a store of the same layout: a generation of its own that starts from nothing, and one step. Segments are
written anew with the chunks that are wanted; tensors and digests stay what they were. Needs neither torch nor ranks,
and memory for a few chunks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import CheckpointConflict, CheckpointDamaged, CheckpointMismatch, ConfigError, NotFound
from cachefs.hashing import tensor_digest
from cachefs.objstore.url import parse_url

from .boxes import Box
from .catalog import Catalog, Stored, StoredChunk, read_catalog
from .choose import named_or_newest
from .claims import claim_generation
from .commit import begin_step
from .layout import GENERATIONS, TEMP_PREFIX, StepRef, part_name, segment_name
from .manifest import Root, encode_part, part_ref
from .parallel import run_bounded
from .records import Bare, Piece, PlannedChunk
from .segments import SEGMENT_BYTES, cut_segments, label, node_part, segment_layout
from .storage import Storage, open_storage
from .structure import NOTHING, Selector, children, prune, tensor_names

if TYPE_CHECKING:
    from typing_extensions import Buffer

PARALLEL = 4
"""Chunks that are read ahead."""


class Copied(NamedTuple):
    """What a copy brought: the step as the new store has it, its tensors, and their bytes."""

    ref: StepRef
    tensors: int
    nbytes: int


class Selection(NamedTuple):
    """The part of a step that is wanted."""

    structure: Any
    pieces: tuple[Piece, ...]
    bare: tuple[Bare, ...]
    sources: dict[tuple[str, tuple[int, ...]], tuple[StoredChunk, ...]]
    """Where a piece's bytes are: by name and owners, in the order of all its pieces' chunks."""

    @property
    def nbytes(self) -> int:
        return sum(piece.size for piece in self.pieces)

    @property
    def tensors(self) -> int:
        return len({p.name for p in self.pieces} | {b.name for b in self.bare})


def open_target(path: str | os.PathLike[str]) -> Storage:
    """The folder that a copy goes to. It must be new or empty, or hold nothing but what a copy left unfinished.

    Raises :class:`ConfigError` for a URL that is no local path, :class:`CheckpointConflict` for a folder in use.
    """
    parsed = parse_url(path)
    if not parsed.is_local:
        raise ConfigError("a step is restored into a local folder", url=str(parsed))
    if os.path.exists(parsed.key) and not os.path.isdir(parsed.key):
        raise CheckpointConflict("is a file, not a folder", url=parsed.key)
    entries = os.listdir(parsed.key) if os.path.isdir(parsed.key) else []
    foreign = sorted(e for e in entries if e != GENERATIONS and not e.startswith(TEMP_PREFIX))
    if foreign:
        raise CheckpointConflict(
            f"is not empty (there is {foreign[0]!r}), and nothing is overwritten",
            url=parsed.key,
            hint="name a new folder",
        )
    return open_storage(parsed.key)


def select(catalog: Catalog, selected: Selector) -> Selection:
    """What is to be copied. Pure. Raises :class:`CheckpointMismatch` if nothing is selected."""
    structure = prune(catalog.structure, selected)
    if structure is NOTHING:
        there = ", ".join(child.name for child in children(catalog.structure, "") or ())
        raise CheckpointMismatch(
            f"--only {selected.patterns} names nothing in {catalog.ref}", hint=f"there are {there}"
        )
    pieces: list[Piece] = []
    bare: list[Bare] = []
    sources: dict[tuple[str, tuple[int, ...]], tuple[StoredChunk, ...]] = {}
    promoted: dict[str, str] = {}
    names = list(dict.fromkeys(tensor_names(structure)))
    for name in names:
        for stored, owners in _by_value(catalog, name):
            target = stored.alias_of
            if target is not None and target not in names:
                if target in promoted:
                    target = promoted[target]
                else:  # the tensor that this one is tied to stays behind, so this one gets the bytes
                    promoted[target] = name
                    stored, target = catalog.find(name, 0), None
            if target is not None or not stored.chunks:
                bare.append(Bare(name, stored.dtype, stored.shape, target, owners))
                continue
            chunks = tuple(sorted(stored.chunks, key=lambda c: (c.file, c.start)))
            sources[name, owners] = chunks
            pieces.extend(_pieces(stored, chunks, owners))
    return Selection(structure, tuple(pieces), tuple(bare), sources)


def copy_step(
    source: Storage,
    catalog: Catalog,
    selection: Selection,
    target: Storage,
    *,
    on_bytes: Callable[[int], None] = lambda count: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Copied:
    """Copy into ``target``, and commit there once everything has been read and found right.

    Raises :class:`CheckpointDamaged` that names tensor, file and byte; then ``target`` has no new step.
    """
    ref = catalog.ref
    attempt = f"copy_{secrets.token_hex(8)}"
    claim = claim_generation(target, attempt, start="nothing", clock=clock)
    writer = begin_step(target, ref.step, claim.generation, attempt, clock=clock)
    try:
        segments = list(cut_segments(selection.pieces, SEGMENT_BYTES))
        for number, pieces in enumerate(segments):
            writer.write(segment_name(attempt, 0, number), _content(source, pieces, selection, ref, on_bytes))
        part = node_part(attempt, 0, ref.step, {0: segments}, selection.bare, {"state": selection.structure})
        file, data = part_name(attempt, 0), encode_part(part)
        writer.write(file, [data])
        root = Root(
            step=ref.step,
            generation=claim.generation,
            attempt=attempt,
            world_size=catalog.root.world_size,
            created=clock.time(),
            parts=(part_ref(file, data),),
            metadata={
                **catalog.root.metadata,
                "bytes": sum(f.size for f in part.files),
                "tensors": selection.tensors,
            },
        )
        writer.commit(root, part.files)
    except BaseException:
        writer.abort(manifest_sent=writer.manifest_sent)
        raise
    return Copied(writer.ref, selection.tensors, selection.nbytes)


def restore(
    source: Storage,
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    only: Iterable[str] | None = None,
    bar: Callable[[int], Any],
) -> Copied:
    """Copy one step of ``source`` into a local folder. ``bar(total)`` gives a context with a function to advance."""
    with open_target(path) as target:
        catalog = read_catalog(source, named_or_newest(source, step))
        selection = select(catalog, Selector(only))
        with bar(selection.nbytes) as advance:
            return copy_step(source, catalog, selection, target, on_bytes=advance)


def _content(
    source: Storage,
    pieces: tuple[Piece, ...],
    selection: Selection,
    ref: StepRef,
    on_bytes: Callable[[int], None],
) -> Iterator[Buffer]:
    """A segment's bytes: the header, then each chunk, read ahead and verified."""
    yield segment_layout(pieces, ref.step).header
    wanted = [
        (piece.name, chunk)
        for piece in pieces
        for chunk in selection.sources[piece.name, piece.ranks][piece.first : piece.first + len(piece.chunks)]
    ]
    for data in run_bounded(lambda item: _read(source, *item), wanted, workers=PARALLEL):
        yield data
        on_bytes(memoryview(data).nbytes)


def _read(source: Storage, name: str, chunk: StoredChunk) -> Buffer:
    try:
        data = source.read_range(chunk.file, chunk.start, chunk.end)
    except NotFound as e:
        raise CheckpointDamaged(f"the segment of tensor {name!r} is missing", url=source.describe(chunk.file)) from e
    if tensor_digest(data) != chunk.digest:
        raise CheckpointDamaged(
            f"the digest of tensor {name!r} is wrong", url=source.describe(chunk.file), offset=chunk.start
        )
    return data


def _by_value(catalog: Catalog, name: str) -> list[tuple[Stored, tuple[int, ...]]]:
    """A tensor's values and the ranks that own each (nobody in particular: none)."""
    values: dict[tuple[StoredChunk, ...] | None, tuple[Stored, tuple[int, ...]]] = {}
    for owner, stored in catalog.tensors.get(name, {}).items():
        owners = (owner,) if owner is not None else ()
        known = values.get(stored.chunks)
        values[stored.chunks] = (stored, known[1] + owners) if known else (stored, owners)
    return list(values.values())


def _pieces(stored: Stored, chunks: tuple[StoredChunk, ...], owners: tuple[int, ...]) -> Iterator[Piece]:
    """One piece for each run of chunks that lie side by side in the source."""
    run: list[StoredChunk] = []
    first = 0
    for number, chunk in enumerate(chunks):
        if run and (run[-1].file, run[-1].end) != (chunk.file, chunk.start):
            yield _piece(stored, run, first, owners)
            run, first = [], number
        run.append(chunk)
    if run:
        yield _piece(stored, run, first, owners)


def _piece(stored: Stored, run: list[StoredChunk], first: int, owners: tuple[int, ...]) -> Piece:
    boxes: list[Box] = [chunk.box for chunk in run]
    return Piece(
        name=stored.name,
        label=label(stored.name, stored.shape, boxes, owners),
        dtype=stored.dtype,
        shape=stored.shape,
        first=first,
        chunks=tuple(PlannedChunk(c.box.offsets, c.box.shape, c.end - c.start, c.digest) for c in run),
        ranks=owners,
    )
