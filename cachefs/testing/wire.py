"""Just enough HTTP/1.1 to pass messages on unchanged: heads, and bodies as raw pieces (RFC 9112 framing)."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

_PIECE = 1 << 20
_HEAD_LIMIT = 1 << 16


class WireError(Exception):
    """A peer closed in the middle of a message, or sent something that is not HTTP/1.1."""


@dataclass(frozen=True)
class Head:
    """Start line and header lines of one message, as received."""

    start: bytes
    headers: tuple[tuple[bytes, bytes], ...]

    def get(self, name: bytes) -> bytes | None:
        """The value of the first header of this name (any case)."""
        name = name.lower()
        return next((value for key, value in self.headers if key.lower() == name), None)

    def replace(self, *, start: bytes | None = None, **headers: bytes | None) -> Head:
        """A copy with some headers set or, given ``None``, dropped; ``_`` in a name stands for ``-``."""
        names = {key.replace("_", "-").lower().encode() for key in headers}
        kept = [(key, value) for key, value in self.headers if key.lower() not in names]
        kept += [(key.replace("_", "-").encode(), value) for key, value in headers.items() if value is not None]
        return Head(self.start if start is None else start, tuple(kept))

    @property
    def status(self) -> int:
        """The status code, when this is the head of a reply."""
        return int(self.start.split(b" ", 2)[1])

    @property
    def closes(self) -> bool:
        return (self.get(b"connection") or b"").lower() == b"close" or b"HTTP/1.0" in self.start

    def encode(self) -> bytes:
        return b"\r\n".join([self.start, *(key + b": " + value for key, value in self.headers), b"", b""])


def parse_head(raw: bytes) -> Head:
    """A head from its bytes, the empty line excluded."""
    start, *lines = raw.split(b"\r\n")
    headers = []
    for line in lines:
        key, colon, value = line.partition(b":")
        if not colon:
            raise WireError(f"not a header line: {line!r}")
        headers.append((key, value.strip()))
    return Head(start, tuple(headers))


def parse_range(value: bytes | None) -> tuple[int, int | None] | None:
    """``(start, end)`` of a ``bytes=a-b`` range, end exclusive (``None``: open); ``None`` for any other form."""
    match = re.fullmatch(rb"bytes=([0-9]+)-([0-9]*)", value or b"")
    if match is None:
        return None
    return int(match[1]), int(match[2]) + 1 if match[2] else None


class Wire:
    """One connection. Pieces that :meth:`body` yields are views of its buffer, valid until the next one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._buffer = memoryview(bytearray(_PIECE))
        self._rest = b""

    @property
    def stale(self) -> bool:
        """Whether the other side has closed a connection that lay idle."""
        try:
            return self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def head(self) -> Head | None:
        """The next head; ``None`` when the other side closed between two messages."""
        raw = self._rest
        while (end := raw.find(b"\r\n\r\n")) < 0:
            if len(raw) > _HEAD_LIMIT:
                raise WireError("a head of more than 64 KiB")
            count = await self._receive()
            if not count:
                if raw:
                    raise WireError("closed within a head")
                return None
            raw += self._buffer[:count]
        self._rest = raw[end + 4 :]
        return parse_head(raw[:end])

    async def body(self, head: Head) -> AsyncIterator[memoryview]:
        """The body that follows ``head``, in raw pieces (chunk framing included)."""
        if (head.get(b"transfer-encoding") or b"").lower().endswith(b"chunked"):
            async for piece in self._chunked():
                yield piece
        else:
            async for piece in self._exactly(int(head.get(b"content-length") or 0)):
                yield piece

    async def _exactly(self, count: int) -> AsyncIterator[memoryview]:
        while count:
            if self._rest:
                piece = memoryview(self._rest)[:count]
                self._rest = self._rest[len(piece) :]
            else:
                received = await self._receive(count)
                if not received:
                    raise WireError("closed within a body")
                piece = self._buffer[:received]
            count -= len(piece)
            yield piece

    async def _chunked(self) -> AsyncIterator[memoryview]:
        while True:
            line = await self._line()
            yield memoryview(line)
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            async for piece in self._exactly(size + 2):
                yield piece
        while (line := await self._line()) != b"\r\n":
            yield memoryview(line)
        yield memoryview(line)

    async def _line(self) -> bytes:
        while (end := self._rest.find(b"\r\n")) < 0:
            count = await self._receive()
            if not count:
                raise WireError("closed within a chunked body")
            self._rest += self._buffer[:count]
        line, self._rest = self._rest[: end + 2], self._rest[end + 2 :]
        return line

    async def _receive(self, limit: int = _PIECE) -> int:
        return await asyncio.get_running_loop().sock_recv_into(self._sock, self._buffer[:limit])

    async def send(self, data: bytes | memoryview) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def until_closed(self) -> None:
        """Wait until the other side closes; what it still sends is dropped."""
        while await self._receive():
            pass

    def close(self) -> None:
        self._sock.close()

    def reset(self) -> None:
        """Close so that the other side sees a reset, not an orderly end."""
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()
