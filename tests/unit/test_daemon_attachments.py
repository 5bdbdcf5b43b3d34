"""Attachments through a daemon: found by others and by heirs, bounded, and nobody's trouble when they fail."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachefs import protocol
from cachefs.attachments import MOST_BYTES
from cachefs.client import connect
from cachefs.connection import Connection, Lost, connect_socket
from cachefs.errors import CacheError, ConfigError, NearflashError
from cachefs.frames import MAX_FRAME
from cachefs.sealed import read_sealed, sealed_bytes, sealed_file
from cachefs.testing.diskops import WatchedOps
from cachefs.testing.enginebox import CHUNK, ORIGIN
from cachefs.testing.flashkit import flip_bit
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import Served, served

URL = "s3://bucket/k"
OBJECTS = {"k": random.Random(1).randbytes(3 * CHUNK + 5), "other": b"hello"}
INDEX = random.Random(2).randbytes(30_000)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path, ScriptedStore(dict(OBJECTS))) as running:
        yield running


def files(folder: Path) -> list[Path]:
    return list((folder / "cache" / "nearflash-v1" / "attached").iterdir())


def greeted(server: Served) -> Connection:
    hello = protocol.Hello(protocol.VERSIONS, "s", os.getpid(), ORIGIN)
    return connect_socket(server.settings.socket, hello, timeout=10)[0]


def lease_of(connection: Connection) -> int:
    connection.send(protocol.Open(URL), timeout=10)
    reply, fds = connection.receive(timeout=10)
    for fd in fds:
        os.close(fd)
    assert isinstance(reply, protocol.Opened)
    return reply.lease


def ask(connection: Connection, request: protocol.Request, fds: tuple[int, ...] = ()) -> protocol.Reply:
    connection.send(request, timeout=10, fds=fds)
    return connection.receive(timeout=10)[0]


@pytest.mark.parametrize("size", [0, 1, 30_000, MAX_FRAME + 5])
def test_others_find_what_one_attached(server: Served, size: int) -> None:
    data = random.Random(size).randbytes(size)
    with connect(server.settings) as client, connect(server.settings) as other:
        with client.open(URL) as shard:
            assert shard.attachment("index.v1") is None
            shard.attach("index.v1", memoryview(data))
            shard.attach("index.v1", b"the first stays")
            assert shard.attachment("index.v1") == data
        with other.open(URL) as shard:
            assert shard.attachment("index.v1") == data
            assert shard.attachment("index.v2") is None
        with other.open("s3://bucket/other") as shard:
            assert shard.attachment("index.v1") is None
        assert other.stats()["flash_attached"] == 1


def test_an_object_that_is_filled_has_attachments(server: Served) -> None:
    server.hold_reads()
    with connect(server.settings) as client, client.open(URL) as shard:
        shard.attach("x", INDEX)
        assert shard.attachment("x") == INDEX
        server.let_reads()
        assert bytes(shard.view()) == OBJECTS["k"]
        assert shard.attachment("x") == INDEX


def test_heirs_find_them_for_new_and_for_open_shards(tmp_path: Path) -> None:
    store = ScriptedStore(dict(OBJECTS))
    with served(tmp_path, store) as server:
        client = connect(server.settings)
        shard = client.open(URL)
        shard.attach("x", INDEX)
    with served(tmp_path, store) as server:
        assert shard.attachment("x") == INDEX
        shard.attach("y", b"more")
        with connect(server.settings) as other, other.open(URL) as again:
            assert again.attachment("x") == INDEX
            assert again.attachment("y") == b"more"
        shard.close()
        client.close()


def test_they_go_with_eviction_and_with_a_new_version(server: Served, tmp_path: Path) -> None:
    with connect(server.settings) as client:
        with client.open(URL) as shard:
            shard.view()
            shard.attach("x", INDEX)
        server.store.objects["k"] = b"another version"
        version = client.stat(URL).version
        with client.open(URL, version=version, size=15) as shard:
            assert shard.attachment("x") is None
        assert client.evict([URL]).entries == 2
        assert files(tmp_path) == []
        assert client.stats()["dying_bytes"] == 0


def test_a_damaged_one_is_made_anew(server: Served, tmp_path: Path) -> None:
    with connect(server.settings) as client, client.open(URL) as shard:
        shard.attach("x", INDEX)
        flip_bit(files(tmp_path)[0], 1000)
        assert shard.attachment("x") is None
        assert client.stats()["flash_bad_attachments"] == 1
        shard.attach("x", INDEX)
        assert shard.attachment("x") == INDEX


def test_an_entry_that_was_healed_under_its_reader_has_attachments_of_its_own(tmp_path: Path) -> None:
    store = ScriptedStore(dict(OBJECTS))
    with served(tmp_path, store) as server, connect(server.settings) as client, client.open(URL) as shard:
        shard.view()
        shard.attach("x", b"of the old file")
    (data,) = (tmp_path / "cache" / "nearflash-v1" / "entries").glob("*.data")
    flip_bit(data, CHUNK)
    with served(tmp_path, store) as server, connect(server.settings) as client, client.open(URL) as shard:
        moment = threading.Event()
        for _ in range(2000):  # the daemon checks what it found, and replaces it
            if client.stats()["flash_healed"]:
                break
            moment.wait(0.005)
        assert shard.attachment("x") is None
        shard.attach("x", INDEX)
        assert shard.attachment("x") == INDEX
        assert bytes(shard.view()) == OBJECTS["k"]


def test_what_finds_no_room_is_not_kept(tmp_path: Path) -> None:
    with (
        served(tmp_path, ScriptedStore(dict(OBJECTS)), quota=1 << 20) as server,
        connect(server.settings) as client,
        client.open(URL) as shard,
    ):
        shard.attach("big", bytes(2 << 20))
        shard.attach("huge", bytearray(MOST_BYTES + 1))
        assert shard.attachment("big") is shard.attachment("huge") is None
        assert bytes(shard.view()) == OBJECTS["k"]
        assert client.stats()["disk_fault"] is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_keeps_nothing_and_raises_nothing(tmp_path: Path, number: int) -> None:
    class Refusing(WatchedOps):
        refuse: str | None = None

        def before(self, call: str, name: str) -> None:
            if call == self.refuse:
                raise OSError(number, os.strerror(number))

    ops = Refusing()
    with (
        served(tmp_path, ScriptedStore(dict(OBJECTS)), ops=ops) as server,
        connect(server.settings) as client,
        client.open(URL) as shard,
    ):
        view = shard.view()
        ops.refuse = "write"
        shard.attach("x", INDEX)
        ops.refuse = None
        assert shard.attachment("x") is None
        assert bytes(view) == OBJECTS["k"]
        assert files(tmp_path) == []


def test_without_a_daemon_nothing_is_kept_and_nothing_raised(tmp_path: Path) -> None:
    with served(tmp_path, ScriptedStore(dict(OBJECTS))) as server:
        client = connect(server.settings.with_(connect_timeout=0.1))
        shard = client.open(URL)
        shard.attach("x", INDEX)
    assert shard.attachment("x") is None
    shard.attach("y", INDEX)
    shard.close()
    with pytest.raises(NearflashError, match="closed"):
        shard.attachment("x")
    with pytest.raises(NearflashError, match="closed"):
        shard.attach("x", b"")
    client.close()


def test_many_attach_and_read_at_once(server: Served, tmp_path: Path) -> None:
    with connect(server.settings) as client, client.open(URL) as shard, ThreadPoolExecutor(8) as pool:

        def work(i: int) -> bool:
            name = f"n{i % 3}"
            shard.attach(name, name.encode() * 50_000)
            return shard.attachment(name) == name.encode() * 50_000

        assert all(pool.map(work, range(48)))
        assert len(files(tmp_path)) == 3


# --- what no client of ours does ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "A", "../../etc/passwd", "a" * 65, "a\0"])
def test_bad_names_are_refused_on_both_sides(server: Served, name: str, tmp_path: Path) -> None:
    with connect(server.settings) as client, client.open(URL) as shard:
        for call in (lambda: shard.attachment(name), lambda: shard.attach(name, b"x")):
            with pytest.raises(ConfigError, match="is not the name of an attachment"):
                call()
    with greeted(server) as connection, sealed_file(b"x") as fd:
        lease = lease_of(connection)
        for request, fds in ((protocol.Attach(lease, name), (fd,)), (protocol.Attachment(lease, name), ())):
            with pytest.raises(ConfigError, match="is not the name of an attachment"):
                ask(connection, request, fds)
        assert ask(connection, protocol.Attachment(lease, "x")) == protocol.Attached(False)
    assert files(tmp_path) == []


def test_files_that_could_change_are_refused(server: Served, tmp_path: Path) -> None:
    open_memfd = os.memfd_create("t", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    on_disk = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    pipe = os.pipe()
    with greeted(server) as connection:
        lease = lease_of(connection)
        for fd in (open_memfd, on_disk, *pipe):
            with pytest.raises(CacheError, match="a file that could still change"):
                ask(connection, protocol.Attach(lease, "x"), (fd,))
            os.close(fd)
        with pytest.raises(CacheError, match="without its bytes"):
            ask(connection, protocol.Attach(lease, "x"))
        with sealed_file(bytes(MOST_BYTES + 1)) as fd, pytest.raises(CacheError, match=f"at most {MOST_BYTES}"):
            ask(connection, protocol.Attach(lease, "x"), (fd,))
        with sealed_file(b"good") as fd:
            assert ask(connection, protocol.Attach(lease + 1, "x"), (fd,)) == protocol.Attached(False, known=False)
            assert ask(connection, protocol.Attach(lease, "x"), (fd,)) == protocol.Attached(True)
        assert ask(connection, protocol.Attachment(lease + 1, "x")) == protocol.Attached(False, known=False)


def test_descriptors_that_nobody_asked_for_are_closed(server: Served) -> None:
    def ours() -> int:
        return len(os.listdir("/proc/self/fd"))

    with connect(server.settings) as other, sealed_file(b"x") as fd:
        with other.open(URL) as shard:
            shard.attach("before", shard.view())  # an entry that is open, as it will be again
        before = ours()
        for many in (1, 2, 5, 50):
            with greeted(server) as connection:
                try:
                    connection.send(protocol.Stats(), timeout=10, fds=(fd,) * many)
                    connection.receive(timeout=10)
                    connection.send(protocol.Stats(), timeout=10, fds=(fd,) * many)
                    connection.receive(timeout=10)
                except Lost:
                    pass  # two that belong to no request are one too many
        with greeted(server) as connection:
            lease = lease_of(connection)
            frame = protocol.encode(protocol.Attach(lease, "x"))
            for _ in range(20):  # pipelined, and then gone
                socket.send_fds(connection._sock, [frame], [fd])
        gone = threading.Event()
        for _ in range(1000):
            if ours() <= before:
                break
            gone.wait(0.01)
        assert ours() <= before
        assert other.read("s3://bucket/other") == b"hello"


def test_sealed_bytes_cannot_change() -> None:
    with sealed_file(b"12345") as fd:
        assert sealed_bytes(fd, 5) == 5
        assert read_sealed(fd, 5) == b"12345"
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 2), lambda: os.ftruncate(fd, 9)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(CacheError, match="5 bytes; at most 4"):
            sealed_bytes(fd, 4)
