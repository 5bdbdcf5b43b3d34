"""Messages in a byte stream: each is a 4-byte little-endian length and its body; and descriptors beside the stream."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterator

from .errors import CacheError, ConfigError

MAX_FRAME = 4 << 20
"""Bytes; a longer frame is garbage."""

_LENGTH = struct.Struct("<I")
_MOST_FDS = 8
FD_SPACE = socket.CMSG_SPACE(_MOST_FDS * struct.calcsize("i")) if hasattr(socket, "CMSG_SPACE") else 0
FD_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
"""For ``recvmsg``: room for descriptors, which no child process inherits."""


def frame(body: bytes) -> bytes:
    """One message's bytes. Raises :class:`ConfigError` if it is too long to be sent."""
    if len(body) > MAX_FRAME:
        raise ConfigError(f"a message of {len(body)} bytes; at most {MAX_FRAME} fit into one")
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Cuts a byte stream into frames; what is left over stays for the next bytes."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def frames(self) -> Iterator[bytes]:
        """Complete frames' bodies so far. Raises :class:`CacheError` for a length beyond the limit."""
        while (body := self.next_frame()) is not None:
            yield body

    def next_frame(self) -> bytes | None:
        """The next complete frame's body, or ``None``."""
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > self._limit:
            raise CacheError(f"a frame of {length} bytes; at most {self._limit} are allowed")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        body = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return body

    def take_raw(self, most: int) -> bytes:
        """Up to ``most`` bytes that are left over, outside any frame."""
        raw = bytes(self._bytes[:most])
        del self._bytes[:most]
        return raw


def received_fds(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that ``recvmsg`` gave, now the caller's."""
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if not FD_FLAGS:
        for fd in fds:
            os.set_inheritable(fd, False)
    return fds.tolist()
