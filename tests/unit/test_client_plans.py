"""Plans as the client tells of them: from finalizers, and when telling is cut off."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cachefs import protocol
from cachefs.client import Client, connect
from cachefs.connection import Connection, NotAnswered
from cachefs.errors import CacheError, ConfigError, NearflashError
from cachefs.session import Session
from cachefs.testing.enginebox import CHUNK
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    store = ScriptedStore({f"k{i}": random.Random(i).randbytes(CHUNK) for i in range(4)})
    with served(tmp_path, store) as running:
        yield running


def uses(count: int) -> list[tuple[int, int, int]]:
    return [(n % 4, n, n) for n in range(count)]


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)


def ends(what: Callable[[], object]) -> bool:
    """Whether it does, within a time that is long enough."""
    thread = threading.Thread(target=what, daemon=True)
    thread.start()
    thread.join(30)
    return not thread.is_alive()


def within(lock: threading.Lock, what: Callable[[], object]) -> Callable[[], None]:
    """As a finalizer that runs where this thread holds the lock."""

    def go() -> None:
        with lock:
            what()

    return go


def test_a_finalizer_may_pause_and_withdraw_whatever_its_thread_is_in(server: Served) -> None:
    with connect(server.settings) as client:
        for name in ("a", "b"):
            assert client.plan(name, client.list("s3://bucket/"), uses(4), job=name)
        session = client._session()
        for lock in (session._lock, client._guard.of_this_process()):
            assert ends(within(lock, lambda: client.pause("a")))
            assert ends(within(lock, lambda: client.withdraw("b")))
        shown = client.stats()
        assert (shown["plans"], shown["plan_progress"]) == (1, "a: 0 of 4, paused"), "with the next request at last"


def test_a_shard_is_closed_wherever_that_is(server: Served) -> None:
    """Also one of a session that is over: none is made to close it."""
    with connect(server.settings) as client:
        shard = client.open("s3://bucket/k0")
        shard.wait(0, shard.size)
        client.close()
        assert ends(within(client._guard.of_this_process(), shard.close))
        until(lambda: client.evict(None).busy == 0)


def test_where_there_is_no_session_none_is_made() -> None:
    class Never(Client):
        def _new_session(self) -> Session:
            raise AssertionError("nobody needs one")

    client = Never(connect().settings)
    client.pause("a")
    client.withdraw("a")
    assert not Never(client.settings.with_(plans="off")).plan("a", [], [])
    assert not Never(client.settings.with_(plans="off")).progress("a", 1)


class Broken:
    """A connection that fails to send."""

    version = protocol.WITH_PLANS
    settled = False

    def __init__(self, error: NearflashError) -> None:
        self.error = error

    def send(self, request: Any, **options: Any) -> None:
        raise self.error

    def retire(self) -> None:
        """Nothing to close."""


def test_what_a_flush_cannot_tell_goes_with_the_next_request(server: Served) -> None:
    with connect(server.settings) as client:
        assert client.plan("a", client.list("s3://bucket/"), uses(4), job="j")
        session = client._session()
        assert client.plan("b", client.list("s3://bucket/"), uses(4), job="k")
        idle, session._idle = session._idle, []
        for error in (NotAnswered("silent"), CacheError("of another kind")):
            broken: Any = Broken(error)
            session._idle = [broken]
            session.flush()
            session._idle = [broken]
            session.pause("a")
            session.flush()
            session.withdraw("b")
            session._idle = [broken]
            session.withdraw_now()
        session._idle = idle
        session.pause("a")
        assert client.stats()["plan_progress"] == "j: 0 of 4, paused"


class CutOff(Session):
    """Whose ``number``-th piece of a plan ends with ``error``."""

    number = 3
    error: BaseException = KeyboardInterrupt()

    def call(self, request: protocol.Request, **options: Any) -> Any:
        if isinstance(request, protocol.Plan):
            self.number -= 1
            if self.number == 0:
                raise self.error
        return super().call(request, **options)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConfigError("no")], ids=["Ctrl-C", "error"])
def test_a_plan_that_is_cut_off_is_withdrawn(server: Served, number: int, error: BaseException) -> None:
    class Cut(Client):
        def _new_session(self) -> Session:
            session = CutOff(self.settings, self._clock)
            session.number, session.error = number, error
            return session

    with connect(server.settings) as other, Cut(server.settings) as client:
        stats = client.list("s3://bucket/")
        with pytest.raises(type(error)):
            client.plan("a", stats, uses(25_000), job="j")
        assert other.plan("b", stats, uses(25_000), job="j", position=5), "of the same content"
        assert other.stats()["plan_progress"] == "j: 5 of 25000", "sent, and read by this one alone"
        assert client.plan("a", stats, uses(25_000), job="j", position=3)
        assert other.stats()["plan_progress"] == "j: 3 of 25000"


def test_a_connection_that_is_given_up_tells_nothing(server: Served) -> None:
    """The error of a plan that cannot be taken back is not that of the request that it went with."""

    class Refusing(Connection):
        def receive(self, *, timeout: float) -> Any:
            reply, fds = super().receive(timeout=timeout)
            if isinstance(reply, protocol.Planned):
                raise CacheError("the daemon failed")
            return reply, fds

    with connect(server.settings) as client:
        client.stats()
        session = client._session()
        for connection in session._idle:
            connection.__class__ = Refusing
        session.withdraw("a")
        assert client.stats()["plans"] == 0
