"""How ranks meet: nothing waits for ever, nothing stays behind, and a missing rank is named."""

from __future__ import annotations

import threading

import pytest

from cachefs.errors import RankFailed
from cachefs.testing.clock import ManualClock
from ckptstore.ranks import EVERYBODY, VALUE_BYTES, LocalKeys, Meeting, alone, find_meeting

TOLD, SAID = ("a",), ("b",)


def meetings(world: int, keys: LocalKeys) -> list[Meeting]:
    return [Meeting(keys, rank, world, clock=ManualClock()) for rank in range(world)]


def test_a_conversation_leaves_no_key_behind() -> None:
    keys = LocalKeys()
    rounds = [m.round("r", 10) for m in meetings(3, keys)]
    before = len(keys)
    big = bytes(VALUE_BYTES * 2 + 5)
    for rank, conversation in enumerate(rounds):
        conversation.tell("a", big if rank == 1 else b"")
    assert [len(data) for data in rounds[0].hear("a")] == [0, len(big), 0]
    rounds[0].say("b", EVERYBODY, big)
    rounds[0].say("b", 2, b"for two")
    assert rounds[1].read("b", EVERYBODY) == big
    assert rounds[2].read("b", 2) == b"for two"
    for conversation in rounds:
        assert len(keys) > before
        conversation.leave(TOLD, SAID)
    assert len(keys) == before
    assert rounds[0].settled(0)


class Obliging(LocalKeys):
    """Claims to have deleted keys that never were, as c10d's FileStore does."""

    def delete_key(self, key: str) -> bool:
        super().delete_key(key)
        return True


@pytest.mark.parametrize("size", [0, 1, VALUE_BYTES - 1, VALUE_BYTES, VALUE_BYTES + 1, 3 * VALUE_BYTES])
def test_values_of_all_sizes(size: int) -> None:
    keys = Obliging()
    conversation = meetings(1, keys)[0].round("r", 10)
    before = len(keys)
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    conversation.tell("a", data)
    assert conversation.hear("a") == [data]
    conversation.leave(TOLD, SAID)
    assert len(keys) == before


def test_missing_ranks_are_named() -> None:
    rounds = [m.round("r", 10) for m in meetings(5, LocalKeys())]
    for rank in (0, 3):
        rounds[rank].tell("a", b"x")
    with pytest.raises(RankFailed, match=r"ranks 1-2,4 of 5 not heard of for 10 s"):
        rounds[0].hear("a")
    with pytest.raises(RankFailed, match="rank 0, which coordinates, not heard of"):
        rounds[1].read("b", EVERYBODY)


def test_an_answer_is_waited_for() -> None:
    keys = LocalKeys()
    ends = [Meeting(keys, rank, 2) for rank in range(2)]
    rounds = [m.round("r", 20) for m in ends]
    threading.Timer(0.02, lambda: rounds[1].tell("a", b"late")).start()
    rounds[0].tell("a", b"early")
    assert rounds[0].hear("a") == [b"early", b"late"]


def test_a_coordinator_that_goes_waits_for_the_others_a_while() -> None:
    ends = meetings(2, LocalKeys())
    assert ends[0].farewell(1)  # nothing was said at all
    rounds = [m.round("r", 10) for m in ends]
    rounds[0].leave(TOLD, SAID)
    assert not ends[0].farewell(1)
    assert ends[1].farewell(1)  # only the coordinator waits
    rounds[1].leave(TOLD, SAID)
    assert ends[0].farewell(1)


def test_a_second_store_does_not_see_what_the_first_left() -> None:
    keys = LocalKeys()
    first = [m.round("r", 1) for m in meetings(2, keys)]
    first[1].tell("a", b"stale")
    second = [m.round("r", 1) for m in meetings(2, keys)]
    second[0].tell("a", b"new")
    with pytest.raises(RankFailed, match="rank 1 of 2"):
        second[0].hear("a")


class DeadKeys(LocalKeys):
    """A store whose server is gone."""

    dead = False

    def check(self, keys: list[str]) -> bool:
        if self.dead:
            raise RuntimeError("recvValue failed\nwith a long trace")
        return super().check(keys)

    def add(self, key: str, amount: int) -> int:
        if self.dead:
            raise RuntimeError("broken pipe")
        return super().add(key, amount)

    def set(self, key: str, value: bytes) -> None:
        if self.dead:
            raise OSError("broken pipe")
        super().set(key, value)


def test_a_dead_store_is_one_line() -> None:
    keys = DeadKeys()
    conversation = meetings(2, keys)[0].round("r", 1)
    keys.dead = True
    for call in (
        lambda: conversation.hear("a"),
        lambda: conversation.tell("a", b""),
        lambda: conversation.leave(TOLD, SAID),
    ):
        with pytest.raises(RankFailed, match="key-value store does not answer") as caught:
            call()
        assert "\n" not in str(caught.value) and "trace" not in str(caught.value)
    assert not conversation.settled(1)


def test_alone_without_torch_distributed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    meeting = find_meeting("s3://bucket/x")
    assert (meeting.rank, meeting.world, meeting.coordinator) == (0, 1, True)
    conversation = alone().round("r", 0)
    conversation.tell("a", b"me")
    assert conversation.hear("a") == [b"me"]
