"""One process's session with the daemon: a few pooled connections, restarts of the daemon, leases to give back.

Requests are idempotent, so a call whose connection breaks is made again over a new one, after starting the daemon if
nobody listens any more. Calls of several threads use a connection each.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from . import protocol
from .clock import SYSTEM_CLOCK, Clock
from .config import Settings
from .connection import Connection, Lost, NotAnswered, connect_socket
from .errors import DaemonUnavailable, NearflashError, ProtocolMismatch
from .launch import crowd_lock, start_daemon
from .limits import system_calls

_IDLE_CONNECTIONS = 4
_ATTEMPTS = 5
"""A request is tried on at least this many connections, and for ``connect_timeout`` seconds, before the daemon counts
as crashing on it."""
_STARTS = 3
"""A daemon that dies while it starts (a kill, not an error of its own, which it reports) is started this often."""
REPLY_MARGIN = 30.0
"""Seconds beyond the daemon's own deadline after which it counts as hung."""
_FLUSH = 5.0
"""Seconds that telling what was noted may take where nothing depends on it."""
_LEAST = 0.001
"""A socket's time limit of 0 would mean another thing."""
_ROUNDING = 0.001
"""A wait may end this much before the moment that was asked for."""

T = TypeVar("T")

log = logging.getLogger("cachefs")


class Expired(Exception):
    """The caller's own deadline has passed. Never reaches a user: whoever set it knows what for, and says so."""


