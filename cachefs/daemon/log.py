"""The daemon's log: one JSON record a line in ``<cache_dir>/daemon.log``, bounded in size, free of secrets.

Records hold names, sizes and error texts that the daemon chose; never settings, requests or an origin as a whole.
Signatures and passwords in URLs are cut out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from pathlib import Path

import aiofiles
import msgspec

from ..clock import Clock
from ..redaction import redact

LOG_NAME = "daemon.log"
_FILE_BYTES = 256 * 1024
MOST_LOG_BYTES = 2 * _FILE_BYTES
"""What the log and its predecessor take together at most."""
_BATCH_BYTES = 64 * 1024
_MOST_QUEUED_BYTES = 1 << 20
_FIELD_CHARS = 2048

Field = str | int | float | bool | None


class Log:
    """Collects records and writes them from one task, so that nobody waits for the disk.

    A log that cannot be written (full or failed disk) costs records, never the daemon: lost ones are counted in the
    next record that gets through. ``echo`` also writes to standard error.
    """

    def __init__(self, folder: Path, clock: Clock, *, echo: bool = False) -> None:
        self._path = folder / LOG_NAME
        self._clock = clock
        self._echo = echo
        self._queue: deque[bytes] = deque()
        self.queued_bytes = 0
        """Bytes of records that are not written yet."""
        self._wake = asyncio.Event()
        self._lost = 0
        self._closing = False

    def record(self, event: str, **fields: Field) -> None:
        """Note an event. Callable from the loop's thread only; returns at once."""
        if self.queued_bytes >= _MOST_QUEUED_BYTES:
            self._lost += 1
            return
        values: dict[str, Field] = {"time": round(self._clock.time(), 3), "event": event}
        values.update({name: safe_text(value) if isinstance(value, str) else value for name, value in fields.items()})
        if self._lost:
            values["lost_records"], self._lost = self._lost, 0
        line = msgspec.json.encode(values) + b"\n"
        self._queue.append(line)
        self.queued_bytes += len(line)
        self._wake.set()
        if self._echo:
            with contextlib.suppress(OSError):  # a closed terminal
                sys.stderr.write(line.decode())
                sys.stderr.flush()

    async def run(self) -> None:
        """Write records until :meth:`close`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while lines := self._batch():
                try:
                    await self._write(b"".join(lines))
                except OSError:
                    self._lost += len(lines)
            if self._closing and not self._queue:
                return

    def close(self) -> None:
        """Let :meth:`run` return once all is written."""
        self._closing = True
        self._wake.set()

    def _batch(self) -> list[bytes]:
        """The next records to write, taken from the queue; together far less than a file may hold."""
        lines: list[bytes] = []
        size = 0
        while self._queue and (not lines or size + len(self._queue[0]) <= _BATCH_BYTES):
            lines.append(self._queue.popleft())
            size += len(lines[-1])
        self.queued_bytes -= size
        return lines

    async def _write(self, data: bytes) -> None:
        if await asyncio.to_thread(_size_of, self._path) + len(data) > _FILE_BYTES:
            await asyncio.to_thread(os.replace, self._path, self._path.with_suffix(".log.1"))
        async with aiofiles.open(self._path, "ab", opener=private_opener) as file:
            await file.write(data)


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def safe_text(text: str) -> str:
    """One line of bounded length, without what is nobody's business."""
    line = redact(" ".join(text.split()))
    return line if len(line) <= _FIELD_CHARS else line[: _FIELD_CHARS - 1] + "\u2026"


def private_opener(path: str, flags: int) -> int:
    """For ``open``: a new file is of mode 0600, a symbolic link is refused."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
