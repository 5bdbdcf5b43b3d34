"""What ranks tell each other during a save, as small typed records (msgpack on the wire)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from cachefs import errors
from cachefs.errors import NearflashError, RankFailed

from .boxes import Box, Shape

Rule = Literal["equal", "first", "own"]
"""What holds where several ranks have a whole tensor of one name: they must be equal; the lowest rank's counts
(buffers of a replicated module); each rank keeps its own."""


class Held(Struct, frozen=True, gc=False, array_like=True):
    """What one rank has of one tensor: the box ``[offsets, offsets + extent)`` of the global ``shape``.

    ``digests``: xxh3-128 of each chunk of that box, in the order of :func:`.boxes.split`. ``alias_of``: the first
    tensor of this rank with the very same memory and view.
    """

    name: str
    dtype: str
    shape: Shape
    offsets: Shape
    extent: Shape
    digests: tuple[str, ...]
    rule: Rule = "equal"
    alias_of: str | None = None

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.extent)

    @property
    def whole(self) -> bool:
        """Whether the rank has all of the tensor."""
        return self.extent == self.shape

    @property
    def content(self) -> tuple[object, ...]:
        """Equal for ranks that hold the same thing."""
        return (self.dtype, self.shape, self.offsets, self.extent, self.digests)


class Report(Struct, frozen=True, tag=True):
    """What one rank brings to a save. ``structure`` is its JSON (see :mod:`.structure`); ``node`` tells nodes apart;
    below the names ``own`` every rank keeps its own values."""

    rank: int
    node: str
    step: int
    structure: bytes
    tensors: tuple[Held, ...]
    own: tuple[str, ...] = ()


class PlannedChunk(Struct, frozen=True, gc=False, array_like=True):
    """One chunk to write: its box in the global tensor, its bytes and their digest."""

    offsets: Shape
    shape: Shape
    size: int
    digest: str


class Piece(Struct, frozen=True, gc=False, array_like=True):
    """A run of chunks of one tensor that one rank writes one after the other.

    ``first`` counts the chunks of the writer's own box before it. ``ranks``: whose value it is, where ranks keep
    different ones under this name; empty: everybody's. ``label`` is its name in the safetensors file.
    """

    name: str
    label: str
    dtype: str
    shape: Shape
    first: int
    chunks: tuple[PlannedChunk, ...]
    ranks: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return sum(c.size for c in self.chunks)


class Bare(Struct, frozen=True, gc=False, array_like=True):
    """A tensor without bytes of its own: empty, or another name of one that has them."""

    name: str
    dtype: str
    shape: Shape
    alias_of: str | None = None
    ranks: tuple[int, ...] = ()


class SavePlan(Struct, frozen=True):
    """The outcome: what each rank writes, segment by segment, and the tensors that need no bytes."""

    segments: tuple[tuple[tuple[Piece, ...], ...], ...]
    bare: tuple[Bare, ...]


class Go(Struct, frozen=True, tag=True):
    """The coordinator's word that a save goes ahead, and under which name."""

    generation: int
    attempt: str


class Orders(Struct, frozen=True):
    """What one rank writes: its segments, and, if it leads its node, the node's part (file name and content)."""

    segments: tuple[tuple[Piece, ...], ...]
    part: tuple[str, bytes] | None = None


class Done(Struct, frozen=True, tag=True):
    """A rank has written everything; or, from the coordinator, the step is committed."""


class Failure(Struct, frozen=True, tag=True):
    """An error on its way to other ranks. ``manifest_sent``: whether a commit record may still come into place."""

    kind: str
    what: str
    url: str | None = None
    hint: str | None = None
    manifest_sent: bool = False

    def error(self) -> NearflashError:
        """The same error again, as far as its class is one of nearflash's."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, NearflashError):
            return kind(self.what, url=self.url, hint=self.hint)
        return RankFailed(f"{self.kind}: {self.what}", url=self.url, hint=self.hint)


def failure_of(error: BaseException, *, manifest_sent: bool = False) -> Failure:
    """An error as a record."""
    if isinstance(error, NearflashError):
        return Failure(type(error).__name__, error.what, error.url, error.hint, manifest_sent)
    return Failure(type(error).__name__, str(error), manifest_sent=manifest_sent)


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2,5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] + 1 == rank:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
