"""Second requests for late reads, and a bucket's limit under a storm; on a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import Changed, Denied, StoreError
from cachefs.metrics import Metrics
from cachefs.objstore.backoff import RetryPolicy
from cachefs.objstore.latency import Allowance, LatencyBook
from cachefs.objstore.limiter import Limiter
from cachefs.objstore.retry import RetryingStore
from cachefs.objstore.tasks import all_of
from cachefs.testing.clock import TimerClock
from cachefs.testing.faults import Fault
from cachefs.testing.memoryserver import MemoryClient, MemoryServer

SIZE = 1 << 20
DATA = random.Random(4).randbytes(SIZE)
POLICY = RetryPolicy(deadline=60.0, stall=20.0, parallel=8)


@dataclass
class Box:
    server: MemoryServer
    store: RetryingStore
    limiter: Limiter
    metrics: Metrics
    clock: TimerClock

    async def read(self, version: Any = None) -> float:
        """Seconds that a read takes; its bytes are the right ones."""
        began = self.clock.monotonic()
        assert bytes(await self.store.get_range("k", 0, SIZE, version=version)) == DATA
        return self.clock.monotonic() - began

    async def reads(self, count: int, *, at_once: int = 4) -> list[float]:
        return await all_of([self.read] * count, at_once=at_once)

    @property
    def gets(self) -> int:
        return len(self.server.asked)


def drive(body: Callable[[Box], Coroutine[Any, Any, None]], policy: RetryPolicy = POLICY) -> None:
    async def main() -> None:
        clock = TimerClock(turns=40)
        server = MemoryServer(clock)  # a read takes 20 ms
        server.keep("k", DATA)
        limiter, metrics = Limiter(policy.parallel), Metrics()
        draw = random.Random(5).random
        client = MemoryClient(server, stall=policy.stall)
        store = RetryingStore(client, policy, limiter=limiter, metrics=metrics, clock=clock, draw=draw)
        await clock.drive(body(Box(server, store, limiter, metrics, clock)))
        assert (limiter.busy, server.running) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def tail(seconds: list[float], quantile: float) -> float:
    return sorted(seconds)[int(quantile * len(seconds))]


def slow_for(draw: random.Random, share: float) -> Callable[[object], bool]:
    return lambda request: draw.random() < share


def test_the_tail_is_cut_by_few_requests_more() -> None:
    """4 % of all requests take 5 s instead of 20 ms."""
    seen: dict[float, list[float]] = {}
    extra: dict[float, float] = {}

    def run(share: float) -> None:
        async def body(box: Box) -> None:
            await box.reads(200)
            before = box.gets
            box.server.faults.add(Fault(latency=5.0), matches=slow_for(random.Random(6), 0.04), times=None)
            seen[share] = await box.reads(1500)
            extra[share] = (box.gets - before) / 1500 - 1
            assert box.metrics.get("origin_hedges") == box.gets - before - 1500
            assert box.metrics.get("origin_gets") == box.gets

        drive(body, replace(POLICY, hedge_share=share))

    run(0.0)
    run(0.05)
    assert extra[0.0] == 0 and 0 < extra[0.05] <= 0.05 + 5 / 1500
    assert tail(seen[0.0], 0.99) > 5
    assert tail(seen[0.05], 0.99) < 0.5
    assert sum(seen[0.05]) < 0.3 * sum(seen[0.0])


def test_the_first_good_answer_wins_and_the_other_is_cancelled() -> None:
    async def body(box: Box) -> None:
        await box.reads(200)
        box.server.faults.add(Fault(latency=50.0))
        assert await box.read() == pytest.approx(0.25 + 0.02, abs=0.01)
        assert (box.metrics.get("origin_hedges"), box.metrics.get("origin_hedges_won")) == (1, 1)
        assert box.server.running == 0, "the late one does not go on"
        box.server.faults.add(Fault(latency=0.4))
        box.server.faults.add(Fault(latency=50.0))
        assert await box.read() == pytest.approx(0.42, abs=0.01)
        assert (box.metrics.get("origin_hedges"), box.metrics.get("origin_hedges_won")) == (2, 1)
        assert box.server.running == 0

    drive(body)


@pytest.mark.parametrize(
    "fault", [Fault(reset=True), Fault(status=500, code="InternalError"), Fault(shift_range=3), Fault(extra=1)], ids=str
)
def test_a_bad_answer_does_not_win(fault: Fault) -> None:
    async def body(box: Box) -> None:
        await box.reads(200)
        box.server.faults.add(Fault(latency=1.0))
        box.server.faults.add(fault)
        assert await box.read() == pytest.approx(1.02, abs=0.01)
        box.server.faults.add(replace(fault, latency=0.5))
        box.server.faults.add(Fault(latency=1.0))
        assert await box.read() == pytest.approx(0.25 + 1.02, abs=0.02), "the first fails while the second is under way"
        assert box.metrics.get("origin_retries") == 0

    drive(body)


def test_both_bad_is_a_retry_and_a_refusal_is_final() -> None:
    async def body(box: Box) -> None:
        await box.reads(200)
        box.server.faults.add(Fault(reset=True, latency=0.5), times=2)
        await box.read()
        assert (box.metrics.get("origin_hedges"), box.metrics.get("origin_retries")) == (1, 1)
        box.server.faults.add(Fault(status=403, code="AccessDenied", latency=0.5))
        box.server.faults.add(Fault(latency=50.0))
        with pytest.raises(Denied):
            await box.read()

    drive(body)


def test_an_object_that_changes_between_the_two_is_never_mixed() -> None:
    async def body(box: Box) -> None:
        meta = await box.store.head("k")
        await box.reads(200)
        for fault in (Fault(latency=5.0), Fault(latency=0.5)):
            box.server.keep("k", DATA)
            meta = await box.store.head("k")
            box.server.faults.add(fault)
            reading = asyncio.ensure_future(box.read(meta))
            await box.clock.asleep(0.05)
            box.server.keep("k", bytes(SIZE))
            with pytest.raises(Changed):
                await reading

    drive(body)


def test_no_second_request_while_the_store_is_throttling_or_no_slot_is_free() -> None:
    async def body(box: Box) -> None:
        await box.reads(200)
        box.server.faults.add(Fault(status=503))
        box.server.faults.add(Fault(latency=1.0), after=1, times=3)
        await box.reads(5)
        assert box.metrics.get("origin_hedges") == 0
        await box.reads(200)
        box.server.faults.add(Fault(latency=1.0), times=POLICY.parallel)
        await box.reads(POLICY.parallel, at_once=POLICY.parallel)
        assert box.metrics.get("origin_hedges") == 0

    drive(body)


def test_a_reply_that_trickles_does_not_take_the_whole_deadline() -> None:
    """Never a stall, and never an end: after a few reads it is known to be late."""

    async def body(box: Box) -> None:
        await box.reads(20)
        box.server.faults.add(Fault(rate=SIZE / 1000))
        assert await box.read() == pytest.approx(1.02, abs=0.01)

    drive(body)


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=400))
def test_there_are_never_more_than_the_share(share: float, wanted: list[bool]) -> None:
    allowance = Allowance(share)
    taken = 0
    for number, want in enumerate(wanted, 1):
        allowance.earn()
        taken += want and allowance.take()
        assert taken <= share * number + 1e-6


@settings(max_examples=30)
@given(st.lists(st.floats(0.001, 10), min_size=100, max_size=500))
def test_a_late_read_is_later_than_most(times: list[float]) -> None:
    book = LatencyBook()
    assert book.delay(1000) is None
    for seconds in times:
        book.add(1000, seconds)
    delay = book.delay(1023)
    assert delay is not None and delay >= 0.25 and book.delay(3000) is None
    recent = times[: len(times) // 20 * 20][-400:]
    assert sum(seconds > delay for seconds in recent) <= 0.05 * len(recent)


# --- storms -----------------------------------------------------------------------------------------------------------


def rate(box: Box, since: float, until: float) -> float:
    """Requests a second that the server saw."""
    return sum(since <= asked.time < until for asked in box.server.asked) / (until - since)


def test_the_rate_falls_under_a_storm_and_comes_back() -> None:
    """20 s of calm, 30 s in which the store refuses everything, and calm again."""

    async def body(box: Box) -> None:
        clock = box.clock
        start = clock.monotonic()

        def storms(request: object) -> bool:
            return start + 20 <= clock.monotonic() < start + 50

        box.server.faults.add(Fault(status=503), matches=storms, times=None)

        async def reader() -> None:
            while clock.monotonic() < start + 90:
                try:
                    assert bytes(await box.store.get_range("k", 0, SIZE)) == DATA
                except StoreError as e:
                    raise AssertionError("a storm of 30 s is outlasted") from e
                await clock.asleep(0.3)

        await all_of([reader] * 6, at_once=6)
        before = rate(box, start, start + 20)
        storm = rate(box, start + 25, start + 50)
        after = rate(box, start + 70, start + 90)
        assert storm < 0.1 * before, (before, storm)
        assert after >= 0.95 * before, (before, after)

    drive(body)


def test_a_store_that_takes_half_the_load_gets_half_the_load() -> None:
    """More than 4 at a time are refused: the limit stays near what the store takes, and little is refused."""

    async def body(box: Box) -> None:
        box.server.faults.add(Fault(status=429), matches=lambda request: box.server.running > 4, times=None)
        await box.reads(600, at_once=8)
        assert box.metrics.get("origin_throttled") < 0.1 * 600

    drive(body)


def test_stores_of_one_bucket_share_its_limit() -> None:
    async def body(box: Box) -> None:
        other = RetryingStore(
            MemoryClient(box.server, stall=20.0), POLICY, limiter=box.limiter, metrics=Metrics(), clock=box.clock
        )
        box.server.faults.add(Fault(status=503), times=1)
        await box.read()
        assert box.limiter.window.size == POLICY.parallel // 2
        most = 0

        def watch(request: object) -> bool:
            nonlocal most
            most = max(most, box.server.running)
            return False

        box.server.faults.add(Fault(), matches=watch, times=None)
        both = [partial(store.get_range, "k", 0, SIZE) for store in (box.store, other) * 4]
        await all_of(both, at_once=8)
        assert most <= POLICY.parallel // 2 + 1

    drive(body)
