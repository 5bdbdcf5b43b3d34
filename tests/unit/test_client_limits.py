"""A client that has too many files open, or no memory, says so, and of which object."""

from __future__ import annotations

import errno
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachefs import protocol
from cachefs.config import Settings
from cachefs.connection import Connection
from cachefs.errors import CacheError, CacheFull
from cachefs.limits import private_limit
from cachefs.maps import private_map
from cachefs.passthrough import PassThrough
from cachefs.remote import RemoteShard
from cachefs.session import Session
from cachefs.waiting import OpenArgs

PIECE = 1 << 16
OUT = r"too many open files.*\(raise ulimit -n\)"


@contextmanager
def free_descriptors(count: int) -> Iterator[None]:
    """Leave this process ``count`` descriptors that it can still open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        while True:
            try:
                taken.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for fd in taken[len(taken) - count :]:
            os.close(fd)
        del taken[len(taken) - count :]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


@pytest.mark.parametrize("free", [0, 1])
def test_descriptors_that_find_no_room_are_told_from_a_broken_daemon(free: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull) as null:
        connection = Connection(ours)
        reply = protocol.encode(protocol.Opened(5, "v", 1 << 16, 77))
        socket.send_fds(theirs, [reply], [null.fileno(), null.fileno()])
        with free_descriptors(free), pytest.raises(OSError, match="Too many open files"):
            connection.receive(timeout=5)
        assert connection.settled
        assert protocol.decode_request(theirs.recv(1000)[4:]) == protocol.Release([77])
        theirs.sendall(protocol.encode(protocol.Opened(5, "v", 1 << 16)))
        connection.send(protocol.Open("s3://b/k"), timeout=5)
        assert connection.receive(timeout=5) == (protocol.Opened(5, "v", 1 << 16), [])


class FullSession(Session):
    """Every reply needs a descriptor more than there are."""

    def call(self, *args: object, **more: object) -> tuple[protocol.Reply, list[int]]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_an_open_without_descriptors_names_the_object(tmp_path: Path) -> None:
    session = FullSession(Settings(tmp_path, tmp_path / "s.sock"))
    with pytest.raises(CacheError, match=f"s3://b/k: {OUT}"):
        RemoteShard(lambda: session, OpenArgs("s3://b/k", None, None, None, 1.0))


def test_a_session_without_descriptors_says_so(tmp_path: Path) -> None:
    for autostart in (False, True):
        session = Session(Settings(tmp_path / "c", tmp_path / "r" / "s.sock", autostart=autostart))
        with free_descriptors(0), pytest.raises(CacheError, match=f"s.sock: {OUT}"):
            session.call(protocol.Stats())
        session.close()


def test_a_map_that_the_system_refuses_is_one_line_that_names_the_object() -> None:
    with open(os.devnull) as null, pytest.raises(CacheError, match=r"s3://b/k: .* while mapping it"):
        private_map(null.fileno(), 1 << 62, "s3://b/k")


class PastTheCache(Session):
    """A daemon whose cache is full; it sends whatever is asked for."""

    def call(self, *args: object, **more: object) -> tuple[protocol.Reply, list[int]]:
        return protocol.Opened(1 << 40, "v", PIECE, reason="the quota is 1 GiB", kind="CacheFull"), []

    def exchange(self, *args: object, **more: object) -> None:
        pass


def test_an_object_past_the_cache_takes_a_bounded_part_of_the_memory(tmp_path: Path) -> None:
    session = PastTheCache(Settings(tmp_path, tmp_path / "s.sock"))
    for private in (2 * PIECE, None):
        shard = RemoteShard(lambda: session, OpenArgs("s3://b/k", None, None, None, 1.0, private))
        with pytest.raises(CacheFull, match=r"s3://b/k: its 1\.0 TiB do not fit .*1 GiB.* \(raise NEARFLASH_QUOTA, or"):
            shard.view()
        assert os.fstat(shard.fileno()).st_blocks == 0
        shard.wait(0, 1)
        shard.wait(PIECE, PIECE + 1)
        shard.wait(0, 2 * PIECE)
        if private is not None:
            with pytest.raises(CacheFull, match=r"128\.0 KiB may be kept in memory"):
                shard.wait(5 * PIECE, 5 * PIECE + 1)
        shard.close()


def test_the_usual_bound_goes_by_the_memory_that_is_available(tmp_path: Path) -> None:
    for text, limit in (
        ("MemTotal: 64000000 kB\nMemAvailable:    4096 kB\n", 2048 << 10),
        ("MemAvailable: 999999999 kB\n", 16 << 30),
        ("MemTotal: 5 kB\n", 16 << 30),
    ):
        (tmp_path / "meminfo").write_text(text)
        assert private_limit(str(tmp_path / "meminfo")) == limit
    assert private_limit(str(tmp_path / "none")) == 16 << 30
    assert 0 < private_limit() <= 16 << 30


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs a list of open files")
def test_memory_past_the_cache_without_descriptors_leaves_nothing_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for free in (0, 1):
        with free_descriptors(free), pytest.raises(OSError, match="Too many open files"):
            PassThrough(10, 10, lambda *_: None)
    assert len(os.listdir("/proc/self/fd")) == before
