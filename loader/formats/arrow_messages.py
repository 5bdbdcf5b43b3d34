"""The messages of Arrow's IPC format (columnar format 1.0 to 1.5): what their metadata says, without their bodies.

A message is ``FF FF FF FF`` (missing before Arrow 0.15), the size of its metadata (int32), the metadata (a flatbuffer)
and its body. Only the few numbers are read here that tell where a message ends and how many rows it holds; each is
checked against the file. Arrow's own library reads the rest when a batch is decoded.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cachefs.errors import FormatError

from .abc import Bytes, Ready

FILE_MAGIC = b"ARROW1"
CONTINUES = b"\xff\xff\xff\xff"
SCHEMA, DICTIONARY, BATCH = 1, 2, 3
_LZ4, _ZSTD = 0, 1
_MOST_ROWS_OF_NOTHING = 1 << 20
"""Rows that a batch may have whatever its size: columns of nulls alone take no bytes."""
_MOST_RATIO = 1 << 15
"""How many bytes one byte decompresses to at most: Zstandard's blocks of one repeated byte."""


class Message(NamedTuple):
    """One message at bytes ``at .. end`` of the shard, its body from ``body`` on."""

    at: int
    body: int
    end: int
    kind: int
    rows: int = 0
    codec: int = -1
    """``-1``: the body is not compressed."""
    dictionary: int = 0
    delta: bool = False


class Table:
    """A table of a flatbuffer. Raises ``ValueError`` for whatever lies outside the buffer."""

    def __init__(self, buffer: memoryview, at: int) -> None:
        self._buffer = buffer
        self._at = at
        self._slots = at - self._number("<i", at)
        self._size = self._number("<H", self._slots)

    @classmethod
    def root(cls, buffer: memoryview) -> Table:
        first = cls.__new__(cls)
        first._buffer = buffer
        return cls(buffer, first._number("<I", 0))

    def _number(self, code: str, at: int) -> int:
        if at < 0 or at + struct.calcsize(code) > len(self._buffer):
            raise ValueError("the metadata points outside itself")
        return int(struct.unpack_from(code, self._buffer, at)[0])

    def _place(self, slot: int) -> int | None:
        entry = 4 + 2 * slot
        if entry + 2 > self._size:
            return None
        offset = self._number("<H", self._slots + entry)
        return self._at + offset if offset else None

    def number(self, slot: int, code: str, default: int = 0) -> int:
        place = self._place(slot)
        return default if place is None else self._number("<" + code, place)

    def table(self, slot: int) -> Table | None:
        place = self._place(slot)
        return None if place is None else Table(self._buffer, place + self._number("<I", place))

    def structs(self, slot: int, code: str) -> list[tuple[int, ...]]:
        """A vector of structs, each of the little-endian layout ``code``."""
        return list(struct.iter_unpack("<" + code, self._vector(slot, code)))

    def first(self, slot: int, code: str) -> tuple[int, ...] | None:
        """The first struct of a vector, of which there may be many; ``None`` where it is empty."""
        whole = self._vector(slot, code)
        return struct.unpack_from("<" + code, whole) if len(whole) else None

    def tables(self, slot: int) -> list[Table]:
        """A vector of tables."""
        place = self._place(slot)
        if place is None:
            return []
        start = place + self._number("<I", place) + 4
        at = range(start, start + len(self._vector(slot, "I")), 4)
        return [Table(self._buffer, here + self._number("<I", here)) for here in at]

    def raw(self, slot: int) -> bytes:
        """A string or a vector of bytes."""
        return bytes(self._vector(slot, "B"))

    def _vector(self, slot: int, code: str) -> memoryview:
        place = self._place(slot)
        if place is None:
            return self._buffer[:0]
        start = place + self._number("<I", place)
        count = self._number("<I", start)
        size = struct.calcsize("<" + code)
        if count * size > len(self._buffer) - start - 4:
            raise ValueError("the metadata points outside itself")
        return self._buffer[start + 4 : start + 4 + count * size]


def read_message(data: Bytes, at: int, end: int, url: str, ready: Ready) -> Message | None:
    """The message at byte ``at``, which lies before ``end``; ``None`` for the end marker.

    Raises ``FormatError`` that names the message's offset where it is cut off or damaged.
    """
    ready(at, min(at + 8, end))
    head = data[at : min(at + 8, end)].tobytes()
    start = at + 4
    if head[:4] == CONTINUES:
        head, start = head[4:], at + 8
    if len(head) < 4:
        raise FormatError("cut off in the size of a message", url=url, offset=at)
    size = int.from_bytes(head[:4], "little", signed=True)
    if size == 0:
        return None
    if size < 8 or start + size > end:
        raise FormatError(
            f"a message whose metadata should take {size} bytes, {end - start} are left: cut off or damaged",
            url=url,
            offset=at,
        )
    ready(start, start + size)
    try:
        message = _parsed(data[start : start + size].data, at, start + size)
    except ValueError as e:
        raise FormatError(f"a message that is damaged: {e}", url=url, offset=at) from e
    if message.end > end:
        raise FormatError(
            f"a message of {message.end - at} bytes, of which {end - at} are there: cut off or damaged",
            url=url,
            offset=at,
        )
    return message


