"""``deadline=`` bounds every call of a client, whatever it is waiting for: a start, a reply, bytes past the cache."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs import protocol
from cachefs.bitmap import ChunkBits
from cachefs.client import connect
from cachefs.config import Settings
from cachefs.errors import DeadlineExceeded
from cachefs.frames import FrameBuffer
from cachefs.launch import crowd_lock
from cachefs.passthrough import PassThrough
from cachefs.session import Expired, Session
from cachefs.testing.clock import ManualClock

URL = "s3://bucket/k"
PIECE = 1 << 16
DEADLINE = 0.2
SOON = 3.0
"""Far more than the deadline and a busy machine need, far less than any other wait of a client."""

Answer = Callable[[protocol.Request, socket.socket], None]


def settings_in(folder: Path, **changes: object) -> Settings:
    values = {"chunk_size": PIECE, "transfer_bytes": PIECE, "autostart": False, **changes}
    return Settings(cache_dir=folder / "cache", socket=folder / "s.sock", **values)  # type: ignore[arg-type]


@contextmanager
def fake_daemon(settings: Settings, answer: Answer) -> Iterator[None]:
    """Listens on the socket, agrees to every hello, and leaves the rest to ``answer``; silence is what it is for."""
    ends: list[socket.socket] = []

    def serve(sock: socket.socket) -> None:
        frames = FrameBuffer()
        while data := sock.recv(65536):
            frames.feed(data)
            while (body := frames.next_frame()) is not None:
                request = protocol.decode_request(body)
                if isinstance(request, protocol.Hello):
                    sock.sendall(protocol.encode(protocol.Welcome(protocol.VERSIONS[0], os.getpid(), "")))
                else:
                    answer(request, sock)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            ends.append(sock)
            threads.append(threading.Thread(target=serve, args=(sock,)))
            threads[-1].start()

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(settings.socket))
        listener.listen()
        threads = [threading.Thread(target=accept)]
        threads[0].start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            threads[0].join(10)
            for sock in ends:
                sock.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)
            for sock in ends:
                sock.close()


@contextmanager
def bounded(match: str) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=match):
        yield
    assert time.monotonic() - began < SOON


def test_a_wait_for_a_daemon_that_hangs_ends_by_the_deadline(tmp_path: Path) -> None:
    def answer(request: protocol.Request, sock: socket.socket) -> None:
        if isinstance(request, protocol.Open):
            bitmap = ChunkBits(1)
            try:
                reply = protocol.encode(protocol.Opened(5, "v", PIECE, 1))
                socket.send_fds(sock, [reply], [file.fileno(), bitmap.fd])
            finally:
                bitmap.close()

    settings = settings_in(tmp_path)
    (tmp_path / "data").write_bytes(b"12345")
    with (
        open(tmp_path / "data", "rb") as file,
        fake_daemon(settings, answer),
        connect(settings) as client,
        client.open(URL, deadline=DEADLINE) as shard,
    ):
        assert shard.cached
        with bounded(f"{URL}: not all there after 0.2 s"):
            shard.wait(0, 5)


def test_a_view_past_the_cache_ends_by_the_deadline(tmp_path: Path) -> None:
    """The daemon always sends a little, so that no silence is what ends it."""
    over = threading.Event()

    def answer(request: protocol.Request, sock: socket.socket) -> None:
        if isinstance(request, protocol.Open):
            sock.sendall(protocol.encode(protocol.Opened(PIECE, "v", PIECE, reason="full", kind="CacheFull")))
        elif isinstance(request, protocol.Fetch):
            sock.sendall(protocol.encode(protocol.Payload(PIECE)))
            try:
                while not over.wait(0.02):
                    sock.sendall(b"x")
            except OSError:
                pass  # the client has left

    settings = settings_in(tmp_path)
    limit = threading.Timer(2 * SOON, over.set)
    limit.start()
    with fake_daemon(settings, answer), connect(settings) as client, client.open(URL, deadline=DEADLINE) as shard:
        assert not shard.cached
        with bounded(f"{URL}: not all there after 0.2 s"):
            shard.view()
        over.set()
    limit.cancel()


def test_an_open_that_has_to_start_a_daemon_ends_by_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 2\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    with connect(settings_in(tmp_path, autostart=True)) as client, bounded(f"{URL}: not open after 0.2 s"):
        client.open(URL, deadline=DEADLINE)


def test_an_open_behind_another_clients_start_ends_by_the_deadline(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, autostart=True)
    with crowd_lock(settings), connect(settings) as client, bounded(f"{URL}: not open after 0.2 s"):
        client.open(URL, deadline=DEADLINE)


def test_a_daemon_that_keeps_going_away_is_tried_until_the_deadline(tmp_path: Path) -> None:
    clock = ManualClock()

    def answer(request: protocol.Request, sock: socket.socket) -> None:
        clock.advance(1.0)
        sock.shutdown(socket.SHUT_RDWR)

    settings = settings_in(tmp_path, connect_timeout=1000.0)
    with fake_daemon(settings, answer):
        session = Session(settings, clock)
        began = clock.monotonic()
        with pytest.raises(Expired):
            session.call(protocol.Open(URL), until=began + 2.5)
        assert clock.monotonic() - began == 3.0
        session.close()


def test_pieces_past_the_cache_share_one_deadline() -> None:
    clock = ManualClock()
    fetched: list[tuple[int, float]] = []

    def fetch(start: int, end: int, target: memoryview, until: float) -> None:
        fetched.append((start, until))
        clock.advance(1.0)

    memory = PassThrough(50, 10, fetch, clock)
    until = clock.monotonic() + 2.5
    with pytest.raises(Expired):
        memory.ensure(0, 50, until=until)
    assert fetched == [(0, until), (10, until), (20, until)]
    memory.close()


def test_a_piece_that_another_thread_fetches_is_waited_for_until_the_deadline() -> None:
    inside, gate = threading.Event(), threading.Event()

    def fetch(start: int, end: int, target: memoryview, until: float) -> None:
        inside.set()
        gate.wait(2 * SOON)

    memory = PassThrough(10, 10, fetch)
    thread = threading.Thread(target=memory.ensure, args=(0, 10))
    thread.start()
    assert inside.wait(10)
    began = time.monotonic()
    with pytest.raises(Expired):
        memory.ensure(0, 10, until=began + DEADLINE)
    assert time.monotonic() - began < SOON
    gate.set()
    thread.join(10)
    memory.close()
