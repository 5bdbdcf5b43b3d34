"""Record batches of one IPC shard, decoded in any order by Arrow's own stream reader.

The reader is fed with messages of the mapped shard, without copying them: the schema, the dictionaries that a batch
needs and it does not know yet, then the batch. Dictionaries that only grew since a batch was written serve it as well;
one that was replaced is fed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachefs.errors import FormatError

from .abc import Bytes
from .arrow_messages import Message, unpacked_size
from .packed import MOST


class _Queue:
    """The bytes that Arrow's reader reads next, as a file: views of the shard."""

    closed = False

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._spans: list[tuple[int, int]] = []

    def add(self, message: Message) -> None:
        self._spans.append((message.at, message.end))

    def read(self, size: int) -> bytes:
        return self._next(size).tobytes()

    def read_buffer(self, size: int) -> Any:
        import pyarrow as pa

        return pa.py_buffer(self._next(size))

    def _next(self, size: int) -> Bytes:
        if not self._spans:
            return self._data[:0]
        first, end = self._spans[0]
        middle = min(first + size, end)
        if middle == end:
            self._spans.pop(0)
        else:
            self._spans[0] = (middle, end)
        return self._data[first:middle]

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class Feed:
    """Decodes batches of one shard. ``fields``: numbers of the columns that are decoded (``None``: all)."""

    def __init__(self, data: Bytes, schema: Message, fields: Sequence[int] | None) -> None:
        self._data = data
        self._schema = schema
        self._fields = fields
        self._queue: _Queue | None = None
        self._reader: Any = None
        self._known: dict[int, list[int]] = {}

    def decode(self, batch: Message, dictionaries: Sequence[Message], url: str) -> tuple[Any, int]:
        """The record batch, after the ``dictionaries`` before it, and what it is decompressed to in bytes.

        Nothing in it has been validated: its values must not be looked at before. Raises ``FormatError``.
        """
        import pyarrow as pa

        unknown = self._unknown(dictionaries)
        for message in unknown:
            unpacked_size(self._data, message, MOST, url)
        size = unpacked_size(self._data, batch, MOST, url)
        try:
            if self._queue is None:
                self._queue = _Queue(self._data)
                self._queue.add(self._schema)
                options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=self._fields)
                self._reader = pa.ipc.open_stream(pa.PythonFile(self._queue, mode="r"), options=options)
            for message in unknown:
                self._queue.add(message)
            self._queue.add(batch)
            decoded = self._reader.read_next_batch()
        except MemoryError:  # says nothing of the shard, but the reader may have lost its place
            self._forget()
            raise
        # pyarrow raises by what is damaged: its own errors, OSError for a codec's, KeyError for a dictionary that
        # nobody wrote, UnicodeError for a name, StopIteration for an end that should not be there
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, StopIteration) as e:
            self._forget()
            raise FormatError(f"a record batch that cannot be read: {e}", url=url, offset=batch.at) from e
        for number, chain in _chains(dictionaries).items():
            if self._known.get(number, [])[: len(chain)] != chain:
                self._known[number] = chain
        if decoded.num_rows != batch.rows:
            raise FormatError(f"{decoded.num_rows} rows, declared are {batch.rows}", url=url, offset=batch.at)
        return decoded, size

    def _forget(self) -> None:
        """Begin with a new reader: what this one knows now is not known."""
        self._queue = None
        self._known = {}

    def _unknown(self, dictionaries: Sequence[Message]) -> list[Message]:
        """Those that must be fed before a batch that needs all of these: first whole ones, then what they grew by."""
        wanted: set[int] = set()
        for number, chain in _chains(dictionaries).items():
            known = self._known.get(number, [])
            if known[: len(chain)] == chain:
                continue
            wanted.update(chain[len(known) :] if chain[: len(known)] == known else chain)
        found = [message for message in dictionaries if message.at in wanted]
        return [message for message in found if not message.delta] + [message for message in found if message.delta]


def _chains(dictionaries: Sequence[Message]) -> dict[int, list[int]]:
    """Per dictionary the offsets of the messages that make it: the last whole one and what it grew by since."""
    chains: dict[int, list[int]] = {}
    for message in dictionaries:
        if not message.delta:
            chains[message.dictionary] = []
        chains.setdefault(message.dictionary, []).append(message.at)
    return chains