class Session:
    """Belongs to the process that made it (``pid``); a forked child makes its own."""

    def __init__(self, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.pid = os.getpid()
        self.ident = secrets.token_hex(16)
        self.clock = clock
        self._settings = settings
        self._hello = protocol.Hello(protocol.VERSIONS, self.ident, self.pid, settings.origin)
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._given_back: deque[int] = deque()
        self._paused: deque[str] = deque()
        self._withdrawn: deque[str] = deque()
        self._closed = False
        self._warned: set[str] = set()

    def first_warning(self, kind: str) -> bool:
        """True the first time that this process meets this kind of trouble: one warning, not one per read."""
        with self._lock:
            first = kind not in self._warned
            self._warned.add(kind)
        return first

    def call(
        self,
        request: protocol.Request,
        *,
        timeout: float | None = None,
        until: float = math.inf,
        fds: Sequence[int] = (),
        version: int = 0,
    ) -> tuple[protocol.Reply, list[int]]:
        """One request, one reply; the descriptors that go with it, and those that come, are the caller's.

        ``timeout`` is how long the daemon may be silent before it counts as hung (default: its own deadline for
        requests to the origin, and a margin). Raises :class:`NotAnswered` then, and what the daemon answers.
        ``until`` is a moment of the session's clock at which the call ends, be it connecting, starting a daemon,
        sending or receiving: :class:`Expired`.
        ``version`` is the protocol that the call needs: :class:`ProtocolMismatch` from a daemon that speaks less.
        """

        def receive(connection: Connection, seconds: float) -> tuple[protocol.Reply, list[int]]:
            return connection.receive(timeout=seconds)

        return self.exchange(request, receive, timeout=timeout, until=until, fds=fds, version=version)

    def exchange(
        self,
        request: protocol.Request,
        receive: Callable[[Connection, float], T],
        *,
        timeout: float | None = None,
        until: float = math.inf,
        fds: Sequence[int] = (),
        version: int = 0,
    ) -> T:
        """Send a request and let ``receive(connection, seconds)`` read all of its reply; again if the daemon dies."""
        seconds = self._settings.request_deadline + REPLY_MARGIN if timeout is None else timeout
        try:
            return self._exchange(request, receive, seconds, until, fds, version)
        except DaemonUnavailable as e:
            if self.clock.monotonic() >= until - _ROUNDING:
                raise Expired from e
            raise

    def _exchange(
        self,
        request: protocol.Request,
        receive: Callable[[Connection, float], T],
        seconds: float,
        until: float,
        fds: Sequence[int],
        version: int,
    ) -> T:
        began, tries = self.clock.monotonic(), 0
        while True:
            tries += 1
            connection = self._checkout(until)
            if version and connection.version < version:
                spoken = connection.version
                self._checkin(connection)
                raise ProtocolMismatch(f"the daemon speaks protocol {spoken}, this call needs {version}")
            connection.until = until
            try:
                self._flush(connection, seconds)
                self._take_back(connection, seconds)
                connection.send(request, timeout=seconds, fds=fds)
                return receive(connection, seconds)
            except Lost as e:
                self.drop_connections()
                if tries >= _ATTEMPTS and self.clock.monotonic() - began >= self._settings.connect_timeout:
                    what = f"the daemon went away {tries} times during one request"
                    raise DaemonUnavailable(what, url=str(self._settings.cache_dir), hint="see its daemon.log") from e
            finally:
                connection.until = math.inf
                self._checkin(connection)

    def give_back(self, lease: int) -> None:
        """Note a lease to give back with the next request. Takes no lock: finalizers call it."""
        self._given_back.append(lease)

    def pause(self, plan: str) -> None:
        """Note a plan of which nothing is read for now, to be told with the next request or :meth:`flush`. Takes no
        lock: finalizers call it."""
        self._paused.append(plan)

    def withdraw(self, plan: str) -> None:
        """Note a plan that is over, to be told with the next request or :meth:`withdraw_now`. Takes no lock:
        finalizers call it."""
        self._withdrawn.append(plan)

    def flush(self) -> None:
        """Tell of noted leases and paused plans now, if a connection is idle; what cannot be told goes with the next
        request.

        Never starts a daemon, never raises, waits for no lock and no reply: finalizers call it, in whatever thread
        they run, also in one that is inside one of these methods.
        """
        connection = self._idle_now()
        if connection is not None:
            self._use(connection, self._flush)

    def withdraw_now(self) -> None:
        """Tell of noted plans that are over, if a connection is idle, and wait a little until the daemon has taken
        them back. Never starts a daemon, never raises; what cannot be told goes with the next request."""
        connection = self._idle_now()
        if connection is not None:
            self._use(connection, self._take_back)

    def drop_connections(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.retire()

    def abandon(self) -> None:
        """In a forked child: close our copies of the parent's sockets. Takes no lock, which the fork may have held."""
        for connection in self._idle:
            connection.close()
        self._idle = []

    def close(self) -> None:
        """End the session: the daemon takes back its leases."""
        self._closed = True
        self.drop_connections()

    def _idle_now(self) -> Connection | None:
        """An idle connection, if there is one and nobody holds the lock: it may be this very thread."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._idle.pop() if self._idle else None
        finally:
            self._lock.release()

    def _use(self, connection: Connection, tell: Callable[[Connection, float], None]) -> None:
        try:
            tell(connection, _FLUSH)
        except Lost:
            pass  # no daemon, no lease and no plan; the next request finds that out for the other connections
        except NearflashError as e:
            log.debug("the daemon was not told what was noted: %s", e)
        finally:
            self._checkin(connection)

    def _flush(self, connection: Connection, seconds: float) -> None:
        if leases := _all_of(self._given_back):
            with _kept(self._given_back, leases):
                connection.send(protocol.Release(leases), timeout=seconds)
        if (names := _all_of(self._paused)) and connection.version >= protocol.WITH_PLANS:
            with _kept(self._paused, names):
                connection.send(protocol.Pause(names), timeout=seconds)

    def _take_back(self, connection: Connection, seconds: float) -> None:
        names = _all_of(self._withdrawn)
        with _kept(self._withdrawn, names):
            while names and connection.version >= protocol.WITH_PLANS:
                connection.send(protocol.Plan(names[-1], ""), timeout=seconds)
                try:
                    connection.receive(timeout=seconds)
                except NotAnswered:
                    raise
                except NearflashError as e:  # no reason for the request that it goes with to fail
                    log.debug("plan %s was not taken back: %s", names[-1], e)
                names.pop()

    def _checkout(self, until: float) -> Connection:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return self._connect(until)

    def _checkin(self, connection: Connection) -> None:
        with self._lock:
            if connection.settled and not self._closed and len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.retire()

    def _connect(self, until: float) -> Connection:
        """A new connection; starts the daemon if nobody listens and settings allow it."""
        with system_calls("reaching the daemon", str(self._settings.socket)):
            return self._reach(until)

    def _reach(self, until: float) -> Connection:
        patience = self.clock.monotonic() + self._settings.connect_timeout
        deadline = min(patience, until)
        connection = self._try_connect(deadline)
        if connection is not None:
            return connection
        if not self._settings.autostart:
            hint = f"start it: cachefs daemon --cache-dir {self._settings.cache_dir}"
            raise DaemonUnavailable("no daemon answers", url=str(self._settings.socket), hint=hint)
        pause, starts = 0.01, 0
        with crowd_lock(self._settings, self.clock, until=deadline):
            while self.clock.monotonic() < deadline:
                connection = self._try_connect(deadline)
                if connection is not None:
                    return connection
                starts += 1
                now = self.clock.monotonic()
                try:
                    start_daemon(self._settings, timeout=deadline - now, grace=patience - now, clock=self.clock)
                except DaemonUnavailable:
                    if starts >= _STARTS:
                        raise
                connection = self._try_connect(deadline)
                if connection is not None:
                    return connection
                self.clock.sleep(
                    min(pause, max(0.0, deadline - self.clock.monotonic()))
                )  # the one that holds the cache directory is about to serve, or to end
                pause = min(1.0, pause * 2)
        what = f"no daemon could be reached within {self._settings.connect_timeout:.0f} s"
        raise DaemonUnavailable(what, url=str(self._settings.socket), hint="see daemon.log in the cache directory")

    def _try_connect(self, deadline: float) -> Connection | None:
        try:
            timeout = max(_LEAST, deadline - self.clock.monotonic())
            connection, _ = connect_socket(self._settings.socket, self._hello, timeout=timeout, clock=self.clock)
        except Lost:
            return None
        return connection


@contextmanager
def _kept(noted: deque[T], taken: list[T]) -> Iterator[None]:
    """Noted again if the daemon is not told of them after all; one that is gone needs not be told."""
    try:
        yield
    except Lost:
        raise
    except BaseException:
        noted.extend(taken)
        raise


def _all_of(noted: deque[T]) -> list[T]:
    """What is in a deque that others may fill meanwhile, taken out of it."""
    out: list[T] = []
    while True:
        try:
            out.append(noted.popleft())
        except IndexError:
            return out