def _parsed(metadata: memoryview, at: int, body: int) -> Message:
    table = Table.root(metadata)
    kind = table.number(1, "B")
    length = table.number(3, "q")
    header = table.table(2)
    if length < 0 or header is None:
        raise ValueError(f"a body of {length} bytes" if length < 0 else "it has no header")
    message = Message(at, body, body + length, kind)
    if kind == SCHEMA:
        return message
    if kind == DICTIONARY:
        batch = header.table(1)
        if batch is None:
            raise ValueError("a dictionary without values")
        message = message._replace(dictionary=header.number(0, "q"), delta=bool(header.number(2, "B")))
    elif kind == BATCH:
        batch = header
    else:
        raise ValueError(f"it is of kind {kind}, which no table holds")
    return _batch(message, batch, length)


def _batch(message: Message, batch: Table, length: int) -> Message:
    rows = batch.number(0, "q")
    compression = batch.table(3)
    codec = -1 if compression is None else compression.number(0, "b")
    if codec not in (-1, _LZ4, _ZSTD):
        raise ValueError(f"compressed with codec {codec}, which is not known")
    if compression is not None and compression.number(1, "b"):
        raise ValueError("compressed in a way that is not known")
    ratio = 1 if compression is None else _MOST_RATIO
    if not 0 <= rows <= max(_MOST_ROWS_OF_NOTHING, 8 * length * ratio):
        raise ValueError(f"{rows} rows in {length} bytes")
    node = batch.first(1, "qq")
    if node is not None and node[0] != rows:
        raise ValueError(f"{rows} rows, but {node[0]} in the first column")
    return message._replace(rows=rows, codec=codec)


def unpacked_size(data: Bytes, message: Message, most: int, url: str) -> int:
    """What a compressed body decompresses to by its own account; 0 for one that is not compressed.

    What is declared is allocated by Arrow's library at once, so it is checked here that the body's bytes can decompress
    to it, and that it is no more than ``most`` in all. Raises ``FormatError``.
    """
    if message.codec < 0:
        return 0
    start = message.at + (8 if data[message.at : message.at + 4].tobytes() == CONTINUES else 4)
    try:
        buffers = _buffers(data[start : message.body].data, message.kind)
    except ValueError as e:
        raise FormatError(f"a message that is damaged: {e}", url=url, offset=message.at) from e
    total = 0
    for offset, length in buffers:
        first = message.body + offset
        if offset < 0 or length < 0 or first + length > message.end:
            raise FormatError("a buffer that lies outside its message", url=url, offset=message.at)
        if length == 0:
            continue
        declared = int.from_bytes(data[first : first + 8].tobytes(), "little", signed=True)
        if length < 8 or declared < -1 or declared > length * _MOST_RATIO:
            raise FormatError(f"a buffer of {length} bytes that declares {declared}", url=url, offset=first)
        total += max(declared, 0)
    if total > most:
        raise FormatError(
            f"a batch that decompresses to {total} bytes, more than {most}",
            url=url,
            offset=message.at,
            hint="write smaller batches",
        )
    return total


def _buffers(metadata: memoryview, kind: int) -> list[tuple[int, ...]]:
    """Offset and length of each buffer of a batch's body."""
    header = Table.root(metadata).table(2)
    batch = header.table(1) if header is not None and kind == DICTIONARY else header
    return [] if batch is None else batch.structs(2, "qq")


def is_stream(head: bytes) -> bool:
    """Whether these first bytes are the schema message that an IPC stream begins with."""
    start = 8 if head[:4] == CONTINUES else 4
    size = int.from_bytes(head[start - 4 : start], "little", signed=True)
    if size < 16 or len(head) < start + 16:
        return False
    try:
        table = Table.root(memoryview(head)[start : start + size])
        # a schema has no body; the version is one of five
        return table.number(1, "B") == SCHEMA and table.number(3, "q") == 0 and 0 <= table.number(0, "h") <= 4
    except ValueError:
        return False


def file_blocks(data: Bytes, url: str, ready: Ready) -> tuple[list[int], list[int], int]:
    """Where a file's footer says that dictionaries and record batches begin, and where the footer itself does."""
    size = len(data)
    ready(max(size - 10, 0), size)
    tail = data[-10:].tobytes()
    if size < 8 + 4 + 10 or tail[4:] != FILE_MAGIC:
        raise FormatError("the footer of an Arrow file is missing: cut off or damaged", url=url, offset=size)
    length = int.from_bytes(tail[:4], "little", signed=True)
    start = size - 10 - length
    if length < 8 or start < 8:
        raise FormatError(f"a footer of {length} bytes does not fit the file", url=url, offset=size - 10)
    ready(start, size)
    try:
        footer = Table.root(data[start : size - 10].data)
        # 24 bytes: offset, size of the metadata, padding, size of the body
        dictionaries, batches = ([block[0] for block in footer.structs(slot, "qiiq")] for slot in (2, 3))
    except ValueError as e:
        raise FormatError(f"the footer is damaged: {e}", url=url, offset=start) from e
    every = [*dictionaries, *batches]
    if len(set(every)) < len(every) or any(not 8 <= at < start for at in every):
        raise FormatError("the footer names messages that cannot be there", url=url, offset=start)
    return dictionaries, batches, start
