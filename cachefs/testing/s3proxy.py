"""A proxy between a client and an S3 server that counts requests and, on demand, misbehaves.

It passes heads through unchanged, ``Host`` included, so request signatures stay valid; and it streams bodies in pieces
of up to 1 MiB, so that it is not what limits a transfer.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from ..errors import ConfigError, DeadlineExceeded
from .faults import Fault, RequestRecord
from .rules import FaultPlan
from .wire import Head, Wire, WireError, parse_range

_SHAPED_PIECE_SECONDS = 0.02
_CONNECT_SECONDS = 10.0


class _Shaper:
    """Spaces pieces so that their total keeps to a rate."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = 0.0

    @property
    def piece(self) -> int:
        return max(1, int(self.rate * _SHAPED_PIECE_SECONDS))

    async def pay(self, count: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + count / self.rate
        await asyncio.sleep(self._free_at - now)


class CountingProxy:
    """A proxy on loopback in front of ``upstream`` (``http://host:port``), in a thread of its own.

    A context manager; ``endpoint`` is valid inside it. ``faults`` may be added to at any time. ``latency`` seconds are
    added before each request and ``rate`` bytes a second is the most that all reply bodies together get, for as long
    as they are not changed; ``None`` is no limit.
    """

    def __init__(self, upstream: str, *, latency: float = 0.0, rate: float | None = None) -> None:
        parts = urlsplit(upstream)
        if parts.scheme != "http" or parts.hostname is None:
            raise ConfigError("the proxy speaks plain http only", url=upstream)
        self._upstream = (parts.hostname, parts.port or 80)
        self.latency = latency
        self.faults: FaultPlan[Fault] = FaultPlan()
        self.endpoint = ""
        self._shaper = _Shaper(rate) if rate else None
        self._records: list[RequestRecord] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._listener: socket.socket | None = None

    @property
    def requests(self) -> list[RequestRecord]:
        """All requests so far, in order of arrival. A request is in it before its first reply byte goes out."""
        with self._lock:
            return list(self._records)

    def clear(self) -> None:
        """Forget the requests seen so far."""
        with self._lock:
            self._records.clear()

    def set_rate(self, rate: float | None) -> None:
        """Change the rate that all reply bodies share, in bytes a second."""
        self._shaper = _Shaper(rate) if rate else None

    def __enter__(self) -> Self:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        self._listener = listener
        self.endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
        started = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, started)), name="s3proxy", daemon=True
        )
        self._thread.start()
        if not started.wait(10):
            raise DeadlineExceeded("the proxy's thread did not start in 10 s", url=self.endpoint)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Cut all connections and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._stop is None:
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        thread.join(10)
        if thread.is_alive():
            raise DeadlineExceeded("the proxy's thread did not end in 10 s", url=self.endpoint)

    async def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        stopped = asyncio.create_task(self._stop.wait())
        connections: set[asyncio.Task[None]] = set()
        started.set()
        try:
            while not stopped.done():
                accept = asyncio.create_task(self._loop.sock_accept(listener))
                await asyncio.wait({accept, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if not accept.done():
                    accept.cancel()
                    await asyncio.wait({accept})
                    break
                task = asyncio.create_task(self._connection(Wire(accept.result()[0])))
                connections.add(task)
                task.add_done_callback(connections.discard)
        finally:
            listener.close()
            stopped.cancel()
            for task in connections:
                task.cancel()
            await asyncio.gather(stopped, *connections, return_exceptions=True)

    async def _connection(self, client: Wire) -> None:
        server: Wire | None = None
        try:
            while (head := await client.head()) is not None:
                record, fault = self._arrived(head)
                await asyncio.sleep(self.latency + fault.latency)
                if fault.reset:
                    client.reset()
                    return
                if fault.status is not None:
                    if not await self._refuse(client, head, record, fault):
                        return
                    continue
                if server is None or server.stale:
                    if server is not None:
                        server.close()
                    server = await self._connect()
                if not await self._exchange(client, server, head, record, fault):
                    return
        except (WireError, OSError):
            # Either side went away: the other one learns it by its connection's end, as it would without a proxy.
            client.reset()
        finally:
            client.close()
            if server is not None:
                server.close()

    async def _connect(self) -> Wire:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        server = Wire(sock)
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                await asyncio.get_running_loop().sock_connect(sock, self._upstream)
        except BaseException:
            server.close()
            raise
        return server

    def _arrived(self, head: Head) -> tuple[RequestRecord, Fault]:
        method, target, _ = head.start.decode("latin-1").split(" ", 2)
        path, _, query = target.partition("?")
        bucket, _, key = path.removeprefix("/").partition("/")
        record = RequestRecord(
            method,
            unquote(bucket),
            unquote(key, errors="surrogateescape"),
            query,
            parse_range(head.get(b"range")),
        )
        record.fault = self.faults.choose(record)
        with self._lock:
            self._records.append(record)
        return record, record.fault or Fault()

    async def _refuse(self, client: Wire, head: Head, record: RequestRecord, fault: Fault) -> bool:
        """Answer in the server's stead; whether the connection goes on."""
        waits = head.get(b"expect") is not None  # the client holds its body back until it hears from us
        if not waits:
            async for _ in client.body(head):
                pass
        text = f"<Error><Code>{fault.code}</Code><Message>as scripted</Message></Error>".encode()
        record.status = fault.status or 503
        length = b"content-length: %d\r\n" % len(text)
        connection = b"connection: close\r\n" if waits else b""
        kind = b"content-type: application/xml\r\n"
        head_out = b"HTTP/1.1 %d scripted\r\n" % record.status + kind + length + connection + b"\r\n"
        await client.send(head_out + (b"" if record.method == "HEAD" else text))
        return not waits

    async def _exchange(self, client: Wire, server: Wire, head: Head, record: RequestRecord, fault: Fault) -> bool:
        """Pass one request and its reply on; whether the connections go on."""
        await server.send(head.encode())
        upload = asyncio.create_task(self._upload(client, server, head))
        answer = asyncio.create_task(self._answer(client, server))
        try:
            await asyncio.wait({upload, answer}, return_when=asyncio.FIRST_EXCEPTION)
            # A server may refuse before it has read all of the body: its answer counts, the rest is not sent.
            if upload.done() and not answer.done():
                upload.result()
            reply = await answer
            complete = upload.done() and upload.exception() is None
        finally:
            upload.cancel()
            answer.cancel()
            await asyncio.wait({upload, answer})
        record.status = reply.status
        if not await self._reply(client, server, reply, record, fault):
            return False
        record.done = time.time()
        return complete and not reply.closes and not head.closes

    @staticmethod
    async def _answer(client: Wire, server: Wire) -> Head:
        """The head of the final reply; interim ones (100 Continue) are passed on."""
        while (reply := await server.head()) is not None:
            if reply.status >= 200:
                return reply
            await client.send(reply.encode())
        raise WireError("the server closed without a reply")

    @staticmethod
    async def _upload(client: Wire, server: Wire, head: Head) -> None:
        async for piece in client.body(head):
            await server.send(piece)

    @staticmethod
    def _tampered(reply: Head, fault: Fault) -> Head:
        if fault.etag is not None:
            reply = reply.replace(etag=fault.etag.encode())
        span = reply.get(b"content-range")
        if span is not None and fault.shift_range:
            first, last, size = (int(n) for n in span.removeprefix(b"bytes ").replace(b"/", b"-").split(b"-"))
            moved = b"bytes %d-%d/%d" % (first + fault.shift_range, last + fault.shift_range, size)
            reply = reply.replace(content_range=moved)
        if fault.whole and reply.status == 206:
            reply = reply.replace(start=b"HTTP/1.1 200 OK", content_range=None)
        length = reply.get(b"content-length")
        if fault.extra and length is not None and reply.status == 206:
            reply = reply.replace(content_length=b"%d" % (int(length) + fault.extra))
        return reply

    async def _reply(self, client: Wire, server: Wire, reply: Head, record: RequestRecord, fault: Fault) -> bool:
        bodiless = record.method == "HEAD" or reply.status in {204, 304}
        if not fault.lose_reply:
            await client.send(self._tampered(reply, fault).encode())
        if not bodiless:
            own = _Shaper(fault.rate) if fault.rate else None
            async for piece in server.body(reply):
                if fault.lose_reply:
                    continue
                if not await self._send_shaped(client, piece, record, fault, own):
                    return False
            if fault.extra and reply.status == 206 and reply.get(b"content-length") is not None:
                await client.send(bytes(fault.extra))
        if fault.lose_reply:
            client.reset()
        return not fault.lose_reply

    async def _send_shaped(
        self, client: Wire, piece: memoryview, record: RequestRecord, fault: Fault, own: _Shaper | None
    ) -> bool:
        limits = [n for n in (fault.cut_after, fault.stall_after) if n is not None]
        room = min(limits) - record.bytes_sent if limits else len(piece)
        shapers = [shaper for shaper in (self._shaper, own) if shaper is not None]
        step = min([1 << 20, *(shaper.piece for shaper in shapers)])
        allowed = piece[:room]
        for start in range(0, len(allowed), step):
            part = allowed[start : start + step]
            for shaper in shapers:
                await shaper.pay(len(part))
            record.bytes_sent += len(part)
            await client.send(part)
        if room >= len(piece):
            return True
        if fault.stall_after is not None:
            await client.until_closed()
        client.reset()
        return False
