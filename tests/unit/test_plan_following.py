"""What a pass tells its daemon, by a client that notes it: no trouble there ends reading."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from typing import Any

import numpy as np
import pytest

from cachefs.errors import CacheError, DaemonUnavailable, NearflashError
from loader.planahead import Asks, Following, Needs, PlanNames

EDGES = [0, 10, 20, 30]


class Noting:
    """A client; ``fails`` names the call that raises ``error``. It forgets plans when told to."""

    def __init__(self, fails: str = "", error: NearflashError | None = None) -> None:
        self.fails = fails
        self.error = error or CacheError("a defect")
        self.calls: list[tuple[str, Any]] = []
        self.known = False

    def plan(self, name: str, objects: Any, uses: Any, *, position: int) -> bool:
        self._call("plan", (position, tuple(uses)))
        self.known = True
        return True

    def progress(self, name: str, position: int) -> bool:
        self._call("progress", position)
        return self.known

    def prefetch(self, what: Any) -> None:
        self._call("prefetch", what)

    def pause(self, name: str) -> None:
        self.calls.append(("pause", name))

    def withdraw(self, name: str) -> None:
        self.calls.append(("withdraw", name))

    def of(self, kind: str) -> list[Any]:
        return [what for called, what in self.calls if called == kind]

    def _call(self, kind: str, what: Any) -> None:
        self.calls.append((kind, what))
        if kind == self.fails:
            raise self.error


class Pass(Following):
    def __init__(self, client: Noting, names: PlanNames, position: int = 0) -> None:
        super().__init__(client, names, position)  # type: ignore[arg-type]
        self.noting = client

    def _needs(self, began: int, position: int) -> Needs:
        return Needs([], [(0, began, 40)], np.array(EDGES))

    def _ask(self, position: int) -> Asks:
        noting = self.noting

        class Window:
            def reach(self, position: int) -> None:
                noting.prefetch(position)

        return Window()


def read(following: Following) -> None:
    for position in range(0, 41, 4):
        following.reach(position)
    following.close()
    following.close()


def test_a_plan_is_declared_told_of_at_its_edges_and_laid_to_rest() -> None:
    client, names = Noting(), PlanNames()
    read(Pass(client, names))
    assert client.of("plan") == [(0, ((0, 0, 40),))]
    # with the first batch once more: a pause of the former pass may have come late
    assert client.of("progress") == [0, 12, 20, 32]
    assert client.of("pause") == [names.of(0)]
    assert not client.of("prefetch")


@pytest.mark.parametrize("fails", ["plan", "progress"])
def test_a_daemon_that_fails_at_plans_is_asked_for_what_comes_next(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = PlanNames()
    client = Noting(fails)
    with caplog.at_level(logging.WARNING, "loader"):
        read(Pass(client, names))
        read(Pass(client, names))
    begin = 0 if fails == "plan" else 4
    assert client.of("prefetch") == 2 * list(range(begin, 41, 4))
    assert len(client.of(fails)) == 2, "once a pass"
    assert [record.getMessage() for record in caplog.records] == [
        "the cache was not told what will be read, which may be slower for that: a defect"
    ]


def test_nothing_is_asked_any_more_of_a_daemon_that_fails_at_that() -> None:
    class Refuses(Noting):
        def plan(self, *args: Any, **options: Any) -> bool:
            return False

    client = Refuses("prefetch")
    read(Pass(client, PlanNames()))
    assert client.of("prefetch") == [0]


def test_a_daemon_that_is_away_is_told_at_the_next_edge() -> None:
    client = Noting("plan", DaemonUnavailable("nobody answers"))
    following = Pass(client, PlanNames())
    for position in (0, 4, 8):
        following.reach(position)
    assert len(client.of("plan")) == 1
    client.fails = ""
    for position in range(12, 41, 4):
        following.reach(position)
    assert [position for position, _ in client.of("plan")] == [0, 12]
    assert not client.of("prefetch")


def test_what_is_declared_anew_is_what_was_declared() -> None:
    client = Noting()
    following = Pass(client, PlanNames(), 3)
    for position in (3, 7, 15):
        following.reach(position)
    client.known = False
    following.reach(22)
    following.reach(26)
    assert client.of("plan") == [(3, ((0, 3, 40),)), (15, ((0, 3, 40),))], "by its digest it is shared"


def test_plans_are_over_with_their_data_set() -> None:
    client, names = Noting(), PlanNames()
    first, second = Pass(client, names), Pass(client, names)
    first.reach(0)
    second.reach(0)
    declared = {names.of(0), names.of(1)}
    del first, second
    assert not client.of("withdraw")
    del names
    gc.collect()
    assert set(client.of("withdraw")) == declared


def test_threads_take_names_of_their_own() -> None:
    got: list[list[int]] = [[] for _ in range(8)]
    names, together = PlanNames(), threading.Barrier(8)

    def take(out: list[int]) -> None:
        together.wait(30)
        out += [names.take() for _ in range(100)]

    threads = [threading.Thread(target=take, args=(out,)) for out in got]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert sorted(number for out in got for number in out) == list(range(800))
    names.give_back(17)
    assert names.take() == 17
