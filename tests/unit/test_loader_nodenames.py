"""The names of nodes are agreed once, by all ranks alike, whoever is late, silent or gone."""

from __future__ import annotations

import threading
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
import torch.distributed as dist

from cachefs.errors import NearflashError
from cachefs.testing.clock import ManualClock
from loader.nodenames import WAIT, agree, job_keys, job_store, tell


class FakeKeys:
    """A store in memory; ``silent``: it does not answer."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.silent = False

    def _answer(self) -> None:
        if self.silent:
            raise dist.DistNetworkError("connection reset")

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.held[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._answer()
        return self.held[key]

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.held for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._answer()
        if self.held.get(key, b"") == expected.encode():
            self.held[key] = desired.encode()
        return self.held[key]


def test_all_get_the_names_in_the_nodes_order() -> None:
    for order in permutations(range(3)):
        keys = FakeKeys()
        for number in order:
            tell(keys, number, f"host-{number}")
        clock = ManualClock()
        assert [agree(keys, 3, clock=clock) for _ in range(4)] == [("host-0", "host-1", "host-2")] * 4
        assert clock.monotonic() == ManualClock().monotonic()


class Arriving(ManualClock):
    """Somebody tells a name some seconds from now."""

    def __init__(self, keys: FakeKeys, after: float, number: int) -> None:
        super().__init__()
        self._due = self.monotonic() + after
        self._keys, self._number = keys, number

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.monotonic() >= self._due:
            tell(self._keys, self._number, "late")


def test_a_late_node_is_waited_for() -> None:
    keys = FakeKeys()
    tell(keys, 0, "early")
    clock = Arriving(keys, WAIT / 2, 1)
    assert agree(keys, 2, clock=clock) == ("early", "late")
    assert clock.monotonic() - ManualClock().monotonic() < WAIT / 2 + 1


def test_a_silent_node_makes_all_take_numbers_also_those_who_ask_when_it_has_come() -> None:
    keys, clock = FakeKeys(), ManualClock()
    tell(keys, 0, "early")
    assert agree(keys, 2, clock=clock) == ("node-0", "node-1")
    assert clock.monotonic() - ManualClock().monotonic() == pytest.approx(WAIT)
    tell(keys, 1, "late")
    assert agree(keys, 2, clock=clock) == ("node-0", "node-1")


def test_the_first_proposal_counts() -> None:
    """One rank has waited long enough just before the last name comes; another sees all names at that moment."""
    keys = FakeKeys()
    tell(keys, 0, "early")

    class Overtaken(FakeKeys):
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            agree(keys, 2, clock=ManualClock())  # the other one, before this proposal gets there
            return keys.compare_set(key, expected, desired)

    mine = Overtaken()
    mine.held = {**keys.held, "node/1": b"late"}
    assert agree(mine, 2, clock=ManualClock()) == ("node-0", "node-1")


def test_a_rank_whose_store_does_not_answer_raises_rather_than_guesses() -> None:
    keys = FakeKeys()
    keys.silent = True
    for ask in (lambda: tell(keys, 0, "x"), lambda: agree(keys, 2, clock=ManualClock())):
        with pytest.raises(NearflashError, match=r"does not answer.*ShardDataset\(nodes="):
            ask()


def test_two_nodes_on_one_machine_are_told_apart() -> None:
    keys = FakeKeys()
    for number in range(2):
        tell(keys, number, "here")
    assert agree(keys, 2) == ("here", "here#2")


def test_a_store_that_makes_no_connection_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is gone: that is told by who asks it, with the way out."""
    c10d: Any = dist

    class Gone(c10d.TCPStore):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))

        def clone(self) -> Any:
            raise dist.DistNetworkError("connection refused")

    store = Gone()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d.distributed_c10d, "_get_default_store", lambda: store)
    assert job_store() is store
    keys = job_keys(4, 2)
    assert keys is not None
    tell(keys, 0, "x")
    assert store.check(["nearflash/loader/nodes/4/2/node/0"])


def test_through_a_real_store() -> None:
    """Eight ranks on four nodes, each with a connection of its own."""
    minute = timedelta(seconds=60)
    c10d: Any = dist
    server = c10d.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=minute)
    found: dict[int, Any] = {}

    def rank(number: int) -> None:
        store = c10d.TCPStore("127.0.0.1", server.port, is_master=False, timeout=minute)
        keys = c10d.PrefixStore("nodes", store)
        if number % 2 == 0:
            tell(keys, number // 2, f"host-{number // 2}")
        found[number] = agree(keys, 4)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(8)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == dict.fromkeys(range(8), tuple(f"host-{i}" for i in range(4)))
