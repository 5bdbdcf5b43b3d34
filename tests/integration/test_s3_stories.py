"""Stories of a failing origin told by a real server behind the faulty proxy (the wide matrix runs in memory)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest

from cachefs.clock import SYSTEM_CLOCK
from cachefs.errors import Changed, Corrupt, Denied, StoreError, Throttled, Unavailable
from cachefs.metrics import Metrics
from cachefs.objstore import BlockingStore, ObjectStore
from cachefs.objstore.backoff import RetryPolicy
from cachefs.objstore.limiter import Limiter
from cachefs.objstore.open import open_backend
from cachefs.objstore.retry import RetryingStore
from cachefs.objstore.tasks import all_of
from cachefs.objstore.url import parse_url
from cachefs.testing.faults import Fault
from cachefs.testing.originstories import KINDS, Story, story
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

pytestmark = [pytest.mark.s3, pytest.mark.xdist_group("seaweed")]

CHUNK = 128 << 10
DEADLINE = 60.0
POLICY = RetryPolicy(deadline=DEADLINE, stall=1.0, parallel=4, base=0.02, cap=0.5)
DATA = random.Random(2).randbytes(8 * CHUNK)
OTHER = random.Random(3).randbytes(8 * CHUNK)
# A trickle takes the whole deadline, and a server of one pair of keys cannot give others: those run in memory only.
ELSEWHERE = frozenset({"trickle", "expired"})
SEEDS = [seed for seed in range(1, 40) if not ELSEWHERE & set(story(seed, CHUNK).kinds)][:20]


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[CountingProxy]:
    with CountingProxy(seaweed.endpoint) as running:
        yield running


async def tell(told: Story, store: ObjectStore, proxy: CountingProxy, owner: BlockingStore) -> list[bytes | StoreError]:
    meta = await store.head("k")
    whole = DATA[: told.chunks * CHUNK]

    async def chunk(index: int) -> bytes | StoreError:
        if index == told.replaced:
            await asyncio.to_thread(owner.put, "k", OTHER[: len(whole)])
        if index == told.expired:
            proxy.faults.add(Fault(status=400, code="ExpiredToken"), method="GET", times=None)
        start, end = index * CHUNK, (index + 1) * CHUNK
        began = time.monotonic()
        try:
            got = bytes(await store.get_range("k", start, end, version=meta))
        except StoreError as e:
            return e
        finally:
            assert time.monotonic() - began < DEADLINE + 30
        assert got == whole[start:end], "bytes of the version that was opened, and no others"
        return got

    return await all_of([partial(chunk, i) for i in range(told.chunks)], at_once=told.at_once)


def test_the_seeds_are_about_everything() -> None:
    assert {kind for seed in SEEDS for kind in story(seed, CHUNK).kinds} >= set(KINDS) - ELSEWHERE


@pytest.mark.parametrize("seed", SEEDS)
def test_stories(seaweed: SeaweedServer, proxy: CountingProxy, s3_bucket: str, seed: int) -> None:
    told = story(seed, CHUNK)
    name = "fsspec" if seed % 3 == 0 else "obstore"
    origin = replace(seaweed.origin, endpoint=proxy.endpoint, backend=name)

    async def main(owner: BlockingStore) -> list[bytes | StoreError]:
        backend = open_backend(parse_url(f"s3://{s3_bucket}"), origin, POLICY)
        limiter = Limiter(POLICY.parallel)
        async with RetryingStore(backend, POLICY, limiter=limiter, metrics=Metrics(), clock=SYSTEM_CLOCK) as store:
            outcomes = await tell(told, store, proxy, owner)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return outcomes

    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as owner:
        owner.put("k", DATA[: told.chunks * CHUNK])
        for trouble in told.troubles:
            proxy.faults.add(trouble.fault, method=trouble.method, after=trouble.after, times=trouble.times)
        outcomes = asyncio.run(main(owner))
    errors = [e for e in outcomes if isinstance(e, StoreError)]
    if told.survivable:
        assert not errors, f"{told}: {errors[0]}"
    assert all(type(e) in {Changed, Corrupt, Denied, Throttled, Unavailable} for e in errors), errors
    if told.kinds == ("replaced",):
        assert any(isinstance(e, Changed) for e in errors)
    if "expired for good" in told.kinds:
        assert any(type(e) is Denied for e in errors)
