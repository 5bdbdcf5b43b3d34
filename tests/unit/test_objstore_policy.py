"""Whatever a store does wrong, and in whatever order: what the policy reports is true, and comes by the deadline."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import Corrupt, NotFound, PreconditionFailed, StoreError, Throttled, Unavailable
from cachefs.metrics import Metrics
from cachefs.objstore.backoff import RetryPolicy
from cachefs.objstore.limiter import Limiter
from cachefs.objstore.retry import RetryingStore
from cachefs.testing.clock import TimerClock
from cachefs.testing.stores import DictStore, FaultyStore, Misstep

POLICY = RetryPolicy(deadline=60, parallel=3)
DATA = bytes(range(256)) * 16_384  # 4 MiB


def missteps() -> st.SearchStrategy[Misstep]:
    transient = st.sampled_from([Unavailable("cut"), Throttled("slow down"), Corrupt("half of it")])
    return st.one_of(
        st.just(Misstep()),
        st.builds(Misstep, error=transient, after=st.booleans(), latency=st.floats(0, 30)),
        st.builds(Misstep, latency=st.floats(0, 90)),
        st.just(Misstep(hang=True)),
    )


def scripts() -> st.SearchStrategy[list[Misstep]]:
    return st.lists(missteps(), max_size=12)


class World:
    """A retrying store over one that does the steps of a script, one a call, and then works."""

    def __init__(self, script: list[Misstep], draw: float) -> None:
        self.clock = TimerClock()
        self.inner = DictStore()
        self.faulty = FaultyStore(self.inner, clock=self.clock)
        for step in script:
            self.faulty.plan.add(step)
        self.limiter = Limiter(POLICY.parallel)
        self.store = RetryingStore(
            self.faulty, POLICY, limiter=self.limiter, metrics=Metrics(), clock=self.clock, draw=lambda: draw
        )


DRAWS = st.floats(0, 1, exclude_max=True)


@settings(deadline=None, max_examples=60)
@given(scripts(), DRAWS, st.integers(0, len(DATA)), st.integers(0, len(DATA)))
def test_a_read_gives_the_right_bytes_or_an_error_by_the_deadline(
    script: list[Misstep], draw: float, one: int, other: int
) -> None:
    start, end = sorted((one, other))

    async def main() -> None:
        world = World(script, draw)
        meta = world.inner.keep("k", DATA)
        began = world.clock.monotonic()
        try:
            got = await world.clock.drive(world.store.get_range("k", start, end, version=meta))
        except StoreError as e:
            assert script, f"nothing was wrong, and yet: {e}"
        else:
            assert bytes(got) == DATA[start:end]
        assert world.clock.monotonic() - began <= POLICY.deadline
        assert (world.limiter.busy, world.faulty.running) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@settings(deadline=None, max_examples=100)
@given(scripts(), DRAWS, st.booleans())
def test_a_claim_never_lies(script: list[Misstep], draw: float, taken: bool) -> None:
    """Success: it is ours. "Somebody was first": somebody was. Anything else: it may be either, to be read back."""

    async def main() -> None:
        world = World(script, draw)
        if taken:
            world.inner.keep("claim", b"another's")
        try:
            await world.clock.drive(world.store.put("claim", b"ours", if_none_match=True))
        except PreconditionFailed:
            assert world.inner.objects["claim"][1] == b"another's"
        except StoreError:
            pass
        else:
            assert not taken
            assert world.inner.objects["claim"][1] == b"ours"
        if taken:
            assert world.inner.objects["claim"][1] == b"another's"

    asyncio.run(main())


@settings(deadline=None, max_examples=60)
@given(scripts(), DRAWS, st.integers(0, 12))
def test_a_listing_is_whole_or_fails(script: list[Misstep], draw: float, count: int) -> None:
    async def main() -> None:
        world = World(script, draw)
        keys = [f"k{i:02d}" for i in range(count)]
        for key in keys:
            world.inner.keep(key, b"")

        async def everything() -> list[str]:
            return [meta.key async for page in world.store.list("k") for meta in page.objects]

        try:
            assert await world.clock.drive(everything()) == keys
        except StoreError:
            assert script

    asyncio.run(main())


@settings(deadline=None, max_examples=40)
@given(scripts(), DRAWS, st.lists(st.sampled_from("abc"), min_size=1, max_size=12))
def test_many_calls_at_once_do_not_disturb_each_other(script: list[Misstep], draw: float, keys: list[str]) -> None:
    async def main() -> None:
        world = World(script, draw)
        for key in "ab":
            world.inner.keep(key, key.encode() * 10)

        async def read(key: str) -> None:
            try:
                _, got = await world.store.get(key)
            except NotFound:
                assert key == "c"
            except StoreError:
                assert script
            else:
                assert bytes(got) == key.encode() * 10

        async def all_of_them() -> None:
            await asyncio.gather(*map(read, keys))

        await world.clock.drive(all_of_them())
        assert world.faulty.most_running <= POLICY.parallel
        assert (world.limiter.busy, world.faulty.running) == (0, 0)

    asyncio.run(main())
