"""The daemon's log: one JSON record a line in ``<cache_dir>/daemon.log``, bounded in size, free of secrets.

Records hold names, sizes and error texts that the daemon chose; never settings, requests or an origin as a whole.
The query part of http(s) URLs is cut off, since presigned ones carry a signature.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections import deque
from pathlib import Path

import aiofiles
import msgspec

from ..clock import Clock

LOG_NAME = "daemon.log"
_MOST_BYTES = 1 << 20
_MOST_QUEUED = 10_000

_QUERY = re.compile(r"(https?://[^\s?]+)\?\S*", re.IGNORECASE)

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
        self._wake = asyncio.Event()
        self._lost = 0
        self._closing = False

    def record(self, event: str, **fields: Field) -> None:
        """Note an event. Callable from the loop's thread only; returns at once."""
        if len(self._queue) >= _MOST_QUEUED:
            self._lost += 1
            return
        values: dict[str, Field] = {"time": round(self._clock.time(), 3), "event": event}
        values.update({name: safe_text(value) if isinstance(value, str) else value for name, value in fields.items()})
        if self._lost:
            values["lost_records"], self._lost = self._lost, 0
        line = msgspec.json.encode(values) + b"\n"
        self._queue.append(line)
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
            lines = list(self._queue)
            self._queue.clear()
            if lines:
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

    async def _write(self, data: bytes) -> None:
        async with aiofiles.open(self._path, "ab", opener=private_opener) as file:
            await file.write(data)
            size = await file.tell()
        if size > _MOST_BYTES:
            await asyncio.to_thread(os.replace, self._path, self._path.with_suffix(".log.1"))


def safe_text(text: str) -> str:
    """One line, and without the query of http(s) URLs."""
    return _QUERY.sub(r"\1", " ".join(text.split()))


def private_opener(path: str, flags: int) -> int:
    """For ``open``: a new file is of mode 0600, a symbolic link is refused."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
