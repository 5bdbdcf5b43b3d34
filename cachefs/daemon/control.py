"""The control socket: accepts clients, answers their requests one by one, drops what a client held when it is gone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import aclosing
from itertools import islice
from pathlib import Path
from typing import TypeVar

from .. import protocol
from ..clock import Clock
from ..errors import CacheError, NearflashError, ProtocolMismatch
from ..flash import Entry
from ..metrics import Metrics
from ..protocol import PAGE_ITEMS
from .engine import Engine
from .log import Log
from .prefetch import Prefetcher, Wish
from .sessions import Session, Sessions
from .wire import ClientGone, Wire

_HELLO_SECONDS = 10.0
_SEND_SECONDS = 60.0
_WAIT_SECONDS = 60.0
"""One wait lasts at most this long, whatever the client asks for."""
_BACKLOG = 512

T = TypeVar("T")


class ControlServer:
    """Serves a listening socket. Belongs to one event loop; ``on_stop`` is called when a client asks for the end."""

    def __init__(
        self,
        engine: Engine,
        prefetcher: Prefetcher,
        *,
        cache_dir: Path,
        metrics: Metrics,
        clock: Clock,
        log: Log,
        on_stop: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._prefetcher = prefetcher
        self._cache_dir = str(cache_dir)
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._on_stop = on_stop
        self._began = clock.monotonic()
        self._tasks: set[asyncio.Task[None]] = set()
        self.sessions = Sessions(engine)

    @property
    def connections(self) -> int:
        """Sockets that are being served."""
        return len(self._tasks)

    async def serve(self, listener: socket.socket) -> None:
        """Accept clients until cancelled. The listener stays the caller's."""
        loop = asyncio.get_running_loop()
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as e:  # out of descriptors, or a client that gave up already
                self._log.record("accept_failed", error=str(e))
                await self._clock.asleep(0.05)
                continue
            self.attach(sock)

    def attach(self, sock: socket.socket) -> None:
        """Serve one connected socket, which the server closes."""
        sock.setblocking(False)
        task = asyncio.create_task(self._client(sock))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """End all connections. Idempotent."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, sock: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None, "runs as a task"

        def gone(why: str) -> None:
            if why:
                self._metrics.add("clients_rejected")
                self._log.record("client_rejected", error=why)
            task.cancel()

        wire = Wire(sock, gone, send_timeout=_SEND_SECONDS)
        session: Session | None = None
        fresh = 0
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                session = await self._greet(wire)
            while session is not None:
                request = await wire.receive()
                fresh = 0  # a client that asks on has read the reply before
                fresh = await self._answer(wire, session, request)
        except ClientGone as e:
            self._log.record("client_lost", error=str(e))
        except TimeoutError:
            self._log.record("client_lost", error=f"no hello within {_HELLO_SECONDS:g} s")
        finally:
            wire.close()
            if session is not None:
                if fresh and not wire.unanswered:
                    self.sessions.release(session, [fresh])  # perhaps nobody has read its number
                for request in wire.unanswered:
                    if isinstance(request, protocol.Release):
                        self.sessions.release(session, request.leases)
                self.sessions.leave(session)

    async def _greet(self, wire: Wire) -> Session | None:
        hello = await wire.receive()
        if not isinstance(hello, protocol.Hello):
            await wire.send(protocol.Failed.of(CacheError("the first message must be a hello")))
            return None
        common = [version for version in protocol.VERSIONS if version in hello.versions]
        if not common:
            ours, theirs = protocol.VERSIONS, hello.versions
            what = f"the daemon speaks protocol {ours}, this client {theirs}"
            hint = "use one nearflash version for both; cachefs stop ends the daemon"
            await wire.send(protocol.Failed.of(ProtocolMismatch(what, url=self._cache_dir, hint=hint)))
            return None
        try:
            session = self.sessions.join(hello.session, hello.origin)
        except CacheError as e:
            await wire.send(protocol.Failed.of(e))
            return None
        try:
            await wire.send(protocol.Welcome(common[0], os.getpid(), self._cache_dir))
        except BaseException:
            self.sessions.leave(session)
            raise
        return session

    async def _answer(self, wire: Wire, session: Session, request: protocol.Request) -> int:
        """Answer one request; returns the number of the lease that the reply told of, else 0."""
        self._metrics.add("control_requests")
        try:
            if isinstance(request, protocol.Open):
                return await self._open(wire, session, request)
            await self._dispatch(wire, session, request)
        except NearflashError as e:
            await wire.send(protocol.Failed.of(e))
        except ClientGone:
            raise
        except Exception as e:  # noqa: BLE001 - a defect met by one request must reach its client, and no other
            text = f"{type(e).__name__}: {e}"
            self._log.record("defect", where=type(request).__name__, error=text)
            await wire.send(protocol.Failed.of(CacheError(f"the daemon failed: {text}")))
        return 0

    async def _dispatch(self, wire: Wire, session: Session, request: protocol.Request) -> None:
        match request:
            case protocol.Wait():
                await wire.send(await self._wait(session, request))
            case protocol.Attachment(lease, name):
                await self._attachment(wire, session.entry(lease), name)
            case protocol.Attach(lease, name):
                await wire.send(await self._attach(session.entry(lease), name, wire.take_fd()))
            case protocol.Release(leases):
                self.sessions.release(session, leases)
            case protocol.Fetch(url, version, size, start, end):
                async with self._engine.read(url, session.access, version, size, start, end) as data:
                    await wire.send(protocol.Payload(end - start))
                    await wire.send_raw(data)
            case protocol.Prefetch(items):
                await self._prefetcher.add(Wish(i.url, i.version, i.size, session.access) for i in items)
                await wire.send(protocol.Done())
            case protocol.Plan():
                await wire.send(await self._engine.plans.declare(session.ident, session.access, request))
                await self._prefetcher.look()
            case protocol.Progress():
                await wire.send(self._engine.plans.progress(session.ident, request))
                await self._prefetcher.look()
            case protocol.Pause(names):
                self._engine.plans.pause(session.ident, names)
            case protocol.List(url, delimiter, cached):
                await self._list(wire, session, url, delimiter=delimiter, cached=cached)
            case protocol.Stat(url):
                await wire.send(protocol.StatPage([await self._engine.stat(url, session.access)]))
            case protocol.Entries():
                await self._entries(wire)
            case protocol.Evict(urls, everything):
                gone = await self._engine.evict(urls, everything=everything)
                await wire.send(protocol.Evicted(gone.entries, gone.freed, gone.busy))
            case protocol.Stats():
                await wire.send(protocol.StatsReply(await self._stats()))
            case protocol.Stop():
                await wire.send(protocol.Done())
                self._on_stop()
            case protocol.Hello():
                raise CacheError("a second hello on one connection")

    async def _open(self, wire: Wire, session: Session, request: protocol.Open) -> int:
        opening = await self._engine.open(request.url, session.access, request.version, request.size)
        meta, holding = opening.source.meta, opening.holding
        if holding is None:
            reason = opening.reason
            kind = type(reason).__name__
            what = "" if reason is None else reason.what
            await wire.send(protocol.Opened(meta.size, meta.version, self._engine.piece, reason=what, kind=kind))
            return 0
        try:
            fds = holding.open_files()
        except BaseException:
            self._engine.release(opening)
            raise
        number = self.sessions.grant(session, opening)
        try:
            await wire.send(protocol.Opened(meta.size, meta.version, holding.entry.chunk_size, number), fds)
        except BaseException:
            self.sessions.release(session, [number])
            raise
        finally:
            for fd in fds:
                os.close(fd)
        return number

    async def _wait(self, session: Session, request: protocol.Wait) -> protocol.Waited:
        opening, entry = session.leases.get(request.lease), session.entry(request.lease)
        if opening is None or entry is None:
            return protocol.Waited(False, 0, known=False)
        seconds = min(_WAIT_SECONDS, max(0.0, request.seconds))
        progress = await self._engine.wait(entry, opening.source, request.first, request.stop, seconds)
        return protocol.Waited(progress.done, progress.present, known=not progress.superseded)

    async def _attachment(self, wire: Wire, entry: Entry | None, name: str) -> None:
        if entry is None:
            await wire.send(protocol.Attached(False, known=False))
            return
        async with self._engine.attachments.read(entry, name) as data:
            if data is None:
                await wire.send(protocol.Attached(False))
            else:
                await wire.send(protocol.Payload(len(data)))
                await wire.send_raw(data)

    async def _attach(self, entry: Entry | None, name: str, fd: int) -> protocol.Attached:
        try:
            if entry is None:
                return protocol.Attached(False, known=False)
            return protocol.Attached(await self._engine.attachments.keep(entry, name, fd))
        finally:
            if fd >= 0:
                os.close(fd)

    async def _list(self, wire: Wire, session: Session, url: str, *, delimiter: bool, cached: bool) -> None:
        listing = self._engine.list_folder(url, session.access, delimiter=delimiter, cached=cached)
        async with aclosing(listing):
            async for found in listing:
                for page in _pages(found):
                    await wire.send(protocol.StatPage(page, last=False))
        await wire.send(protocol.StatPage([]))

    async def _entries(self, wire: Wire) -> None:
        for page in _pages(await self._engine.entries()):
            items = [
                protocol.EntryInfo(
                    e.url, e.version, e.size, e.cached_bytes, e.disk_bytes, e.state, e.leases, e.last_use
                )
                for e in page
            ]
            await wire.send(protocol.EntryPage(items, last=False))
        await wire.send(protocol.EntryPage([]))

    async def _stats(self) -> dict[str, float | int | str | None]:
        values = await self._engine.stats()
        values.update(
            pid=os.getpid(),
            cache_dir=self._cache_dir,
            uptime_seconds=round(self._clock.monotonic() - self._began, 1),
            clients=len(self.sessions),
            leases=self.sessions.leases,
        )
        return values


def _pages(items: Iterable[T]) -> Iterable[list[T]]:
    source = iter(items)
    while page := list(islice(source, PAGE_ITEMS)):
        yield page
