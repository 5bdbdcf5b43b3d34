"""What a format is: how to find the samples of one shard and how to read them.

A format is a small frozen object of options; it keeps nothing between calls and may be used by any thread. It works on
one buffer that holds the whole shard and touches nothing outside it: every size and offset that the bytes declare is
checked against the buffer before it is used. What does not fit is a :class:`~cachefs.errors.FormatError` that names
the shard and the byte offset.

Most formats need ``index`` and ``read`` alone. Three things are for those that are more than one buffer:

* **Filling.** A shard may be mapped before all of it has arrived; bytes that are not there yet read as zeros. A format
  that sets ``streams`` calls ``ready(start, end)`` before it looks at bytes while it indexes, so that it indexes what
  has come while the rest is fetched. All others get the whole shard.
* **Objects.** A shard whose samples lie in several objects (a Megatron pair, a zarr store) overrides
  :meth:`Format.open` and asks :class:`Objects` for what it needs.
* **Parts.** A shard that is decoded piece by piece (row groups, chunks) tells the pieces' sample counts in
  :meth:`Format.parts`; then the data set's order deals with pieces, and a reader holds only those it is reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError
from cachefs.hashing import name_digest

from ..sample import Sample
from .magic import codec_of, is_zlib
from .objects import Bytes, Mapped, Objects, Ready, all_there

if TYPE_CHECKING:
    from cachefs.errors import DataError

__all__ = [
    "BEGINNING", "Bytes", "Damage", "Format", "Joined", "KeptIndex", "Mapped", "Objects", "Opened", "Ready",
    "SampleIndex", "all_there",
]  # fmt: skip

BEGINNING = 512
"""Bytes that tell whether a shard is compressed."""


class KeptIndex(Protocol):
    """An index that can be kept as bytes, so that the next process need not walk the shard again."""

    def to_bytes(self) -> bytes:
        """All of it, with a checksum."""

    @classmethod
    def from_bytes(cls, raw: bytes, size: int) -> Any:
        """The index again, for a shard of ``size`` bytes (decompressed); nothing in it points outside of these. Raises
        ``ValueError`` for any other bytes."""


class Opened(NamedTuple):
    """A shard, or one part of it, ready for ``format.read(source, index, i, url, fields)``."""

    source: Any
    index: Any
    private_bytes: int = 0
    """Memory that it takes besides maps, as far as it is known at once."""


class Joined(NamedTuple):
    """One field of all samples of a shard, whose values lie in one array: sample ``i`` has ``lengths[i]`` of them from
    ``starts[i]`` on (``lengths`` as :meth:`Format.lengths`). With ``dtype`` the array is of bytes, which ``starts``
    count, and values are of that."""

    values: npt.NDArray[Any]
    starts: npt.NDArray[Any]
    lengths: npt.NDArray[Any]
    dtype: np.dtype[Any] | None = None


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
    streams: ClassVar[bool] = False
    """Whether ``index`` asks ``ready`` for what it looks at; see the module's text."""
    kept_index: ClassVar[type[KeptIndex] | None] = None
    """The type of the indexes, where they are worth keeping beside the shard: those that a walk over it makes."""
    stateful: ClassVar[bool] = False
    """Whether a source keeps what it decoded, so that two threads must not read from it at once; see
    :meth:`keeps_state`."""
    columnar: ClassVar[bool] = False
    """Whether :meth:`columns` reads many samples at once."""
    folder: ClassVar[bool] = False
    """Whether a shard is a folder of objects, which cannot be asked for ahead as if it were one."""

    @property
    def base(self) -> Format:
        """The format as it is stored; another one only where samples are derived (:mod:`.derived`)."""
        return self

    @property
    def has_parts(self) -> bool:
        """Whether :meth:`parts` may tell something."""
        return type(self).parts is not Format.parts

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        """Whether a shard looks like this format. ``head``: its first bytes (4 KiB, or all), decompressed if ``data``
        is a gzip, Zstandard or bzip2 file; ``data``: all its bytes as stored. Must not raise on anything."""
        return False

    @classmethod
    def is_plain(cls, head: bytes) -> bool:
        """Whether a shard that begins so (512 bytes, or all) is not compressed, whatever magic number that may be."""
        return False

    @classmethod
    def beside(cls, objects: Objects, url: str) -> Self | None:
        """The format of a shard whose own bytes do not tell, told by objects beside it (an index) or below it (a
        store); ``None`` if it is not this one. Asked only where no format ``matches``."""
        return None

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        """Map a shard and find its samples. ``index``: one made before, taken instead; ``unpacked``: the decompressed
        size where it is known; ``part``: only that part of the shard (``None``: all of it)."""
        data, ready = objects.map(url)
        if not self.streams or index is not None or self._is_packed(data, ready):
            ready(0, len(data))
            ready = all_there
        whole = self.unpack(data, url, limit=unpacked)
        if index is None:
            index = self._indexed(objects, url, whole, ready)
            ready(0, len(data))
        return Opened(self.source(whole, index), index, 0 if whole is data else whole.nbytes)

    def _is_packed(self, data: Bytes, ready: Ready) -> bool:
        """Whether the bytes are a compressed file, which is unpacked only once it is whole."""
        ready(0, min(len(data), BEGINNING))
        head = data[:BEGINNING].tobytes()
        return not self.is_plain(head) and (codec_of(data) is not None or is_zlib(head))

    def _indexed(self, objects: Objects, url: str, data: Bytes, ready: Ready) -> Any:
        """The index that is kept beside the shard, else a new one, which is kept from now on."""
        if self.kept_index is None:
            return self._index_now(data, url, ready)
        name = f"index-{name_digest(self.name, self.identity())}"
        kept = objects.kept(url, name)
        if kept is not None:
            try:
                return self.kept_index.from_bytes(kept, len(data))
            except ValueError:
                pass  # an older version's, or damaged: it is only a shortcut
        index = self._index_now(data, url, ready)
        objects.keep(url, name, index.to_bytes)
        return index

    def _index_now(self, data: Bytes, url: str, ready: Ready) -> Any:
        return self.index(data, url, ready) if self.streams else self.index(data, url)

    def parts(self, objects: Objects, url: str) -> Sequence[int] | None:
        """The sample counts of the shard's parts, in order; ``None`` where it is read as one."""
        return None

    def unpack(self, data: Bytes, url: str, *, limit: int | None = None) -> Bytes:
        """The bytes that samples are read from: ``data`` itself, or what it decompresses to, as private memory.

        ``limit`` is the decompressed size where it is known beforehand. Formats without compression return ``data``.
        """
        return data

    @abstractmethod
    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> SampleIndex:
        """Find all samples in one pass that reads no payload. ``url`` is for messages.

        A sample that is damaged by itself keeps its place in the index and raises when it is read; a shard that cannot
        be walked to its end raises ``FormatError`` here.
        """

    def source(self, data: Bytes, index: Any) -> Any:
        """What ``read`` takes: ``data``, or a view of it that is better made once than for each sample."""
        return data

    def keeps_state(self, source: Any) -> bool:
        """Whether this source keeps what it decoded (:attr:`stateful`), where not all of the format's do."""
        return self.stateful

    @abstractmethod
    def read(self, source: Any, index: Any, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        """Sample ``i`` (``0 <= i < len(index)``), with views into the shard wherever the format allows.

        With ``fields`` only those are read; one that is absent is left out here (the caller knows what it needs).
        """

    def columns(
        self, source: Any, index: Any, rows: npt.NDArray[np.int64], url: str, fields: frozenset[str] | None = None
    ) -> dict[str, Any]:
        """Many samples at once, field by field: an array whose first axis is the sample, else a list of values (or
        values that are :mod:`.pending`).

        The arrays are new memory or views of it: the caller may write into them.
        """
        raise NotImplementedError(self.name)

    def lengths(self, source: Any, index: Any, field: str, url: str) -> npt.NDArray[Any] | None:
        """How many values ``field`` has in each sample, where it holds 1-D arrays and that can be told without reading
        them: integers of shape ``(samples,)``, -1 for one that cannot be read. ``None``: read the samples to know."""
        return None

    def joined(self, source: Any, index: Any, field: str, url: str) -> Joined | None:
        """All values of ``field``, where they are 1-D arrays that lie in one, or are bytes."""
        return None

    def in_epoch(self, seed: int, epoch: int) -> Format:
        """The format as it is read in a shuffled epoch: it may mix anew what a shard's samples are made of, as long as
        their number stays."""
        return self

    def count(self, size: int, url: str) -> int | None:
        """The number of samples of a shard of ``size`` bytes, where that alone tells; ``None`` where it does not."""
        return None

    def takes(self, file: str) -> bool:
        """Whether a file of this name is a shard, though others of such names lie beside shards and are none.

        Asked where the user named the format and a folder or a pattern.
        """
        return False

    def kind(self, index: Any, name: str) -> str:
        """What the undecoded field ``name`` holds (``jpg``, ``txt``, ``json`` ...), in the words of ``loader.decode``.

        Empty where its value needs no decoding.
        """
        return ""

    def canonical(self, name: str) -> str:
        """A field name as the user wrote it, in the spelling that samples of this format use."""
        return name

    def completed(self, known: Format) -> Self:
        """This format with what an index of the data says (``known``) where the user's options leave it open."""
        return self

    def identity(self) -> str:
        """The options that shape samples, for the data set's digest."""
        return repr(self)

    def options(self) -> dict[str, Any]:
        """The options as plain JSON types, for :meth:`from_options`."""
        return {field.name: msgspec.to_builtins(getattr(self, field.name)) for field in fields_of(self)}

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> Self:
        """The format again from its :meth:`options`. Raises ``ConfigError`` for others."""
        unknown = sorted(options.keys() - {field.name for field in fields_of(cls)})
        if unknown:
            raise ConfigError(f"the format {cls.name!r} has no option {unknown[0]!r}")
        try:
            return msgspec.convert(options, cls)
        except msgspec.ValidationError as e:
            raise ConfigError(f"options of the format {cls.name!r}: {e}") from e


@dataclass(frozen=True, slots=True)
class Damage:
    """Why one sample of an otherwise readable shard cannot be read."""

    what: str
    offset: int
    hint: str | None = None

    def error(self, kind: type[DataError], url: str) -> DataError:
        return kind(self.what, url=url, offset=self.offset, hint=self.hint)
