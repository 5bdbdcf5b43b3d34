"""One connection of a client to the daemon's control socket: frames, descriptors and raw bytes, synchronously."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import socket
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .clock import SYSTEM_CLOCK, Clock
from .errors import CacheError, DaemonUnavailable, Denied, ProtocolMismatch
from .frames import FD_FLAGS, FD_SPACE, FrameBuffer, received_fds
from .protocol import (
    VERSIONS,
    Failed,
    Hello,
    Opened,
    Pause,
    Payload,
    Release,
    Reply,
    Request,
    Welcome,
    decode_reply,
    encode,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

_RECEIVE = 64 * 1024
_RETIRE_SECONDS = 5.0


class Lost(Exception):
    """The daemon went away: a closed or broken socket. Never reaches a user; a session asks again."""


class NotAnswered(DaemonUnavailable):
    """The daemon is there, and silent for longer than it may be."""


class Connection:
    """A connected socket, used by one thread at a time."""

    def __init__(self, sock: socket.socket, clock: Clock = SYSTEM_CLOCK) -> None:
        self.until = math.inf
        """The moment (monotonic) at which sending and receiving end, however long the daemon may be silent."""
        self.version = VERSIONS[0]
        """Of the protocol that the daemon agreed to."""
        self._clock = clock
        self._sock = sock
        weakref.finalize(self, sock.close)  # a client that is dropped without a close is no mistake worth a warning
        self._frames = FrameBuffer()
        self._timeout: float | None = None
        self._fresh_lease = False
        self._cut = False
        self.settled = True
        """Every reply was read to its end, so that another request may be sent; otherwise only ``close`` is left."""

    def send(self, request: Request, *, timeout: float, fds: Sequence[int] = ()) -> None:
        """Send a request, with descriptors that stay the caller's.

        Raises :class:`Lost`, :class:`NotAnswered` when the daemon reads nothing for ``timeout`` seconds.
        Here and below a moment :attr:`until` that is nearer, or has passed, ends the call as well.
        """
        frame = encode(request)
        self.settled = False
        self._bound(timeout)
        try:
            sent = socket.send_fds(self._sock, [frame], fds) if fds else 0
            self._sock.sendall(memoryview(frame)[sent:])
        except TimeoutError as e:
            raise _silent(timeout) from e
        except OSError as e:
            raise Lost from e
        self._fresh_lease = False
        self.settled = isinstance(request, Release | Pause)

    def receive(self, *, timeout: float) -> tuple[Reply, list[int]]:
        """The next reply and the descriptors that came with it, owned by the caller.

        Raises the daemon's error for :class:`Failed`, :class:`Lost`, :class:`NotAnswered` when nothing arrives
        for ``timeout`` seconds, and ``OSError`` (EMFILE) if this process has no room for the descriptors; a lease that
        came with them has then been given back.
        """
        fds: list[int] = []
        self._cut = False
        try:
            reply = self._receive(fds, timeout)
            if isinstance(reply, Failed):
                raise reply.error()
            if self._cut:
                if isinstance(reply, Opened) and reply.lease:
                    self.send(Release([reply.lease]), timeout=timeout)
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return reply, fds

    def _receive(self, fds: list[int], timeout: float) -> Reply:
        while (body := self._frames.next_frame()) is None:
            self._bound(timeout)
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(_RECEIVE, FD_SPACE, FD_FLAGS)
            except TimeoutError as e:
                raise _silent(timeout) from e
            except OSError as e:
                raise Lost from e
            fds += received_fds(ancillary)
            self._cut |= bool(flags & _CUT)
            if not data:
                raise Lost
            self._frames.feed(data)
        reply = decode_reply(body)
        self._fresh_lease = isinstance(reply, Opened) and reply.lease != 0
        self.settled = not isinstance(reply, Payload) and getattr(reply, "last", True)
        return reply

    def receive_payload(self, target: memoryview, *, timeout: float) -> None:
        """Fill ``target`` with the raw bytes that follow a :class:`Payload`."""
        head = self._frames.take_raw(len(target))
        got = len(head)
        target[:got] = head
        while got < len(target):
            self._bound(timeout)
            try:
                count = self._sock.recv_into(target[got:])
            except TimeoutError as e:
                raise _silent(timeout) from e
            except OSError as e:
                raise Lost from e
            if not count:
                raise Lost
            got += count
        self.settled = True

    def retire(self) -> None:
        """Close a settled connection and keep what it was given; :meth:`close` gives back the lease of a last reply."""
        if self._fresh_lease and self.settled:
            with contextlib.suppress(Lost, NotAnswered):  # no daemon, no lease
                self.send(Release([]), timeout=_RETIRE_SECONDS)
        self.close()

    def close(self) -> None:
        self._sock.close()

    def _bound(self, timeout: float) -> None:
        if self.until < math.inf:
            left = self.until - self._clock.monotonic()
            if left <= 0:
                raise _silent(timeout)
            timeout = min(timeout, left)
        if timeout != self._timeout:  # each change is a system call
            self._sock.settimeout(timeout)
            self._timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_CUT = getattr(socket, "MSG_CTRUNC", 0)


def connect_socket(
    path: Path, hello: Hello, *, timeout: float, clock: Clock = SYSTEM_CLOCK
) -> tuple[Connection, Welcome]:
    """Connect and agree on a protocol version.

    Raises :class:`Lost` where nobody listens, :class:`Denied` where the listener
    belongs to another user (it would be told our credentials), :class:`ProtocolMismatch` where no version is common.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise DaemonUnavailable("this platform has no Unix sockets", url=str(path))
    deadline = clock.monotonic() + timeout
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        try:
            sock.connect(os.fspath(path))
        except PermissionError as e:
            raise Denied("this user may not use the daemon's socket", url=str(path), hint=_OTHER_SOCKET) from e
        except TimeoutError as e:
            raise _silent(timeout) from e
        except OSError as e:
            raise Lost from e
        _check_owner(sock, path)
        connection = Connection(sock, clock)
        connection.send(hello, timeout=max(0.001, deadline - clock.monotonic()))
        welcome, _ = connection.receive(timeout=max(0.001, deadline - clock.monotonic()))
        if not isinstance(welcome, Welcome) or welcome.version not in VERSIONS:
            raise ProtocolMismatch("the daemon answers in another protocol", url=str(path), hint="cachefs stop")
        connection.version = welcome.version
    except BaseException:
        sock.close()
        raise
    return connection, welcome


_OTHER_SOCKET = "set NEARFLASH_SOCKET or XDG_RUNTIME_DIR to a place of your own"


def _check_owner(sock: socket.socket, path: Path) -> None:
    """Only this user's or root's daemon may learn our credentials; anybody can make a folder in /tmp."""
    if not hasattr(socket, "SO_PEERCRED"):
        return
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if uid not in (os.geteuid(), 0):
        raise Denied(f"the daemon there belongs to another user (uid {uid})", url=str(path), hint=_OTHER_SOCKET)


def unexpected(reply: Reply) -> CacheError:
    """The error for a reply that does not belong to the request."""
    return CacheError(f"the daemon answered with {type(reply).__name__}", hint="use one nearflash version for both")


def _silent(timeout: float) -> NotAnswered:
    return NotAnswered(f"the daemon has not answered for {timeout:g} s", hint="see daemon.log in its cache dir")
