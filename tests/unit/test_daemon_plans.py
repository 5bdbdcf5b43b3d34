"""Plans between client and daemon: pieces, sharing, peers of another version, and what a client leaves behind."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs import protocol
from cachefs.client import Client, connect
from cachefs.connection import Connection, connect_socket
from cachefs.declaring import default_job
from cachefs.errors import ConfigError
from cachefs.frames import FrameBuffer
from cachefs.shard import ObjectStat
from cachefs.testing.enginebox import CHUNK, ORIGIN, box_settings
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import Served, served

KEYS = [f"k{i}" for i in range(8)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Served]:
    store = ScriptedStore({key: random.Random(key).randbytes(2 * CHUNK) for key in KEYS})
    with served(tmp_path, store) as running:
        yield running


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not so in time"
        time.sleep(0.005)


def stats_of(server: Served) -> list[ObjectStat]:
    with connect(server.settings) as client:
        return client.list("s3://bucket/")


def in_turn(count: int = len(KEYS)) -> list[tuple[int, int, int]]:
    return [(n, 10 * n, 10 * n + 9) for n in range(count)]


def plans(client: Client) -> tuple[object, object]:
    values = client.stats()
    return values["plans"], values["plan_progress"]


def asked_for(server: Served) -> set[str]:
    return {call.key for call in server.store.calls if call.kind == "get"}


def test_what_comes_next_is_brought_in_and_no_more_than_the_budget(tmp_path: Path) -> None:
    store = ScriptedStore({key: random.Random(key).randbytes(2 * CHUNK) for key in KEYS})
    with served(tmp_path, store, quota=32 * CHUNK) as server, connect(server.settings) as client:  # 4 chunks ahead
        stats = stats_of(server)
        assert client.plan("a", stats, in_turn(), job="j")
        until(lambda: not server.call(lambda: server.control._prefetcher.busy))
        assert asked_for(server) == {"k0", "k1", "k2"}
        assert plans(client) == (1, "j: 0 of 80")
        assert client.progress("a", 15)
        until(lambda: not server.call(lambda: server.control._prefetcher.busy))
        assert asked_for(server) == {"k0", "k1", "k2", "k3"}
        assert plans(client) == (1, "j: 15 of 80")


def test_a_plan_goes_with_its_client_and_by_a_call(server: Served) -> None:
    stats = stats_of(server)
    with connect(server.settings) as watcher:
        with connect(server.settings) as client:
            assert client.plan("a", stats, in_turn(), job="j")
            assert client.plan("b", stats, in_turn(3), job="j", position=5)
            assert plans(watcher) == (2, "j: 0 of 80; j: 5 of 30")
            assert client.plan("b", stats, in_turn(4), job="j"), "in the place of the former"
            assert plans(watcher) == (2, "j: 0 of 80; j: 0 of 40")
            assert client.plan("b", [], [])
            assert plans(watcher) == (1, "j: 0 of 80")
            assert not client.progress("b", 3)
        until(lambda: plans(watcher) == (0, ""))


def test_processes_with_one_plan_share_it_and_the_last_one_counts(server: Served) -> None:
    stats = stats_of(server)
    with connect(server.settings) as first, connect(server.settings) as second:
        assert first.plan("a", stats, in_turn(), job="j", position=10)
        assert second.plan("other name", stats, in_turn(), job="j", position=20)
        assert plans(first) == (1, "j: 10 of 80")
        assert first.progress("a", 50)
        assert plans(first) == (1, "j: 20 of 80")
        assert second.plan("other name", [], [])
        assert plans(first) == (1, "j: 50 of 80")
        assert second.plan("late", stats, in_turn(), job="j", position=3), "begins before the others"
        assert plans(first) == (1, "j: 3 of 80")
        assert second.plan("late", stats, in_turn(), job="another", position=3)
        assert plans(first) == (2, "j: 50 of 80; another: 3 of 80")


def test_a_plan_rests_when_all_its_readers_do(server: Served) -> None:
    stats = stats_of(server)
    with connect(server.settings) as first, connect(server.settings) as second:
        for client, position in ((first, 10), (second, 20)):
            client.pause("a")  # nobody knows it
            assert client.plan("a", stats, in_turn(), job="j", position=position)
        first.pause("a")
        assert plans(first) == (1, "j: 20 of 80"), "the one that reads counts"
        second.pause("a")
        assert plans(second) == (1, "j: 20 of 80, paused")
        assert first.progress("a", 15)
        assert plans(second) == (1, "j: 15 of 80")
        assert second.plan("a", stats, in_turn(), job="j", position=12)
        assert plans(second) == (1, "j: 12 of 80")


@pytest.mark.parametrize(
    ("env", "job"),
    [
        ({"SLURM_JOB_ID": "17", "TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "1"}, "17"),
        ({"TORCHELASTIC_RUN_ID": "run", "MASTER_PORT": "1"}, "run"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}, "host:29500"),
        ({"SLURM_JOB_ID": ""}, f"group {os.getpgid(0)}"),
        ({}, f"group {os.getpgid(0)}"),
    ],
)
def test_the_job_is_what_its_processes_have_in_common(env: dict[str, str], job: str) -> None:
    assert default_job(env) == job


@pytest.mark.parametrize(
    "uses", [[(8, 0, 1)], [(-1, 0, 1)], [(0, 2, 1)], [(0, -1, 1)], [(0, 0, 1 << 62)]], ids=lambda u: str(u[0])
)
def test_nonsense_is_refused_and_leaves_nothing(server: Served, uses: list[tuple[int, int, int]]) -> None:
    stats = stats_of(server)
    with connect(server.settings) as client:
        with pytest.raises(ConfigError, match="a plan"):
            client.plan("a", stats, uses)
        with pytest.raises(ConfigError, match="share"):
            client.plan("a", stats, in_turn(), share=0.0)
        assert plans(client) == (0, "")
        assert client.plan("a", stats, in_turn())


def test_local_objects_need_no_plan(server: Served, tmp_path: Path) -> None:
    stats = stats_of(server)
    mixed = [ObjectStat(str(tmp_path / "x"), 1, "v"), *stats[:2]]
    with connect(server.settings) as client:
        assert client.plan("a", mixed, [(0, 0, 9), (2, 10, 19)])
        assert client.stats()["plan_objects"] == 2
        until(lambda: asked_for(server) == {"k1"})
        assert client.plan("a", mixed[:1], [(0, 0, 9)])
        assert plans(client) == (0, "")


def test_a_large_plan_crosses_in_pieces(server: Served) -> None:
    objects = [ObjectStat(f"s3://bucket/far/{i}", 1, '"v"') for i in range(2500)]
    near = stats_of(server)
    uses = [(2500 + n, first, last) for n, first, last in in_turn()] + [
        (i % 2500, 100 + i, 100 + i) for i in range(25_000)
    ]
    with connect(server.settings) as client:
        assert client.plan("a", [*objects, *near], uses, job="j", position=70)
        assert client.stats()["plan_objects"] == 2508
        assert plans(client) == (1, "j: 70 of 25100")


def greeted(server: Served, ident: str, versions: tuple[int, ...] = protocol.VERSIONS) -> Connection:
    hello = protocol.Hello(versions, ident, os.getpid(), ORIGIN)
    return connect_socket(server.settings.socket, hello, timeout=30)[0]


def ask(connection: Connection, request: protocol.Plan | protocol.Progress) -> str:
    connection.send(request, timeout=30)
    reply, _ = connection.receive(timeout=30)
    assert isinstance(reply, protocol.Planned)
    return reply.state


def test_pieces_that_do_not_fit_together_are_lost(server: Served) -> None:
    item = protocol.Item("s3://bucket/k0", '"v"', 5)
    with greeted(server, "one") as one, greeted(server, "two") as two:
        assert ask(one, protocol.Plan("a", "d", objects=[item], last=True)) == "lost", "no offer came before"
        assert ask(one, protocol.Plan("a", "d")) == "more"
        assert ask(two, protocol.Plan("a", "d")) == "known", "it is being sent"
        assert ask(two, protocol.Progress("a", 3)) == "known"
        assert ask(one, protocol.Plan("a", "d", objects=[item])) == "more"
        assert ask(one, protocol.Plan("a", "d", objects=[item])) == "lost", "sent twice"
        assert ask(two, protocol.Progress("a", 4)) == "lost", "nobody sends it any more"
        assert ask(two, protocol.Plan("a", "d", position=4)) == "more"
        assert ask(two, protocol.Plan("a", "d", objects=[item])) == "more"
        assert ask(two, protocol.Plan("a", "d", start=1, uses=[(0, 0, 9)], last=True)) == "known"
        assert ask(one, protocol.Progress("a", 1)) == "known"


def test_a_sender_that_vanishes_leaves_nothing(server: Served) -> None:
    item = protocol.Item("s3://bucket/k0", '"v"', 5)
    with greeted(server, "two") as two:
        with greeted(server, "one") as one:
            assert ask(one, protocol.Plan("a", "d")) == "more"
            assert ask(one, protocol.Plan("a", "d", objects=[item])) == "more"
            assert ask(two, protocol.Plan("a", "d")) == "known"
        until(lambda: ask(two, protocol.Progress("a", 1)) == "lost")
    until(lambda: server.call(lambda: server.box.engine.plans._memory() == 0))


def test_a_session_has_no_more_plans_than_it_may(server: Served) -> None:
    with greeted(server, "one") as one:
        states = [ask(one, protocol.Plan(f"name {n}", f"digest {n}")) for n in range(65)]
    assert states == [*["more"] * 64, "refused"]


def test_more_memory_than_there_is_for_plans_is_refused(server: Served) -> None:
    server.call(lambda: setattr(server.box.engine.plans, "_most_bytes", 3000))
    stats = stats_of(server)
    with connect(server.settings) as client:
        assert not client.plan("a", stats, in_turn())
        assert client.plan("a", stats[:2], in_turn(2))


@pytest.mark.parametrize(("eviction", "stays"), [("lru", False), ("s3fifo", True)])
def test_without_any_plan_the_setting_decides(tmp_path: Path, eviction: str, stays: bool) -> None:
    """A scan over more than the cache holds, after an object that was read often (not in one go)."""
    store = ScriptedStore({f"k{i:02d}": random.Random(i).randbytes(CHUNK) for i in range(40)})
    with served(tmp_path, store, quota=24 * CHUNK, eviction=eviction) as server, connect(server.settings) as client:
        stats = client.list("s3://bucket/")
        for stat in [*[stats[0]] * 5, *stats[1:]]:
            with client.open(stat.url, version=stat.version, size=stat.size) as shard:
                shard.view().release()
            until(lambda: server.call(lambda: server.control.sessions.leases) == 0)
            asyncio.run_coroutine_threadsafe(server.box.engine._holdings.drop_idle(), server.loop).result(30)
        held = {entry.url for entry in client.entries()}
        assert (stats[0].url in held) is stays
        assert stats[-1].url in held and stats[1].url not in held


def test_a_client_of_the_former_protocol_is_served(server: Served) -> None:
    with greeted(server, "old", versions=(2,)) as old:
        assert old.version == 2
        old.send(protocol.Stats(), timeout=30)
        reply, _ = old.receive(timeout=30)
        assert isinstance(reply, protocol.StatsReply)


def test_a_daemon_of_the_former_protocol_is_not_told_of_plans(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    settings = box_settings(tmp_path / "cache", autostart=False)
    got: list[protocol.Request] = []

    def serve(sock: socket.socket) -> None:
        frames = FrameBuffer()
        while data := sock.recv(65536):
            frames.feed(data)
            for body in frames.frames():
                got.append(protocol.decode_request(body))
                welcome = isinstance(got[-1], protocol.Hello)
                sock.sendall(protocol.encode(protocol.Welcome(2, os.getpid(), "") if welcome else protocol.Done()))

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(settings.socket))
        listener.listen()
        accepted: list[socket.socket] = []

        def accept() -> None:
            accepted.append(listener.accept()[0])
            serve(accepted[0])

        thread = threading.Thread(target=accept)
        thread.start()
        with connect(settings) as client:
            stat = ObjectStat("s3://bucket/k", 5, '"v"')
            assert not client.plan("a", [stat], [(0, 0, 9)])
            assert not client.progress("a", 3)
            client.prefetch([stat])
        thread.join(30)
        accepted[0].close()
    assert [type(request).__name__ for request in got] == ["Hello", "Prefetch"]
