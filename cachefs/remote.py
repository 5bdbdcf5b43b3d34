"""An object of an object store, open through the daemon: read from the cache's file, or passed through."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from . import protocol
from .attachments import MOST_BYTES, check_name
from .bitmap import BitmapReader
from .connection import Connection, unexpected
from .errors import CacheError, CacheFull, DeadlineExceeded, DiskFault, NearflashError
from .filling import Arrivals, Source
from .lease import Lease
from .limits import private_limit, system_calls
from .maps import follows_file, private_map
from .passthrough import PassThrough
from .progress import human_bytes
from .redaction import redact
from .sealed import sealed_file
from .session import REPLY_MARGIN, Expired, Session
from .shard import FillingView, Shard
from .waiting import OpenArgs, Watch

if TYPE_CHECKING:
    from typing_extensions import Buffer

_LAST_WORD = 0.1
"""Seconds beyond the deadline for the reply of a daemon that waits until the deadline itself; without them every wait
that ends by its deadline would cost the connection, too."""

_TRIES = 2
"""How often an entry is asked for what need not succeed: once more after the object was opened anew."""
_MORE_ROOM = "raise NEARFLASH_QUOTA, or NEARFLASH_PASSTHROUGH_BYTES if the memory is there"

log = logging.getLogger("cachefs")


class RemoteShard(Shard):
    """See :class:`Shard`. Goes on by itself after a restart of the daemon, in a forked child, or without a cache."""

    def __init__(self, session: Callable[[], Session], args: OpenArgs) -> None:
        self._session = session
        self._args = args
        self._replaced: list[Lease] = []
        self._closed = False
        self.url = args.url
        until = math.inf if args.deadline is None else session().clock.monotonic() + args.deadline
        try:
            with system_calls("opening it", args.url):
                self._open(until)
        except Expired as e:
            raise DeadlineExceeded(f"not open after {args.deadline:g} s", url=args.url) from e

    @property
    def cached(self) -> bool:
        return isinstance(self._source, Lease)

    @property
    def uncached_reason(self) -> str:
        return "" if self.cached else self._reason

    def view(self) -> memoryview:
        return private_map(self._ready(0, self.size).fd, self.size, self.url)

    def filling(self) -> FillingView:
        if not follows_file():
            return super().filling()
        self._check_open()
        source = self._source
        view = private_map(source.fd, self.size, self.url)
        if source.has(0, self.size):
            return FillingView(view, self.url)
        return FillingView(view, self.url, Arrivals(self.url, source, self._ready).arrive)

    def wait(self, start: int, end: int) -> None:
        self.check_range(start, end)
        self._ready(start, end)

    def fileno(self) -> int:
        self._check_open()
        return self._source.fd

    def attachment(self, name: str) -> bytes | None:
        check_name(name, self.url)
        found: list[bytes | None] = [None]

        def ask(lease: Lease, until: float) -> bool:
            known, found[0] = lease.attachment(name, until)
            return known

        self._at_entry(ask, "reading an attachment of it")
        return found[0]

    def attach(self, name: str, data: Buffer) -> None:
        check_name(name, self.url)
        self._check_open()
        if memoryview(data).nbytes > MOST_BYTES:
            return

        def ask(lease: Lease, until: float) -> bool:
            with sealed_file(data) as fd:
                return lease.attach(name, fd, until)

        self._at_entry(ask, "attaching to it")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for source in (self._source, *self._replaced):
            source.close()
        if isinstance(self._source, Lease) and self._source.session.pid == os.getpid():
            self._source.session.flush()  # that of the lease: finalizers come here, and may take no lock for another

    def _ready(self, start: int, end: int, accept: Callable[[Source], None] = lambda _: None) -> Lease | PassThrough:
        """The source that holds ``[start, end)``, once it does. ``accept`` is shown each that is expected to."""
        self._check_open()
        source = self._source
        accept(source)
        if source.has(start, end):
            return source
        watch = Watch(self._args, self._session().clock.monotonic())
        try:
            with system_calls("waiting for it", self.url):
                return self._wait_for(start, end, watch, accept)
        except Expired as e:
            raise watch.error() from e

    def _wait_for(self, start: int, end: int, watch: Watch, accept: Callable[[Source], None]) -> Lease | PassThrough:
        while not (source := self._source).has(start, end):
            accept(source)
            if isinstance(source, PassThrough):
                self._require_memory(source.bytes_with(start, end))
                source.ensure(start, end, until=watch.until)
            elif source.session is not self._session() or source.bits.superseded:
                self._open(watch.until)
            else:
                self._wait_once(source, start, end, watch)
        accept(source)
        return source

    def _wait_once(self, source: Lease, start: int, end: int, watch: Watch) -> None:
        first = source.first_missing(start, end)
        if first is None:
            return
        seconds = watch.window()
        request = protocol.Wait(source.number, first, -(-end // source.chunk_size), seconds)
        try:
            until = watch.until + _LAST_WORD
            reply, _ = source.session.call(request, timeout=seconds + REPLY_MARGIN, until=until)
        except (CacheFull, DiskFault) as e:
            self._pass_through(e)
            return
        if not isinstance(reply, protocol.Waited):
            raise unexpected(reply)
        watch.note(reply.present, source.session.clock.monotonic())
        if not reply.known or (reply.done and not source.has(start, end)):
            self._open(watch.until)

    def _open(self, until: float) -> None:
        """Ask the daemon for the object; what was opened before stays readable until the shard is closed."""
        session = self._session()
        args = self._args
        reply, fds = session.call(protocol.Open(args.url, args.version, args.size), until=until)
        try:
            if not isinstance(reply, protocol.Opened):
                raise unexpected(reply)
            if not reply.lease:
                self._settle(reply)
                self._pass_through(protocol.Failed(reply.kind, reply.reason, args.url).error())
                return
            if len(fds) != 2:
                raise CacheError(f"the daemon sent {len(fds)} descriptors instead of 2", url=args.url)
            source = Lease(session, reply, fds[0], BitmapReader(fds[1]))
            fds.pop(0)
        except BaseException:
            if isinstance(reply, protocol.Opened) and reply.lease:
                session.give_back(reply.lease)
            raise
        finally:
            for fd in fds:
                os.close(fd)
        self._settle(reply)
        self._replace(source)

    def _at_entry(self, ask: Callable[[Lease, float], bool], doing: str) -> None:
        """Ask something that need not succeed of the entry's daemon; opens the object again if that is a new one."""
        self._check_open()
        session = self._session()
        until = math.inf if self._args.deadline is None else session.clock.monotonic() + self._args.deadline
        try:
            with system_calls(doing, self.url):
                for _ in range(_TRIES):
                    source = self._source
                    if not isinstance(source, Lease):
                        return
                    if source.session is session and not source.bits.superseded and ask(source, until):
                        return
                    self._open(until)
        except (NearflashError, Expired) as e:
            log.debug("%s: %s failed: %s", redact(self.url), doing, e)

    def _settle(self, opened: protocol.Opened) -> None:
        """Bind the shard to the version that was opened first; later openings ask for exactly that one."""
        self.size = opened.size
        self.version = opened.version
        self._piece = opened.chunk_size
        self._args = replace(self._args, version=opened.version, size=opened.size)

    def _pass_through(self, reason: NearflashError) -> None:
        if self._session().first_warning(type(reason).__name__):
            log.warning("%s is read past the cache: %s", redact(self.url), reason.what)
        self._reason = reason.what
        self._private = private_limit() if self._args.private is None else self._args.private
        self._replace(PassThrough(self.size, self._piece, self._fetch, self._session().clock))

    def _require_memory(self, need: int) -> None:
        if need > self._private:
            size, most = human_bytes(self.size), human_bytes(self._private)
            what = f"its {size} do not fit into the cache ({self._reason}), and past it {most} may be kept in memory"
            raise CacheFull(what, url=self.url, hint=_MORE_ROOM)

    def _replace(self, source: Lease | PassThrough) -> None:
        old = getattr(self, "_source", None)
        if isinstance(old, Lease):
            self._replaced.append(old)  # another thread may be reading from its descriptor
        self._source: Lease | PassThrough = source

    def _fetch(self, start: int, end: int, target: memoryview, until: float) -> None:
        request = protocol.Fetch(self.url, self.version, self.size, start, end)
        fetch_into(self._session(), request, target, until=until)

    def _check_open(self) -> None:
        if self._closed:
            raise NearflashError("the shard is closed", url=self.url)


def fetch_into(session: Session, request: protocol.Fetch, target: memoryview, *, until: float = math.inf) -> None:
    """Fill ``target`` with the bytes that ``request`` names, past the cache. Raises ``Expired`` at ``until``."""

    def receive(connection: Connection, seconds: float) -> None:
        reply, _ = connection.receive(timeout=seconds)
        if not isinstance(reply, protocol.Payload) or reply.size != len(target):
            raise unexpected(reply)
        connection.receive_payload(target, timeout=seconds)

    session.exchange(request, receive, until=until)
