"""Formats derived from another: some of the samples that it stores (a filter), or several of them as one (packing).

What is derived of a shard follows from the shard and the options alone, and is found where the shard is indexed. So the
derived samples are what the data set counts and deals: its order, its states, its length and a progressive manifest
need to know nothing of it, and hold for any number of ranks as they do for stored samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from cachefs.hashing import name_digest

from .abc import Bytes, Format, Objects, Opened, Ready, SampleIndex, all_there


class View(ABC):
    """Options that turn a format into one derived from it. Immutable, hashable; picklable to be used by workers."""

    @abstractmethod
    def over(self, format: Format) -> Format:
        """The format that reads what ``format`` stores in this way."""


def under(views: Sequence[View], format: Format) -> Format:
    """The stored format as it is read: under all views, one after the other."""
    for view in views:
        format = view.over(format)
    return format


class DerivedIndex(SampleIndex, ABC):
    """Where the derived samples lie, by numbers of the stored ones; ``inner`` is the index of these."""

    inner: Any

    @abstractmethod
    def to_bytes(self) -> bytes:
        """What was derived, without ``inner``, with a checksum."""


class Counts(list[int]):
    """The sample counts of a shard's parts, with the ``notes`` of what was derived of them."""

    def __init__(self, notes: tuple[str, ...] = ()) -> None:
        self.notes = notes


class _Unread(SampleIndex):
    """Stands for the index of a part that is not opened, of which the count alone is known."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Derived(Format):
    """A format over ``inner``, which is any other (or a derived one). What does not concern samples is as there."""

    inner: Format

    def __post_init__(self) -> None:
        for name in ("name", "dense", "stateful", "columnar", "folder"):
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def base(self) -> Format:
        return self.inner.base

    @property
    def has_parts(self) -> bool:
        return self.inner.has_parts

    @abstractmethod
    def derive(self, opened: Opened, url: str) -> DerivedIndex:
        """What the samples of a shard, or of one part of it, become. Reads no more of them than that takes."""

    @abstractmethod
    def recall(self, raw: bytes, inner: Any) -> DerivedIndex:
        """The index whose ``to_bytes`` this is. Raises ``ValueError`` for any other bytes."""

    @abstractmethod
    def identity(self) -> str: ...

    @property
    def kept_as(self) -> str:
        """What else, besides the shard, that follows from which is kept beside it."""
        return self.identity()

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        inner = None if index is None else index.inner
        opened = self.inner.open(objects, url, index=inner, unpacked=unpacked, part=part)
        if index is None:
            index = self._kept(objects, url, opened, part)
        return Opened(opened.source, index, opened.private_bytes)

    def _kept(self, objects: Objects, url: str, opened: Opened, part: int | None) -> DerivedIndex:
        """What is kept beside the shard, else what is derived now. All of a shard is kept from now on; its parts are
        kept together, once all of them are known."""
        name = self._name(part is not None)
        if part is not None:
            known = self._recall_part(_kept_parts(objects, url, name), part, opened.index)
            return self.derive(opened, url) if known is None else known
        kept = objects.kept(url, name)
        if kept is not None:
            try:
                return self.recall(kept, opened.index)
            except ValueError:
                pass  # an older version's, or damaged: it is only a shortcut
        index = self.derive(opened, url)
        objects.keep(url, name, index.to_bytes)
        return index

    def _recall_part(self, kept: Sequence[bytes], part: int, inner: Any) -> DerivedIndex | None:
        try:
            return self.recall(kept[part], inner) if part < len(kept) else None
        except ValueError:
            return None  # as above

    def _name(self, in_parts: bool) -> str:
        return f"{'parts' if in_parts else 'view'}-{name_digest(self.kept_as)}"

    def parts(self, objects: Objects, url: str) -> Sequence[int] | None:
        stored = self.inner.parts(objects, url)
        if stored is None:
            return None
        name = self._name(True)
        known = _kept_parts(objects, url, name)
        counts = Counts(stored.notes if isinstance(stored, Counts) else ())
        kept: list[bytes] = []
        for part, count in enumerate(stored):
            # what is kept tells how many there are, so that the part itself need not be opened
            index = self._recall_part(known, part, _Unread(count)) if count else None
            if index is None and count:
                opened = self.inner.open(objects, url, part=part)
                index = self.derive(opened, url)
            counts.append(0 if index is None else len(index))
            counts.notes += () if index is None else tuple(note for note in index.notes if note not in counts.notes)
            kept.append(b"" if index is None else index.to_bytes())
        if kept != known:
            objects.keep(url, name, lambda: msgspec.msgpack.encode(kept))
        return counts

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> SampleIndex:
        whole = self.inner.unpack(data, url)
        index = self.inner.index(whole, url, ready)
        ready(0, len(data))
        return self.derive(Opened(self.inner.source(whole, index), index), url)

    def in_epoch(self, seed: int, epoch: int) -> Derived:
        return replace(self, inner=self.inner.in_epoch(seed, epoch))

    def keeps_state(self, source: Any) -> bool:
        return self.inner.keeps_state(source)

    def takes(self, file: str) -> bool:
        return self.inner.takes(file)

    def kind(self, index: Any, name: str) -> str:
        return self.inner.kind(index.inner, name)

    def canonical(self, name: str) -> str:
        return self.inner.canonical(name)

    def options(self) -> dict[str, Any]:
        return self.inner.options()


def _kept_parts(objects: Objects, url: str, name: str) -> Sequence[bytes]:
    """What is kept of a shard's parts, each for :meth:`Derived.recall`; nothing where there is none. Read once for the
    parts that are opened one after the other: it is of all of them."""

    def read() -> list[bytes]:
        kept = objects.kept(url, name)
        if kept is None:
            raise _NothingKept  # not to be remembered: it may be there soon
        try:
            return msgspec.msgpack.decode(kept, type=list[bytes])
        except msgspec.MsgspecError as e:
            raise _NothingKept from e

    try:
        return objects.recalled(url, name, read)
    except _NothingKept:
        return ()


class _NothingKept(Exception):
    pass
