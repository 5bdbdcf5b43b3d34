"""A lease on a cache entry, as the client that holds it has it."""

from __future__ import annotations

import os

from . import protocol
from .attachments import MOST_BYTES
from .bitmap import BitmapReader
from .connection import Connection, unexpected
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

    def attachment(self, name: str, until: float) -> tuple[bool, bytes | None]:
        """Whether the daemon knows the lease, and what is attached to the entry under this name, if anything.

        Raises ``Expired`` at ``until``.
        """

        def receive(connection: Connection, seconds: float) -> tuple[bool, bytes | None]:
            reply, _ = connection.receive(timeout=seconds)
            if isinstance(reply, protocol.Payload) and reply.size <= MOST_BYTES:
                data = bytearray(reply.size)
                connection.receive_payload(memoryview(data), timeout=seconds)
                return True, bytes(data)
            if not isinstance(reply, protocol.Attached):
                raise unexpected(reply)
            return reply.known, None

        return self.session.exchange(protocol.Attachment(self.number, name), receive, until=until)

    def attach(self, name: str, fd: int, until: float) -> bool:
        """Attach a sealed file's bytes if the cache takes them; False if the daemon does not know the lease."""
        reply, _ = self.session.call(protocol.Attach(self.number, name), until=until, fds=(fd,))
        if not isinstance(reply, protocol.Attached):
            raise unexpected(reply)
        return reply.known

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
