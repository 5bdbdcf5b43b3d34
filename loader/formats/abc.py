"""What a format is: how to find the samples of one shard and how to read them.

A format is a small frozen object of options; it keeps nothing between calls and may be used by any thread. It works on
one buffer that holds the whole shard and touches nothing outside it: every size and offset that the bytes declare is
checked against the buffer before it is used. What does not fit is a :class:`~cachefs.errors.FormatError` that names
the shard and the byte offset.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ..sample import Sample

if TYPE_CHECKING:
    from cachefs.errors import DataError

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A shard's bytes: 1-D ``uint8``, C-contiguous, writable (the map under it is private)."""


class SampleIndex(ABC):
    """Where the samples of one shard lie. Compact (arrays of offsets), picklable, free of references to the buffer."""

    notes: tuple[str, ...] = ()
    """Peculiarities that lose no sample but that the user should hear of once."""
    skipped: int = 0
    """Entries of the shard that belong to no sample."""

    @abstractmethod
    def __len__(self) -> int:
        """How many samples the shard holds, damaged ones included."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """About how much memory the index takes."""


@dataclass(frozen=True)
class Format(ABC):
    """One format. See the module's text."""

    name: ClassVar[str]
    dense: ClassVar[bool] = False
    """Whether an epoch reads every byte of a shard, in small pieces."""

    def unpack(self, data: Bytes, url: str, *, limit: int | None = None) -> Bytes:
        """The bytes that samples are read from: ``data`` itself, or what it decompresses to, as private memory.

        ``limit`` is the decompressed size where it is known beforehand. Formats without compression return ``data``.
        """
        return data

    @abstractmethod
    def index(self, data: Bytes, url: str) -> SampleIndex:
        """Find all samples in one pass that reads no payload. ``url`` is for messages.

        A sample that is damaged by itself keeps its place in the index and raises when it is read; a shard that cannot
        be walked to its end raises ``FormatError`` here.
        """

    def source(self, data: Bytes, index: Any) -> Any:
        """What ``read`` takes: ``data``, or a view of it that is better made once than for each sample."""
        return data

    @abstractmethod
    def read(self, source: Any, index: Any, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        """Sample ``i`` (``0 <= i < len(index)``), with views into the shard wherever the format allows.

        With ``fields`` only those are read; one that is absent is left out here (the caller knows what it needs).
        """

    def count(self, size: int, url: str) -> int | None:
        """The number of samples of a shard of ``size`` bytes, where that alone tells; ``None`` where it does not."""
        return None

    def kind(self, index: Any, name: str) -> str:
        """What the undecoded field ``name`` holds (``jpg``, ``txt``, ``json`` ...), in the words of ``loader.decode``.

        Empty where its value needs no decoding.
        """
        return ""

    def canonical(self, name: str) -> str:
        """A field name as the user wrote it, in the spelling that samples of this format use."""
        return name

    def identity(self) -> str:
        """The options that shape samples, for the data set's digest."""
        return repr(self)


@dataclass(frozen=True, slots=True)
class Damage:
    """Why one sample of an otherwise readable shard cannot be read."""

    what: str
    offset: int
    hint: str | None = None

    def error(self, kind: type[DataError], url: str) -> DataError:
        return kind(self.what, url=url, offset=self.offset, hint=self.hint)
