"""Thousands of ways in which an origin can fail: right bytes of one version, or a typed error, by the deadline."""

from __future__ import annotations

import asyncio
import collections
import random
from functools import partial

import pytest

from cachefs.daemon.origins import Bucket
from cachefs.daemon.transfers import Transfers
from cachefs.errors import Changed, Corrupt, Denied, NearflashError, StoreError, Throttled, Unavailable
from cachefs.metrics import Metrics
from cachefs.objstore.backoff import RetryPolicy
from cachefs.objstore.limiter import Limiter
from cachefs.objstore.retry import RetryingStore
from cachefs.objstore.tasks import all_of
from cachefs.objstore.url import parse_url
from cachefs.testing.clock import TimerClock
from cachefs.testing.memoryserver import MemoryClient, MemoryServer
from cachefs.testing.originstories import KINDS, Story, story

CHUNK = 64 << 10
POLICY = RetryPolicy(deadline=60.0, stall=2.0, parallel=4)
TARGET = parse_url("s3://bucket/k")
DATA = random.Random(0).randbytes(8 * CHUNK)
OTHER = random.Random(1).randbytes(8 * CHUNK)

Outcome = bytes | StoreError


class Stage:
    """One story, told to a daemon's bucket over a retrying store over a server in memory."""

    def __init__(self, told: Story, seed: int) -> None:
        self.told = told
        self.size = told.chunks * CHUNK
        self.clock = TimerClock(turns=40)
        self.server = MemoryServer(self.clock)
        self.server.issues = told.renewable
        self.server.keep("k", DATA[: self.size])
        for trouble in told.troubles:
            self.server.faults.add(trouble.fault, method=trouble.method, after=trouble.after, times=trouble.times)
        self.client = MemoryClient(self.server, stall=POLICY.stall)
        self.limiter = Limiter(POLICY.parallel)
        store = RetryingStore(
            self.client,
            POLICY,
            limiter=self.limiter,
            metrics=Metrics(),
            clock=self.clock,
            draw=random.Random(seed).random,
        )
        self.bucket = Bucket(store, Transfers(1 << 30, Metrics()).lane(POLICY.parallel), self.clock)

    async def read(self) -> list[Outcome]:
        """All chunks of one version; an error of one is no reason not to try the others."""
        meta = await self.bucket.head(TARGET)

        async def chunk(index: int) -> Outcome:
            if index == self.told.replaced:
                self.server.keep("k", OTHER[: self.size])
            if index == self.told.expired:
                self.server.expire()
            began = self.clock.monotonic()
            try:
                got = await self.bucket.get_range(TARGET, meta, index * CHUNK, (index + 1) * CHUNK)
            except StoreError as e:
                return e
            finally:
                assert self.clock.monotonic() - began <= POLICY.deadline + 1e-6
            assert bytes(got) == self.server.versions[str(meta.etag)][index * CHUNK : (index + 1) * CHUNK]
            return bytes(got)

        return await all_of([partial(chunk, i) for i in range(self.told.chunks)], at_once=self.told.at_once)


def tell(seed: int) -> list[Outcome]:
    """What came of a story; everything that must hold in every story is checked here."""
    told = story(seed, CHUNK)

    async def main() -> list[Outcome]:
        stage = Stage(told, seed)
        outcomes = await stage.clock.drive(stage.read())
        assert (stage.limiter.busy, stage.server.running) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert stage.client.renewals <= (1 if told.renewable else told.chunks + 1)
        return outcomes

    outcomes = asyncio.run(main())
    errors = [e for e in outcomes if isinstance(e, StoreError)]
    if told.survivable:
        assert not errors, f"{told}: {errors[0]}"
    for error in errors:
        assert error.url == str(TARGET)
        assert isinstance(error, expected(told)), f"{told}: {type(error).__name__} {error}"
    if not told.renewable:
        assert all("expired" in str(e) and e.hint for e in errors if isinstance(e, Denied)) or "denied" in told.kinds
    return outcomes


def expected(told: Story) -> tuple[type[NearflashError], ...]:
    """The errors that a story that cannot end well may end in."""
    kinds: dict[str, tuple[type[NearflashError], ...]] = {
        "replaced": (Changed,),
        "other version": (Changed,),
        "denied": (Denied,),
        "expired for good": (Denied,),
        # A reply that never ends takes the time that is meant for other tries; whatever they meet is the last word.
        "trickle": (Unavailable, Throttled, Corrupt),
    }
    return tuple(error for kind, errors in kinds.items() if kind in told.kinds for error in errors)


def test_stories() -> None:
    subjects: collections.Counter[str] = collections.Counter()
    good = 0
    for seed in range(6 * len(KINDS)):
        outcomes = tell(seed)
        subjects[KINDS[seed % len(KINDS)]] += 1
        good += sum(isinstance(outcome, bytes) for outcome in outcomes)
    assert set(subjects) == set(KINDS)
    assert good > 300


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_many_stories(part: int) -> None:
    for seed in range(1000 + part * 500, 1000 + (part + 1) * 500):
        tell(seed)
