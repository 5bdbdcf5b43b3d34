"""What a committed step holds: the parts of all nodes joined into one table of tensors. No torch in here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from cachefs.errors import CheckpointDamaged, CheckpointMismatch

from .boxes import Box, Shape
from .dtypes import itemsize
from .layout import StepRef, resolve
from .manifest import Part, Root
from .records import ranks_text
from .storage import Storage
from .verify import read_parts, read_root


class StoredChunk(NamedTuple):
    """A box of a tensor as bytes ``[start, end)`` of a segment; ``file`` is its name from the root."""

    box: Box
    file: str
    start: int
    end: int
    digest: str


class Stored(NamedTuple):
    """One tensor of a step; ``owner``: the rank whose own value it is."""

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[StoredChunk, ...]
    alias_of: str | None
    owner: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return Box.whole(self.shape).volume * itemsize(self.dtype)


@dataclass(frozen=True)
class Catalog:
    """A step's tensors and structure. ``structure`` is JSON as :mod:`.structure` describes it."""

    root: Root
    structure: Any
    tensors: dict[str, dict[int | None, Stored]]

    @property
    def ref(self) -> StepRef:
        return self.root.ref

    def __iter__(self) -> Iterator[Stored]:
        for owners in self.tensors.values():
            yield from owners.values()

    def find(self, name: str, rank: int) -> Stored:
        """The tensor as rank ``rank`` sees it, aliases followed.

        Where ranks keep their own, a rank takes over from rank ``rank mod N`` of the N that saved; see
        :meth:`source_rank`. Raises :class:`CheckpointMismatch`.
        """
        owners = self.tensors.get(name)
        if not owners:
            raise CheckpointDamaged(f"tensor {name!r} is referred to, and is in no part", url=self.ref.folder)
        stored = owners.get(None) or owners.get(self.source_rank(rank))
        if stored is None:
            saved = ranks_text([o for o in owners if o is not None])
            raise CheckpointMismatch(f"{name!r} was saved by {saved} for themselves, and there is none for rank {rank}")
        if stored.alias_of is not None:
            return self.find(stored.alias_of, rank)._replace(name=name)
        return stored

    def source_rank(self, rank: int) -> int:
        """The saving rank whose own values rank ``rank`` takes over."""
        return rank % self.root.world_size


def read_catalog(storage: Storage, ref: StepRef) -> Catalog:
    """Read a step's root and parts, digests checked. Raises as :func:`.verify.read_root` and ``read_parts``."""
    root = read_root(storage, ref)
    return build_catalog(root, read_parts(storage, root), url=storage.describe(ref.folder))


def build_catalog(root: Root, parts: list[Part], *, url: str) -> Catalog:
    """Join the parts of a step. Raises :class:`CheckpointDamaged` if they contradict each other."""
    tensors: dict[str, dict[int | None, Stored]] = {}
    structure: Any = None
    for part in parts:
        if isinstance(part.objects, dict) and "state" in part.objects:
            structure = part.objects["state"]
        for entry in part.tensors:
            chunks = tuple(
                StoredChunk(Box(c.offsets, c.shape), resolve(root.ref, c.file), c.start, c.end, c.digest)
                for c in entry.chunks
            )
            owners = tensors.setdefault(entry.name, {})
            known = owners.get(entry.per_rank)
            if known is None:
                known = Stored(entry.name, entry.dtype, entry.shape, chunks, entry.alias_of, entry.per_rank)
            elif (known.dtype, known.shape, known.alias_of) != (entry.dtype, entry.shape, entry.alias_of):
                raise CheckpointDamaged(f"two parts describe tensor {entry.name!r} differently", url=url)
            else:
                known = known._replace(chunks=known.chunks + chunks)
            owners[entry.per_rank] = known
    for owners in tensors.values():
        for stored in owners.values():
            _check(stored, tensors, url)
    if structure is None:
        raise CheckpointDamaged("no part holds the structure of the state", url=url)
    return Catalog(root, structure, tensors)


def _check(stored: Stored, tensors: dict[str, dict[int | None, Stored]], url: str) -> None:
    if stored.alias_of is not None:
        target = tensors.get(stored.alias_of, {}).get(None)
        if (
            target is None
            or target.alias_of is not None
            or (target.dtype, target.shape) != (stored.dtype, stored.shape)
        ):
            raise CheckpointDamaged(f"tensor {stored.name!r} is an alias of nothing", url=url)
    size = itemsize(stored.dtype)
    for chunk in stored.chunks:
        if chunk.end - chunk.start != chunk.box.volume * size or not chunk.box.within(stored.shape):
            raise CheckpointDamaged(
                f"tensor {stored.name!r}: {chunk.end - chunk.start} bytes cannot be a chunk of shape "
                f"{list(chunk.box.shape)}",
                url=f"{url}/{chunk.file}",
                offset=chunk.start,
            )
    held = sum(chunk.box.volume for chunk in stored.chunks)
    if stored.alias_of is None and held != math.prod(stored.shape):  # before anybody allocates that shape
        raise CheckpointDamaged(
            f"tensor {stored.name!r} of shape {list(stored.shape)} has chunks for {held} elements", url=url
        )
