"""A lease on a cache entry, as the client that holds it has it."""

from __future__ import annotations

import os

from . import protocol
from .bitmap import BitmapReader
from .errors import NearflashError
from .session import Session


class Lease:
    """A lease on a cache entry with its two files: the data, and the bitmap of what is present."""

    def __init__(self, session: Session, opened: protocol.Opened, data_fd: int, bitmap: BitmapReader) -> None:
        self.session = session
        self.number = opened.lease
        self.chunk_size = opened.chunk_size
        self.fd = data_fd
        self.bits = bitmap
        self._size = opened.size

    def has(self, start: int, end: int) -> bool:
        return self.first_missing(start, end) is None

    def first_missing(self, start: int, end: int) -> int | None:
        """The first chunk with bytes of ``[start, end)`` that cannot be read yet, or ``None``."""
        if self.fd < 0:
            raise NearflashError("the shard is closed")
        return self.bits.first_missing(start // self.chunk_size, -(-end // self.chunk_size))

    def present_to(self, start: int) -> int:
        """Up to where every byte from ``start`` on can be read."""
        missing = self.first_missing(start, self._size)
        return self._size if missing is None else max(start, missing * self.chunk_size)

    def close(self) -> None:
        """Close the files; the lease goes back with the session's next request. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self.bits.close()
            if self.session.pid == os.getpid():
                self.session.give_back(self.number)

    def __del__(self) -> None:
        self.close()
