"""The records of a checkpoint store: JSON by msgspec, no pickle, readable by any other tool.

A checkpoint is one small :class:`Root` (``manifest.json``, the commit record) that names one :class:`Part` per node
with its size and digest; a part names tensors, their chunks, and the segments that hold them with their sizes. So a
root decides over everything below it, and 10^5 chunks open in one pass of a C decoder per part.

**Seal.** Root, tombstone, claim and start record begin with ``{"digest":"<32 hex>",``: the xxh3-128 of all bytes of
the file that follow that comma. A part needs none, its digest stands in the root.

**Versions.** ``format`` is :data:`FORMAT` of the writer. A record with a higher number raises
:class:`CheckpointUnsupported` and is never taken for a damaged or absent one. Unknown fields are ignored: a change
that old readers may ignore adds a field, any other raises :data:`FORMAT`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from cachefs.errors import CheckpointDamaged, CheckpointUnsupported
from cachefs.hashing import tensor_digest

from .layout import StepRef, attempt_token, is_segment, parse_part, resolve

if TYPE_CHECKING:
    from typing_extensions import Buffer

FORMAT = 1
"""Version of everything in this module."""

Count = Annotated[int, Meta(ge=0)]
Digest = Annotated[str, Meta(min_length=32, max_length=32)]
"""xxh3-128 as 32 hexadecimal digits (``cachefs.hashing.tensor_digest``)."""

_SEAL = b'{"digest":"'
_SEAL_END = len(_SEAL) + 32 + 2


class PartRef(Struct, frozen=True, gc=False):
    """A part as the root names it: its file name in the step's folder, its bytes, and their digest."""

    file: str
    size: Count
    digest: Digest


class FileRef(Struct, frozen=True, gc=False):
    """A segment and its size in bytes. ``name`` as :func:`.layout.resolve` reads it: in the step's own folder, or
    ``<step folder>/<segment>`` for one that an earlier step wrote."""

    name: str
    size: Count


class Chunk(Struct, frozen=True, gc=False):
    """A box of a tensor in C order: elements ``[offsets, offsets + shape)`` are bytes ``[start, end)`` of ``file``.

    ``file`` is the ``name`` of one of the part's :attr:`Part.files`. A 0-dimensional tensor has empty tuples.
    """

    offsets: tuple[Count, ...]
    shape: tuple[Count, ...]
    file: str
    start: Count
    end: Count
    digest: Digest


class TensorEntry(Struct, frozen=True, gc=False):
    """One tensor, or the share of it that this node wrote: the chunks of all parts together cover ``shape`` once.

    ``alias_of`` names the tensor whose bytes this one shares (tied weights); such an entry has no chunks.
    ``per_rank`` is the rank whose own value this is, where ranks keep different ones under one name.
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...] = ()
    alias_of: str | None = None
    per_rank: Count | None = None


class Part(Struct, frozen=True, kw_only=True, tag_field="kind", tag="part"):
    """What one node wrote of a checkpoint. ``objects`` is any JSON: the structure and values that are no tensors."""

    format: int = FORMAT
    attempt: str
    node: Count
    tensors: tuple[TensorEntry, ...] = ()
    files: tuple[FileRef, ...] = ()
    objects: Any = None


class Root(Struct, frozen=True, kw_only=True, tag_field="kind", tag="checkpoint"):
    """The commit record. ``created`` is the coordinator's wall clock (s), for people; nothing is decided by it."""

    format: int = FORMAT
    step: Count
    generation: Annotated[int, Meta(ge=1)]
    attempt: str
    world_size: Annotated[int, Meta(ge=1)]
    created: float
    parts: tuple[PartRef, ...]
    metadata: dict[str, Any] = {}

    @property
    def ref(self) -> StepRef:
        return StepRef(self.step, self.generation)


class Tombstone(Struct, frozen=True, kw_only=True, tag_field="kind", tag="tombstone"):
    """Stands where a manifest was or might still arrive: this step is no checkpoint and never becomes one."""

    format: int = FORMAT
    step: Count
    generation: Annotated[int, Meta(ge=1)]
    attempt: str
    created: float
    reason: str


class ClaimRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="claim"):
    """``generations/N.json``: which attempt owns generation N."""

    format: int = FORMAT
    generation: Annotated[int, Meta(ge=1)]
    attempt: str
    created: float


class StartRecord(Struct, frozen=True, kw_only=True, tag_field="kind", tag="start"):
    """``generations/N.start.json``: the checkpoint that generation N resumes from; both ``None``: from nothing.

    ``parent`` is the generation that committed ``step``, and older than this one.
    """

    format: int = FORMAT
    generation: Annotated[int, Meta(ge=1)]
    attempt: str
    parent: Annotated[int, Meta(ge=1)] | None = None
    step: Count | None = None

    @property
    def ref(self) -> StepRef | None:
        return None if self.parent is None or self.step is None else StepRef(self.step, self.parent)


class _Header(Struct):
    format: int
    kind: str


Sealed = Root | Tombstone | ClaimRecord | StartRecord


def encode_part(part: Part) -> bytes:
    """The bytes of a part's file. Raises :class:`CheckpointDamaged` if the part contradicts itself."""
    check_part(part, url=f"part of node {part.node}")
    return msgspec.json.encode(part)


def part_ref(file: str, data: Buffer) -> PartRef:
    """How a root names a part with these bytes."""
    return PartRef(file=file, size=memoryview(data).nbytes, digest=tensor_digest(data))


