"""What a writer is: it takes samples one after the other and leaves whole shards in an output.

The first samples (:data:`PROBE`) decide what the columns are; a later value that does not fit is an error that names
its sample and field, never a changed value. Fields that hold what a writer has no place for are refused likewise.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from cachefs.errors import ConfigError, DataError, EmptyDataset

from .output import Output

PROBE = 256
"""Samples that decide what the columns are, at most."""
PROBE_BYTES = 32 << 20
"""Bytes of samples that are held for it, at most (one sample is always looked at)."""


class Placed(NamedTuple):
    """A sample and where it is from, for messages: its number in the data set and its shard."""

    sample: Mapping[str, Any]
    number: int
    url: str

    def refuse(self, name: str, why: object, *, hint: str | None = None) -> DataError:
        """The error that says that a field of this sample cannot be written."""
        return DataError(f"sample {self.number}, field {name!r}: {why}", url=self.url, hint=hint)


@dataclass(frozen=True)
class WriteOptions:
    """``shard_size``: bytes that a shard shall have, before compression. ``columns``: what a field shall be written
    as, in the words of the writer. ``keys``: a WebDataset sample's ``__key__``, or its number, becomes its name."""

    shard_size: int = 64 << 20
    compression: str | None = None
    columns: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    keys: Literal["keep", "number"] = "keep"

    def __post_init__(self) -> None:
        if self.shard_size < 1:
            raise ConfigError(f"a shard size of {self.shard_size} bytes")


@dataclass
class Written:
    """What a writer wrote. ``bytes`` as stored."""

    shards: int = 0
    samples: int = 0
    bytes: int = 0
    columns: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Writer(ABC):
    """Writes one data set into one output; used once."""

    name: ClassVar[str]
    shards: ClassVar[str]
    """A regular expression of the names that it gives its files."""
    compressions: ClassVar[tuple[str, ...]] = ()
    raw: ClassVar[bool] = False
    """Whether it takes undecoded fields: a tar's members as they are."""
    keyed: ClassVar[bool] = False
    """Whether it needs ``__key__`` whatever fields are asked for."""

    def __init__(self, output: Output, options: WriteOptions) -> None:
        self.output = output
        self.options = options
        self.written = Written()
        kind = (options.compression or "").partition(":")[0]
        if kind and kind not in self.compressions:
            known = ", ".join(self.compressions) or "none"
            raise ConfigError(f"{self.name} files are not written with compression {kind!r}", hint=f"known: {known}")

    def write(self, samples: Iterable[Placed]) -> Written:
        """Write all of them and publish the last shard; the caller commits the output."""
        source = iter(samples)
        first = _probe(source)
        if not first:
            raise EmptyDataset("there is no sample to write", url=self.output.url)
        self.begin(first)
        for placed in itertools.chain(first, source):
            self.add(placed)
            self.written.samples += 1
        self.end()
        return self.written

    def level(self, default: int, most: int) -> int:
        """The level of compression: what is behind the colon of ``zstd:7``."""
        text = (self.options.compression or "").partition(":")[2] or str(default)
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
            raise ConfigError(f"compression {self.options.compression!r}", hint=f"levels are 1 to {most}")
        return int(text)

    @abstractmethod
    def begin(self, first: Sequence[Placed]) -> None:
        """Decide what the columns are."""

    @abstractmethod
    def add(self, placed: Placed) -> None:
        """Take one sample. Raises ``DataError`` for one that cannot be written."""

    @abstractmethod
    def end(self) -> None:
        """Publish the last shard, and what comes after it."""

    def published(self, size: int) -> None:
        """Count one shard."""
        self.written.shards += 1
        self.written.bytes += size


def _probe(samples: Iterator[Placed]) -> list[Placed]:
    first: list[Placed] = []
    size = 0
    for placed in itertools.islice(samples, PROBE):
        first.append(placed)
        size += sum(payload(value) for value in placed.sample.values())
        if size >= PROBE_BYTES:
            break
    return first


def payload(value: Any) -> int:
    """About how many bytes a value takes."""
    if isinstance(value, np.ndarray | memoryview):
        return value.nbytes
    return len(value) if isinstance(value, str | bytes | bytearray) else 64


def as_bytes(value: Any) -> bytes | memoryview | None:
    """The bytes of a value that stands for bytes (a 1-D ``uint8`` array does); ``None`` for any other."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == np.uint8:
        return np.ascontiguousarray(value).data
    return None


def image_bytes(value: Any) -> bytes | memoryview | None:
    """The file in an image as Hugging Face's tools store it, ``{bytes, path}``; ``None`` for any other value."""
    if isinstance(value, dict) and value.keys() == {"bytes", "path"}:
        return as_bytes(value["bytes"])
    return None


def column_names(first: Sequence[Placed], columns: Mapping[str, str]) -> list[str]:
    """Every field of these samples, in the order in which they appear. Raises for a column that none of them has."""
    names = list(dict.fromkeys(name for placed in first for name in placed.sample))
    unknown = [name for name in columns if name not in names]
    if unknown:
        raise ConfigError(f"no field {unknown[0]!r} in the first samples", hint=f"fields: {', '.join(names)}")
    return names
