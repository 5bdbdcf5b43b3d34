"""One client's connection on the daemon's side: frames in, frames and descriptors out, without blocking the loop."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..errors import CacheError
from ..frames import FD_FLAGS, FD_SPACE, FrameBuffer, received_fds
from ..protocol import Attach, Reply, Request, decode_request, encode

if TYPE_CHECKING:
    from typing_extensions import Buffer

_RECEIVE = 256 * 1024
_MOST_WAITING = 64
_MOST_WAITING_BYTES = 1 << 20
"""Requests of one client that are read ahead, and their bytes; beyond that its socket is left full."""


class ClientGone(Exception):
    """A reply could not be sent: the client closed the connection, died, or does not read. Its connection ends."""


class Arrived(NamedTuple):
    """A request that waits to be received, the bytes it takes, and the descriptor that came with it, or -1."""

    request: Request
    size: int
    fd: int


class Wire:
    """A connected non-blocking socket. ``on_gone`` is called once, when the client closed it, died, or sent garbage.

    Reading goes on while a request is worked on, so that a client that goes away is noticed in the middle of a wait.
    """

    def __init__(self, sock: socket.socket, on_gone: Callable[[str], None], *, send_timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._on_gone = on_gone
        self._send_timeout = send_timeout
        self._frames = FrameBuffer()
        self._requests: deque[Arrived] = deque()
        self._fds: list[int] = []
        self._fd = -1
        self._waiting_bytes = 0
        self._waiting: asyncio.Future[None] | None = None
        self._reading = True
        self._open = True
        self._ended = False
        self._pidfd = _pidfd(sock)
        self._loop.add_reader(sock, self._readable)
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._died)

    @property
    def unanswered(self) -> list[Request]:
        """Requests that arrived and were not received yet."""
        return [arrived.request for arrived in self._requests]

    async def receive(self) -> Request:
        """The next request. One caller at a time; cancelled by its owner when the client is gone."""
        while not self._requests:
            self._waiting = self._loop.create_future()
            await self._waiting
        self._close_fds(self.take_fd())
        request, size, self._fd = self._requests.popleft()
        self._waiting_bytes -= size
        if not self._reading and not self._ended and not self._full:
            self._reading = True
            self._loop.add_reader(self._sock, self._readable)
        return request

    def take_fd(self) -> int:
        """The descriptor that came with the request that was received last, now the caller's; -1 if there is none."""
        fd, self._fd = self._fd, -1
        return fd

    async def send(self, reply: Reply, fds: Sequence[int] = ()) -> None:
        """Send one reply with descriptors (which stay the caller's).

        Raises :class:`ClientGone`, also if the client does not read for the send timeout.
        """
        data = memoryview(encode(reply))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self._send_now(data, ancillary)
        if not sent:
            async with self._patience():
                while not sent:
                    await self._writable()
                    sent = self._send_now(data, ancillary)
        await self._send_all(data[sent:])  # the descriptors went with the first byte

    async def send_raw(self, data: Buffer) -> None:
        """Send bytes outside any frame; errors as :meth:`send`."""
        await self._send_all(memoryview(data).cast("B"))

    async def _send_all(self, data: memoryview) -> None:
        while data:
            sent = self._send_now(data, [])
            if not sent:
                async with self._patience():  # anew each time: a slow client is one that still reads
                    await self._writable()
            elif sent < len(data):
                await asyncio.sleep(0)  # others have their turn
            data = data[sent:]

    def _send_now(self, data: memoryview, ancillary: list[tuple[int, int, array.array[int]]]) -> int:
        try:
            return self._sock.sendmsg([data], ancillary)
        except BlockingIOError:
            return 0
        except OSError as e:
            raise ClientGone(str(e)) from e

    @asynccontextmanager
    async def _patience(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._send_timeout):
                yield
        except TimeoutError as e:
            raise ClientGone(f"it has read nothing for {self._send_timeout:g} s") from e
        except OSError as e:
            raise ClientGone(str(e)) from e

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._ended = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        self._close_fds(self.take_fd(), *self._fds, *(arrived.fd for arrived in self._requests))
        self._fds.clear()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)

    async def _writable(self) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_writer(self._sock, lambda: None if future.done() else future.set_result(None))
        try:
            await future
        finally:
            self._loop.remove_writer(self._sock)

    @property
    def _full(self) -> bool:
        return len(self._requests) >= _MOST_WAITING or self._waiting_bytes >= _MOST_WAITING_BYTES

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(_RECEIVE, FD_SPACE, FD_FLAGS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            self._gone(f"reading failed: {e}")
            return
        self._fds += received_fds(ancillary)
        if not data:
            self._gone("")
            return
        try:
            self._frames.feed(data)
            for body in self._frames.frames():
                request = decode_request(body)
                fd = self._fds.pop(0) if isinstance(request, Attach) and self._fds else -1
                self._requests.append(Arrived(request, len(body), fd))
                self._waiting_bytes += len(body)
        except CacheError as e:
            self._gone(e.what)
            return
        if len(self._fds) > 1:  # of a request that is still on its way there is one at most
            self._gone("descriptors that belong to no request")
            return
        if self._full:
            self._reading = False
            self._loop.remove_reader(self._sock)
        if self._requests and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @staticmethod
    def _close_fds(*fds: int) -> None:
        for fd in fds:
            if fd >= 0:
                os.close(fd)

    def _died(self) -> None:
        self._gone("")  # its socket may live on in a child that inherited it

    def _gone(self, why: str) -> None:
        if not self._ended:
            self._ended = True
            self._loop.remove_reader(self._sock)
            if self._pidfd >= 0:
                self._loop.remove_reader(self._pidfd)
            self._reading = False
            self._on_gone(why)


def _pidfd(sock: socket.socket) -> int:
    """A descriptor that becomes readable when the peer's process ends; -1 where the system has none."""
    if not (hasattr(os, "pidfd_open") and hasattr(socket, "SO_PEERCRED")):
        return -1
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if pid <= 0:  # another pid namespace
        return -1
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return -1