def decode_part(data: Buffer, ref: PartRef, *, url: str) -> Part:
    """The part that ``ref`` names. ``url`` is for messages.

    Raises :class:`CheckpointDamaged` if size, digest or content are not as they must be.
    """
    size = memoryview(data).nbytes
    if size != ref.size:
        raise CheckpointDamaged(f"the part has {size} bytes instead of {ref.size}", url=url)
    if tensor_digest(data) != ref.digest:
        raise CheckpointDamaged("the part's digest is wrong", url=url)
    part: Part = _decode(data, Part, url)
    check_part(part, url=url)
    return part


def encode_sealed(record: Sealed) -> bytes:
    """The bytes of a root, tombstone, claim or start record, with its seal."""
    body = msgspec.json.encode(record)[1:]
    return b'%b%b",%b' % (_SEAL, tensor_digest(body).encode(), body)


def decode_root(data: Buffer, ref: StepRef, *, url: str) -> Root | Tombstone:
    """What stands under the manifest's name of ``ref``.

    Raises :class:`CheckpointDamaged` if it is not whole or is of another step, :class:`CheckpointUnsupported` if a
    newer version wrote it.
    """
    root: Root | Tombstone = _decode(_unseal(data, url), Root | Tombstone, url)
    if (root.step, root.generation) != (ref.step, ref.generation):
        raise CheckpointDamaged(f"this is the manifest of step {root.step} (generation {root.generation})", url=url)
    if isinstance(root, Root):
        check_root(root, url=url)
    return root


def decode_claim(data: Buffer, *, url: str) -> ClaimRecord:
    """A claim; errors as :func:`decode_root`."""
    claim: ClaimRecord = _decode(_unseal(data, url), ClaimRecord, url)
    return claim


def decode_start(data: Buffer, *, url: str) -> StartRecord:
    """A start record; errors as :func:`decode_root`. A parent that is not older is an error."""
    start: StartRecord = _decode(_unseal(data, url), StartRecord, url)
    if (start.parent is None) != (start.step is None) or (start.parent or 0) >= start.generation:
        raise CheckpointDamaged(
            f"generation {start.generation} cannot start from step {start.step} of {start.parent}", url=url
        )
    return start


def check_root(root: Root, *, url: str) -> None:
    """That a root is sound in itself: part names are part names of its own attempt, each once.

    Raises :class:`CheckpointDamaged`.
    """
    if not root.attempt:
        raise CheckpointDamaged("the manifest names no attempt", url=url)
    token = attempt_token(root.attempt)
    seen: set[str] = set()
    for part in root.parts:
        name = parse_part(part.file)
        if name is None or name.token != token or part.file in seen:
            raise CheckpointDamaged(f"the manifest names a part {part.file!r} that cannot be its own", url=url)
        seen.add(part.file)


def check_part(part: Part, *, url: str) -> None:
    """That a part is sound in itself: files have segment names, and every chunk lies in its file and its tensor.

    Raises :class:`CheckpointDamaged`, naming the tensor.
    """
    sizes: dict[str, int] = {}
    for file in part.files:
        if file.name in sizes or not is_segment(file.name):
            raise CheckpointDamaged(f"the part names a file {file.name!r} that cannot be a segment of it", url=url)
        sizes[file.name] = file.size
    for tensor in part.tensors:
        if tensor.alias_of is not None and tensor.chunks:
            raise CheckpointDamaged(f"tensor {tensor.name!r} is an alias and has bytes of its own", url=url)
        for chunk in tensor.chunks:
            if not chunk.start <= chunk.end <= sizes.get(chunk.file, -1):
                raise CheckpointDamaged(
                    f"tensor {tensor.name!r}: bytes {chunk.start} to {chunk.end} are not in {chunk.file!r}", url=url
                )
            if not len(chunk.offsets) == len(chunk.shape) == len(tensor.shape):
                raise CheckpointDamaged(f"tensor {tensor.name!r}: a chunk has other dimensions", url=url)
            for offset, length, whole in zip(chunk.offsets, chunk.shape, tensor.shape, strict=True):
                if offset + length > whole:
                    raise CheckpointDamaged(f"tensor {tensor.name!r}: a chunk lies outside its shape", url=url)


def segment_names(part: Part, ref: StepRef) -> dict[str, int]:
    """Name from the root -> size in bytes, for every segment that a part of ``ref`` needs."""
    return {resolve(ref, file.name): file.size for file in part.files}


def _unseal(data: Buffer, url: str) -> memoryview:
    view = memoryview(data).cast("B")
    head = bytes(view[:_SEAL_END])
    if len(head) < _SEAL_END or not head.startswith(_SEAL) or not head.endswith(b'",'):
        raise CheckpointDamaged("not a record of this store, or cut off", url=url)
    if tensor_digest(view[_SEAL_END:]).encode() != head[len(_SEAL) : -2]:
        raise CheckpointDamaged("the record's digest is wrong", url=url)
    return view


def _decode(data: Buffer, kind: Any, url: str) -> Any:
    try:
        header = msgspec.json.decode(data, type=_Header)
        if header.format > FORMAT:
            raise CheckpointUnsupported(
                f"written in format {header.format}, this version reads up to {FORMAT}",
                url=url,
                hint="use a newer nearflash",
            )
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointDamaged(f"not a readable record: {e}", url=url) from e
