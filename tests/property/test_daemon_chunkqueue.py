"""The order in which chunks are fetched: a model says what must come next, whatever was asked before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cachefs.daemon.chunkqueue import ChunkQueue, Tier

OWNERS = st.sampled_from("abcd")
CHUNKS = st.lists(st.integers(0, 9), max_size=6, unique=True)


class QueueMachine(RuleBasedStateMachine):
    """Against lists: demanded pairs in order of demand, then owners by tier in order of arrival."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: ChunkQueue[str] = ChunkQueue()
        self.todo: dict[str, list[int]] = {}
        self.tier: dict[str, Tier] = {}
        self.arrival: list[str] = []
        self.demanded: list[tuple[str, int]] = []

    @rule(owner=OWNERS, chunks=CHUNKS, tier=st.sampled_from(list(Tier)))
    def add(self, owner: str, chunks: list[int], tier: Tier) -> None:
        self.queue.add(owner, chunks, tier)
        todo = self.todo.setdefault(owner, [])
        todo += [c for c in chunks if c not in todo]
        if not todo:
            del self.todo[owner]
        elif owner not in self.tier:
            self.tier[owner] = tier
            self.arrival.append(owner)

    @rule(owner=OWNERS, chunks=CHUNKS)
    def demand(self, owner: str, chunks: list[int]) -> None:
        self.queue.demand(owner, chunks)
        for chunk in chunks:
            if chunk in self.todo.get(owner, []) and (owner, chunk) not in self.demanded:
                self.demanded.append((owner, chunk))

    @rule(owner=OWNERS)
    def promote(self, owner: str) -> None:
        self.queue.promote(owner)
        if self.tier.get(owner) is Tier.AHEAD:
            self.tier[owner] = Tier.OPENED
            self.arrival.remove(owner)
            self.arrival.append(owner)

    @rule(owner=OWNERS)
    def drop(self, owner: str) -> None:
        self.queue.drop(owner)
        self.forget(owner)

    @precondition(lambda self: self.todo)
    @rule()
    def take(self) -> None:
        if self.demanded:
            expected = self.demanded[0]
        else:
            owner = min(self.arrival, key=lambda o: (self.tier[o], self.arrival.index(o)))
            expected = (owner, self.todo[owner][0])
        assert self.queue.peek() == expected
        assert self.queue.take() == expected
        owner, chunk = expected
        self.demanded = [d for d in self.demanded if d != expected]
        self.todo[owner].remove(chunk)
        if not self.todo[owner]:
            self.forget(owner)

    @invariant()
    def size_agrees(self) -> None:
        assert len(self.queue) == sum(map(len, self.todo.values()))
        if not self.todo:
            assert self.queue.take() is None

    def forget(self, owner: str) -> None:
        self.todo.pop(owner, None)
        self.tier.pop(owner, None)
        self.demanded = [d for d in self.demanded if d[0] != owner]
        if owner in self.arrival:
            self.arrival.remove(owner)


TestChunkQueue = QueueMachine.TestCase


@given(st.lists(st.integers(0, 50), unique=True))
def test_everything_added_is_taken_once(chunks: list[int]) -> None:
    queue: ChunkQueue[str] = ChunkQueue()
    queue.add("a", chunks, Tier.OPENED)
    queue.demand("a", chunks[::-1])
    taken = []
    while (item := queue.take()) is not None:
        taken.append(item[1])
    assert taken == chunks[::-1]
