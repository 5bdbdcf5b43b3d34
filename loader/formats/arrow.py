"""Arrow IPC files and streams (columnar format 1.0 to 1.5, as pyarrow writes and reads them), Feather version 2.

The layout is told by the first bytes, never by the name: ``ARROW1`` begins a file, a schema message a stream. A row is
a sample, a column a field. Values of uncompressed batches are views into the mapped shard; see :mod:`.arrow_cells` for
what they are. Batches with LZ4 or Zstandard bodies are decompressed one at a time when a row of theirs is read, and
such a shard is dealt with a few batches at a time (:meth:`Arrow.parts`).

On purpose different from pyarrow: every batch is validated in full before a value of it is handed out; the batches of a
file may be damaged one by one, and only their own samples raise; dictionaries of a file may be replaced; a stream that
ends without its end marker is a note; bytes behind the end marker are passed over, with a note; two columns of one name
are an error; cells are numpy scalars and views where pyarrow makes Python objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Bytes, Objects, Opened, Ready, SampleIndex, all_there
from .arrow_feed import Feed
from .arrow_messages import BATCH, DICTIONARY, FILE_MAGIC, SCHEMA, Message, file_blocks, is_stream, read_message
from .arrow_pieces import KEPT, Decoded, Fields, Pieces, nothing
from .arrow_schema import arrow_fields, image_fields
from .table import Table

PART_BYTES = 16 << 20
"""What batches of one part take at least, as stored."""
_MESSAGE_BYTES = 400


@dataclass(slots=True)
class ArrowIndex(SampleIndex):
    """The messages of one shard, or of one batch of it. ``before``: per batch how many dictionaries it comes after."""

    schema: Message
    dictionaries: tuple[Message, ...]
    batches: tuple[Message, ...]
    before: tuple[int, ...]
    names: tuple[str, ...]
    images: frozenset[str]
    notes: tuple[str, ...] = ()
    starts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = np.cumsum([0, *(batch.rows for batch in self.batches)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        return _MESSAGE_BYTES * (len(self.batches) + len(self.dictionaries)) + 2000

    @property
    def size(self) -> int:
        """What its batches take as stored."""
        return sum(batch.end - batch.at for batch in self.batches)

    @property
    def packed(self) -> bool:
        """Whether any batch is compressed."""
        return any(batch.codec >= 0 for batch in self.batches)

    def runs(self) -> list[tuple[int, int]]:
        """The parts: neighbouring batches ``first .. last`` of :data:`PART_BYTES` together, as stored."""
        out: list[tuple[int, int]] = []
        first = size = 0
        for number, batch in enumerate(self.batches, 1):
            size += batch.end - batch.at
            if size >= PART_BYTES or number == len(self.batches):
                out.append((first, number))
                first, size = number, 0
        return out

    def only(self, first: int, last: int) -> ArrowIndex:
        """The index of some neighbouring batches."""
        before = self.before[first:last]
        known = self.dictionaries[: before[-1]]
        return ArrowIndex(self.schema, known, self.batches[first:last], before, self.names, self.images)


@dataclass(frozen=True)
class Arrow(Table):
    """The format has no options."""

    name: ClassVar[str] = "arrow"
    streams: ClassVar[bool] = True

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        stored = data[: len(head)].tobytes()
        if stored.startswith(FILE_MAGIC):
            return True
        size = int.from_bytes(stored[4:8], "little", signed=True) if stored[:4] == b"\xff\xff\xff\xff" else 0
        return is_stream(data[: min(size + 8, len(data))].tobytes() if size > len(stored) else stored)

    def parts(self, objects: Objects, url: str) -> Sequence[int] | None:
        data, ready = objects.map(url)
        index = self.index(data, url, ready)
        return [int(index.starts[last] - index.starts[first]) for first, last in index.runs()] if index.packed else None

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        data, ready = objects.map(url)
        if index is None:
            index = self.index(data, url, ready)
            if part is not None:
                runs = index.runs()
                if part >= len(runs):
                    raise FormatError(f"has {len(runs)} parts, not {part + 1}", url=url)
                index = index.only(*runs[part])
        if part is None:
            ready(0, len(data))
        else:
            for message in (index.schema, *index.dictionaries, *index.batches):
                ready(message.at, message.end)
        return Opened(self.source(data, index), index, min(index.size, KEPT) if index.packed else 0)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> ArrowIndex:
        ready(0, min(8, len(data)))
        if data[: len(FILE_MAGIC)].tobytes() == FILE_MAGIC:
            return _file_index(data, url, ready)
        return _stream_index(data, url, ready)

    def source(self, data: Bytes, index: ArrowIndex) -> Pieces:
        batches = index.batches
        offsets = np.array([batch.at for batch in batches], dtype=np.int64)
        return Pieces(index.starts, _Batches(data, index), offsets)


class _Batches:
    """Decodes batches; keeps one reader for each choice of fields."""

    def __init__(self, data: Bytes, index: ArrowIndex) -> None:
        self._data = data
        self._index = index
        self._feeds: dict[Fields, Feed] = {}

    def __call__(self, number: int, fields: Fields, url: str) -> Decoded:
        index = self._index
        feed = self._feeds.get(fields)
        if feed is None:
            wanted = None if fields is None else [k for k, name in enumerate(index.names) if name in fields]
            if wanted == []:
                return Decoded([nothing(index.batches[number].rows)], 0)
            feed = self._feeds[fields] = Feed(self._data, index.schema, wanted)
        message = index.batches[number]
        batch, size = feed.decode(message, index.dictionaries[: index.before[number]], url)
        return Decoded([batch], size)


def _schema(data: Bytes, at: int, end: int, url: str, ready: Ready) -> tuple[Message, tuple[str, ...], frozenset[str]]:
    import pyarrow as pa

    message = read_message(data, at, end, url, ready)
    if message is None or message.kind != SCHEMA:
        raise FormatError("does not begin with a schema", url=url, offset=at)
    ready(message.at, message.end)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data[message.at : message.end]))
        names = tuple(schema.names)
        images = image_fields(arrow_fields(schema), (schema.metadata or {}).get(b"huggingface"))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as e:
        raise FormatError(f"the schema is damaged: {e}", url=url, offset=at) from e
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FormatError(f"two columns are called {twice!r}", url=url, offset=at)
    return message, names, images


def _file_index(data: Bytes, url: str, ready: Ready) -> ArrowIndex:
    dictionaries, batches, end = file_blocks(data, url, ready)
    schema, names, images = _schema(data, 8, end, url, ready)
    kinds = (DICTIONARY, BATCH)
    found: list[tuple[Message, ...]] = []
    for kind, blocks in zip(kinds, (dictionaries, batches), strict=True):
        messages = []
        for at in blocks:
            message = read_message(data, at, end, url, ready)
            if message is None or message.kind != kind:
                raise FormatError("the footer names a message that is none", url=url, offset=at)
            messages.append(message)
        found.append(tuple(messages))
    ordered = sorted((message.at, message.end) for messages in found for message in messages)
    for (_, end_before), (at, _) in pairwise([(8, schema.end), *ordered]):
        if at < end_before:  # each would be read for as long as all of them are
            raise FormatError("the footer names messages that lie within each other", url=url, offset=at)
    return ArrowIndex(schema, found[0], found[1], (len(found[0]),) * len(found[1]), names, images)


def _stream_index(data: Bytes, url: str, ready: Ready) -> ArrowIndex:
    size = len(data)
    schema, names, images = _schema(data, 0, size, url, ready)
    dictionaries: list[Message] = []
    batches: list[Message] = []
    before: list[int] = []
    notes: tuple[str, ...] = ("the end marker of the stream is missing",)
    at = schema.end
    while at < size:
        message = read_message(data, at, size, url, ready)
        if message is None:
            ready(at, size)
            rest = data[at + (8 if data[at : at + 4].any() else 4) :]
            notes = (f"{len(rest)} bytes behind the end of the stream are not read",) if rest.any() else ()
            break
        if message.kind == DICTIONARY:
            dictionaries.append(message)
        elif message.kind == BATCH:
            batches.append(message)
            before.append(len(dictionaries))
        else:
            raise FormatError("a second schema in one stream", url=url, offset=at)
        at = message.end
    return ArrowIndex(schema, tuple(dictionaries), tuple(batches), tuple(before), names, images, notes)
