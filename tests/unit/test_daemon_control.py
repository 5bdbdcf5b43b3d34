"""The control socket: what a broken, hostile or vanishing client can do, which is nothing to anybody else."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs import protocol
from cachefs.client import Client, connect
from cachefs.connection import Connection, connect_socket
from cachefs.errors import CacheError, ConfigError, DaemonUnavailable, DeadlineExceeded, ProtocolMismatch
from cachefs.session import Session
from cachefs.testing.enginebox import CHUNK, ORIGIN
from cachefs.testing.scripted import Call, ScriptedStore
from cachefs.testing.served import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    store = ScriptedStore({"k": random.Random(1).randbytes(3 * CHUNK + 5), "small": b"hello"})
    with served(tmp_path, store) as running:
        yield running


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)


def hello(ident: str = "s", versions: tuple[int, ...] = protocol.VERSIONS) -> protocol.Hello:
    return protocol.Hello(versions, ident, os.getpid(), ORIGIN)


def raw(server: Served) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(str(server.settings.socket))
    sock.settimeout(20)
    return sock


def greeted(server: Served, ident: str = "s") -> Connection:
    return connect_socket(server.settings.socket, hello(ident), timeout=10)[0]


def leases(server: Served) -> int:
    return server.call(lambda: server.control.sessions.leases)


def test_the_socket_is_the_owners_alone(server: Served) -> None:
    mode = os.stat(server.settings.socket).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
        struct.pack("<I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
        struct.pack("<I", 0),
        struct.pack("<I", 3) + b"\x93\x01\x02",
    ],
)
@pytest.mark.parametrize("greet", [False, True])
def test_garbage_closes_only_its_own_connection(server: Served, garbage: bytes, greet: bool) -> None:
    with connect(server.settings) as other:
        assert other.read("s3://bucket/small") == b"hello"
        with raw(server) as sock:
            if greet:
                sock.sendall(protocol.encode(hello("bad")))
                sock.recv(4096)
            sock.sendall(garbage)
            assert sock.recv(4096) == b""
        assert other.read("s3://bucket/small") == b"hello"


def test_random_bytes_never_hurt_anybody(server: Served) -> None:
    rng = random.Random(5)
    with connect(server.settings) as other:
        for _ in range(100):
            with raw(server) as sock:
                if rng.random() < 0.5:
                    sock.sendall(protocol.encode(hello(str(rng.random()))))
                try:
                    sock.sendall(rng.randbytes(rng.randrange(1, 2000)))
                except (BrokenPipeError, ConnectionResetError):
                    continue
        assert other.read("s3://bucket/small") == b"hello"
    until(lambda: server.call(lambda: len(server.control.sessions)) == 0)


def test_the_first_message_must_be_a_hello_and_the_only_one(server: Served) -> None:
    with raw(server) as sock:
        sock.sendall(protocol.encode(protocol.Stats()))
        with pytest.raises(CacheError, match="must be a hello"):
            Connection(sock).receive(timeout=10)
    with greeted(server) as connection:
        connection.send(hello(), timeout=10)
        with pytest.raises(CacheError, match="second hello"):
            connection.receive(timeout=10)


def test_no_common_protocol_version_is_said_so(server: Served) -> None:
    with pytest.raises(ProtocolMismatch, match=r"the daemon speaks protocol \(3, 2\), this client \(77,\)"):
        connect_socket(server.settings.socket, hello(versions=(77,)), timeout=10)


def test_a_session_cannot_be_joined_with_another_origin(server: Served) -> None:
    with greeted(server, "shared"):
        foreign = protocol.Hello(protocol.VERSIONS, "shared", 1, ORIGIN.__class__(endpoint="http://else"))
        with pytest.raises(CacheError, match="another origin"):
            connect_socket(server.settings.socket, foreign, timeout=10)


def test_leases_end_with_the_last_connection_of_a_session(server: Served) -> None:
    first, second = greeted(server, "x"), greeted(server, "x")
    first.send(protocol.Open("s3://bucket/k"), timeout=10)
    reply, fds = first.receive(timeout=10)
    assert isinstance(reply, protocol.Opened)
    assert len(fds) == 2
    for fd in fds:
        assert not os.get_inheritable(fd)
        os.close(fd)
    first.retire()
    second.send(protocol.Wait(reply.lease, 0, 4, 10.0), timeout=10)
    waited, _ = second.receive(timeout=10)
    assert waited == protocol.Waited(True, 4)
    assert leases(server) == 1
    second.close()
    until(lambda: leases(server) == 0)


@pytest.mark.parametrize("reads", [False, True])
def test_a_lease_of_a_connection_that_ends_before_its_next_request_is_given_back(server: Served, reads: bool) -> None:
    with greeted(server, "x") as keeper:
        other = greeted(server, "x")
        other.send(protocol.Open("s3://bucket/k"), timeout=10)
        if reads:
            for fd in other.receive(timeout=10)[1]:
                os.close(fd)
        until(lambda: leases(server) == 1)
        other.close()  # as after an interrupt: nobody kept the number
        until(lambda: leases(server) == 0)
        keeper.send(protocol.Stat("s3://bucket/k"), timeout=10)
        keeper.receive(timeout=10)


def test_threads_that_open_at_once_keep_their_leases_when_surplus_connections_go(server: Served) -> None:
    threads = 8
    together = threading.Barrier(threads)
    session = Session(server.settings)
    got: list[int] = []

    def receive(connection: Connection, seconds: float) -> None:
        reply, fds = connection.receive(timeout=seconds)
        for fd in fds:
            os.close(fd)
        assert isinstance(reply, protocol.Opened)
        got.append(reply.lease)
        together.wait(20)

    workers = [
        threading.Thread(target=lambda: session.exchange(protocol.Open("s3://bucket/k"), receive))
        for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    for lease in got:
        reply, _ = session.call(protocol.Wait(lease, 0, 4, 10.0))
        assert reply == protocol.Waited(True, 4)
    with greeted(server, session.ident):
        session.drop_connections()
        until(lambda: server.call(lambda: server.control.connections) == 1)
        assert leases(server) == threads
    session.close()
    until(lambda: leases(server) == 0)


def test_unknown_and_doubly_released_leases_do_nothing(server: Served) -> None:
    with greeted(server) as connection:
        connection.send(protocol.Open("s3://bucket/k"), timeout=10)
        reply, fds = connection.receive(timeout=10)
        for fd in fds:
            os.close(fd)
        assert isinstance(reply, protocol.Opened)
        connection.send(protocol.Release([reply.lease, reply.lease, 7]), timeout=10)
        connection.send(protocol.Wait(reply.lease, 0, 1, 1.0), timeout=10)
        waited, _ = connection.receive(timeout=10)
        assert waited == protocol.Waited(False, 0, known=False)


def test_a_release_right_before_the_end_of_a_connection_counts(server: Served) -> None:
    with greeted(server, "x") as keeper:
        keeper.send(protocol.Open("s3://bucket/k"), timeout=10)
        reply, fds = keeper.receive(timeout=10)
        for fd in fds:
            os.close(fd)
        assert isinstance(reply, protocol.Opened)
        other = greeted(server, "x")
        other.send(protocol.Release([reply.lease]), timeout=10)
        other.close()
        until(lambda: leases(server) == 0)


def test_a_client_that_vanishes_in_a_wait_is_noticed(server: Served) -> None:
    server.hold_reads()
    connection = greeted(server)
    connection.send(protocol.Open("s3://bucket/k"), timeout=10)
    reply, fds = connection.receive(timeout=10)
    for fd in fds:
        os.close(fd)
    assert isinstance(reply, protocol.Opened)
    connection.send(protocol.Wait(reply.lease, 0, 4, 60.0), timeout=10)
    connection.close()
    until(lambda: leases(server) == 0)
    server.let_reads()


def test_a_dead_client_whose_socket_lives_on_in_a_child_holds_nothing(server: Served) -> None:
    """A forked grandchild inherits the connection; the death of the process that made it is what counts."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        try:
            connection = greeted(server, "forked")
            connection.send(protocol.Open("s3://bucket/k"), timeout=10)
            connection.receive(timeout=10)
            child = os.fork()
            if child == 0:
                signal.pause()
            os.write(writer, str(child).encode())
        finally:
            os._exit(0)
    child = int(os.read(reader, 100))
    try:
        os.waitpid(parent, 0)
        until(lambda: leases(server) == 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_many_cycles_leave_no_descriptor_and_no_lease(server: Served) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def one(i: int) -> None:
        client = connect(server.settings)
        shard = client.open("s3://bucket/k")
        if i % 3:
            assert len(shard.view()) == shard.size
        if i % 2:
            shard.close()
        client.close()

    one(1)
    until(lambda: leases(server) == 0)
    before = descriptors()
    for i in range(200):
        one(i)
    until(lambda: leases(server) == 0 and descriptors() <= before)


def test_pipelined_requests_beyond_the_bound_are_all_answered(server: Served) -> None:
    with raw(server) as sock:
        sock.sendall(protocol.encode(hello()))
        connection = Connection(sock)
        connection.receive(timeout=10)
        frames = protocol.encode(protocol.Stat("s3://bucket/small")) * 1000
        sender = threading.Thread(target=sock.sendall, args=(frames,))
        sender.start()
        for _ in range(1000):
            reply, _ = connection.receive(timeout=10)
            assert isinstance(reply, protocol.StatPage)
        sender.join()


def test_pipelined_requests_are_bounded_in_bytes(server: Served) -> None:
    """Long requests behind one that waits stay in the socket, not in the daemon's memory."""
    server.hold_reads()
    with raw(server) as sock:
        sock.sendall(protocol.encode(hello()))
        connection = Connection(sock)
        connection.receive(timeout=10)
        connection.send(protocol.Open("s3://bucket/k"), timeout=10)
        reply, fds = connection.receive(timeout=10)
        for fd in fds:
            os.close(fd)
        assert isinstance(reply, protocol.Opened)
        connection.send(protocol.Wait(reply.lease, 0, 1, 30.0), timeout=10)
        frame = protocol.encode(protocol.Evict(["s3://bucket/" + "x" * 1000] * 1000))
        sock.settimeout(0.5)
        taken = 0
        with pytest.raises(TimeoutError):
            while taken < 60:
                sock.sendall(frame)
                taken += 1
        assert taken * len(frame) < 12 << 20
        server.let_reads()


def test_a_url_longer_than_any_stores_keys_is_refused(server: Served) -> None:
    long = "s3://bucket/" + "x" * 5000
    with greeted(server) as connection:
        for request in (protocol.Open(long), protocol.Stat(long), protocol.List(long), protocol.Evict([long])):
            connection.send(request, timeout=10)
            with pytest.raises(ConfigError, match="a URL of 5012 bytes") as caught:
                connection.receive(timeout=10)
            assert len(str(caught.value)) < 400
        connection.send(protocol.Open("s3://bucket/k", version='"' + "v" * 5000 + '"', size=5), timeout=10)
        with pytest.raises(ConfigError, match="a version of 5002 bytes"):
            connection.receive(timeout=10)
    assert server.store.calls == []


def test_a_stop_is_answered_and_passed_on(server: Served) -> None:
    with connect(server.settings) as client:
        client.stop_daemon()
    assert server.stopped.wait(10)


def test_no_secret_in_log_stats_or_state(tmp_path: Path) -> None:
    from dataclasses import replace

    secret = "S3CR3T-" + random.Random(3).randbytes(8).hex()
    store = ScriptedStore({"k": b"x"})
    with served(tmp_path, store) as running:
        origin = replace(ORIGIN, access_key_id="id-" + secret, secret_access_key=secret, session_token="t" + secret)
        with Client(running.settings.with_(origin=origin)) as client:
            client.open("s3://bucket/k").view()
            with pytest.raises(CacheError.__mro__[1]) as caught:
                client.open("s3://bucket/absent")
            assert secret not in str(caught.value)
            assert secret not in repr(client.stats())
            assert secret not in repr(client.settings)
            assert secret not in repr(protocol.Hello((1,), "s", 1, origin))
    for path in (tmp_path / "cache").rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


def test_a_read_of_an_object_that_is_replaced_meanwhile_gives_the_new_one_whole(server: Served) -> None:
    def replace_it(call: Call) -> None:
        if call.kind == "get" and server.store.objects["small"] == b"hello":
            server.store.objects["small"] = b"goodbye"

    server.store.before = replace_it
    with connect(server.settings) as client:
        assert client.read("s3://bucket/small") == b"goodbye"


def test_the_deadline_of_an_open_holds_even_when_the_daemon_is_busy(server: Served) -> None:
    def slow(call: Call) -> None:
        if call.kind == "head":
            time.sleep(1.0)  # the whole loop stands still, as under heavy load

    server.store.before = slow
    with connect(server.settings) as client, pytest.raises(DeadlineExceeded, match=r"k: not open after 0\.2 s"):
        client.open("s3://bucket/k", deadline=0.2)


def test_without_daemon_and_without_autostart_the_error_says_how(tmp_path: Path) -> None:
    with served(tmp_path, ScriptedStore()) as running:
        settings = running.settings
    with connect(settings) as client, pytest.raises(DaemonUnavailable, match="cachefs daemon --cache-dir"):
        client.stats()
