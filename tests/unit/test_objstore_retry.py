"""The retry policy over a store that fails as scripted, on a clock that is moved by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from cachefs.errors import (
    Changed,
    Corrupt,
    Denied,
    NotFound,
    PreconditionFailed,
    Stalled,
    StoreError,
    Throttled,
    Unavailable,
)
from cachefs.metrics import Metrics
from cachefs.objstore.backoff import RetryPolicy
from cachefs.objstore.limiter import Limiter
from cachefs.objstore.replies import CredentialsExpired
from cachefs.objstore.retry import RetryingStore
from cachefs.testing.clock import TimerClock
from cachefs.testing.stores import DictStore, FaultyStore, Misstep

CUT = Unavailable("the connection failed", url="mem://bucket/k")
SLOW_DOWN = Throttled("the store asks for fewer requests", url="mem://bucket/k")
DATA = bytes(range(256)) * 40_000  # 10 MB


@dataclass
class Box:
    """One retrying store and what is around it."""

    inner: DictStore
    faulty: FaultyStore
    store: RetryingStore
    limiter: Limiter
    metrics: Metrics
    clock: TimerClock


def drive(body: Callable[[Box], Coroutine[Any, Any, None]], policy: RetryPolicy | None = None) -> None:
    policy = policy or RetryPolicy()

    async def main() -> None:
        clock = TimerClock()
        inner = DictStore()
        faulty = FaultyStore(inner, clock=clock)
        limiter, metrics = Limiter(policy.parallel), Metrics()
        store = RetryingStore(faulty, policy, limiter=limiter, metrics=metrics, clock=clock, draw=lambda: 0.5)
        box = Box(inner, faulty, store, limiter, metrics, clock)
        await clock.drive(body(box))
        await store.close()
        assert faulty.closed == 1
        assert limiter.busy == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_a_read_that_was_cut_is_read_again() -> None:
    async def body(box: Box) -> None:
        meta = box.inner.keep("k", DATA)
        box.faulty.plan.add(Misstep(error=CUT), method="get", times=3)
        got = await box.store.get_range("k", 10, 5000, version=meta)
        assert bytes(got) == DATA[10:5000]
        assert box.metrics.get("origin_retries") == 3
        assert box.metrics.get("origin_gets") == 4
        assert box.metrics.get("origin_requests") == 4
        assert box.metrics.get("origin_get_bytes") == 4990

    drive(body)


@pytest.mark.parametrize(
    "error", [NotFound("x"), Denied("x"), Changed("x"), StoreError("x")], ids=lambda e: type(e).__name__
)
def test_what_will_not_change_is_raised_at_once(error: StoreError) -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(error=error), times=None)
        before = box.clock.monotonic()
        with pytest.raises(type(error)):
            await box.store.head("k")
        assert len(box.faulty.calls) == 1
        assert box.clock.monotonic() == before

    drive(body)


def test_a_store_that_answered_once_is_waited_for_until_the_deadline() -> None:
    async def body(box: Box) -> None:
        box.inner.keep("k", b"1")
        await box.store.head("k")
        box.faulty.plan.add(Misstep(error=CUT), times=None)
        began = box.clock.monotonic()
        with pytest.raises(Unavailable, match=r"gave up after \d+ tries in 2\d\d s"):
            await box.store.head("k")
        assert 200 < box.clock.monotonic() - began <= 300
        pauses = [b.time - a.time for a, b in zip(box.faulty.calls[1:], box.faulty.calls[2:], strict=False)]
        assert max(pauses) <= 10

    drive(body)


def test_a_store_that_never_answered_is_given_up_sooner() -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(error=CUT), times=None)
        began = box.clock.monotonic()
        with pytest.raises(Unavailable, match="is the endpoint right"):
            await box.store.head("k")
        assert 5 < box.clock.monotonic() - began <= 10

    drive(body)


def test_a_store_that_never_answers_anything_gets_three_tries() -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(error=Stalled("no answer"), latency=20), times=None)
        with pytest.raises(Stalled, match="after 3 tries in 60 s"):
            await box.store.head("k")

    drive(body)


def test_a_call_that_hangs_ends_at_the_deadline() -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(hang=True), times=None)
        began = box.clock.monotonic()
        with pytest.raises(Stalled, match="no answer in 30 s"):
            await box.store.get("k")
        assert box.clock.monotonic() - began == 30
        assert box.faulty.running == 0

    drive(body, RetryPolicy(deadline=30))


def test_a_write_that_hangs_is_tried_again_after_the_stall_time() -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(hang=True), method="put")
        began = box.clock.monotonic()
        await box.store.put("k", b"x" * 65536)
        assert 21 <= box.clock.monotonic() - began < 22  # 20 s, one for 64 KiB, and a short pause
        assert box.metrics.get("origin_puts") == 2

    drive(body)


def test_waiting_for_a_slot_counts_towards_the_deadline() -> None:
    async def body(box: Box) -> None:
        box.inner.keep("k", b"1")
        began = box.clock.monotonic()
        async with box.limiter.slot():
            with pytest.raises(Stalled):
                await box.store.head("k")
        assert box.clock.monotonic() - began == 50
        assert box.faulty.calls == []
        assert (await box.store.head("k")).size == 1

    drive(body, RetryPolicy(deadline=50, parallel=1))


def test_a_wrong_reply_is_asked_for_again_a_few_times() -> None:
    async def body(box: Box) -> None:
        box.inner.keep("k", DATA)
        box.faulty.plan.add(Misstep(error=Corrupt("half of it")), method="get", times=2)
        assert bytes(await box.store.get_range("k", 0, 100)) == DATA[:100]
        box.faulty.plan.add(Misstep(error=Corrupt("half of it")), method="get", times=None)
        with pytest.raises(Corrupt, match="gave up after 4 tries"):
            await box.store.get_range("k", 0, 100)

    drive(body)


def test_a_range_that_keeps_breaking_comes_in_smaller_pieces_and_none_twice() -> None:
    async def body(box: Box) -> None:
        meta = box.inner.keep("k", DATA)
        # A middlebox that cuts every reply of more than 3 MB.
        box.faulty.plan.add(Misstep(error=CUT), matches=lambda call: call.end - call.start > 3_000_000, times=None)
        got = await box.store.get_range("k", 0, len(DATA), version=meta)
        assert bytes(got) == DATA
        assert box.metrics.get("origin_get_bytes") == len(DATA)
        good = [(call.start, call.end) for call in box.faulty.calls if call.end - call.start <= 3_000_000]
        assert [start for start, _ in good[1:]] == [end for _, end in good[:-1]]

    drive(body)


def test_being_throttled_halves_the_window_and_success_opens_it_again() -> None:
    async def body(box: Box) -> None:
        box.inner.keep("k", b"1")
        box.faulty.plan.add(Misstep(error=SLOW_DOWN), times=8)
        # Eight requests are under way together when the store says that it is too much: that counts once.
        await asyncio.gather(*(box.store.head("k") for _ in range(8)))
        assert box.metrics.get("origin_throttled") == 8
        assert box.limiter.window.size == 5, "half, and one more for the successes since"
        for _ in range(150):
            await box.store.head("k")
        assert box.limiter.window.size == 8

    drive(body, RetryPolicy(parallel=8))


def test_no_more_requests_at_a_time_than_allowed() -> None:
    async def body(box: Box) -> None:
        box.inner.keep("k", b"1")
        box.faulty.plan.add(Misstep(latency=1), times=None)
        await asyncio.gather(*(box.store.head("k") for _ in range(20)))
        assert box.faulty.most_running == 5
        assert box.clock.monotonic() == 1004

    drive(body, RetryPolicy(parallel=5))


def test_a_conditional_write_is_not_repeated_when_its_outcome_is_unknown() -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(error=CUT, after=True), method="put")
        with pytest.raises(Unavailable, match="read back"):
            await box.store.put("claim", b"mine", if_none_match=True)
        assert bytes((await box.store.get("claim"))[1]) == b"mine"
        with pytest.raises(PreconditionFailed):
            await box.store.put("claim", b"mine", if_none_match=True)
        assert [call.method for call in box.faulty.calls] == ["put", "get", "put"]

    drive(body)


def test_a_conditional_write_that_was_throttled_does_not_take_its_own_success_for_anothers() -> None:
    async def body(box: Box) -> None:
        # A gateway that answers 503 although the store has carried the write out.
        box.faulty.plan.add(Misstep(error=SLOW_DOWN, after=True), method="put")
        with pytest.raises(Unavailable, match="read back"):
            await box.store.put("claim", b"mine", if_none_match=True)
        box.faulty.plan.add(Misstep(error=SLOW_DOWN), method="put", times=2)
        await box.store.put("other", b"mine", if_none_match=True)

    drive(body)


def test_a_plain_write_is_repeated() -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(error=CUT, after=True), method="put", times=2)
        meta = await box.store.put("k", [b"one ", b"two"])
        assert meta == box.inner.objects["k"][0]
        assert box.inner.objects["k"][1] == b"one two"

    drive(body)


def test_a_listing_goes_on_where_it_broke_off() -> None:
    async def body(box: Box) -> None:
        for i in range(10):
            box.inner.keep(f"k{i}", b"")
        box.faulty.plan.add(Misstep(error=CUT), method="list", after=1, times=2)
        keys = [meta.key async for page in box.store.list("k") for meta in page.objects]
        assert keys == [f"k{i}" for i in range(10)]
        assert box.metrics.get("origin_lists") == 4 + 2

    drive(body)


def test_deletes_are_repeated_and_go_in_batches() -> None:
    async def body(box: Box) -> None:
        keys = [f"k{i}" for i in range(2500)]
        for key in keys:
            box.inner.keep(key, b"")
        box.faulty.plan.add(Misstep(error=CUT, after=True), method="delete")
        await box.store.delete(keys)
        assert box.inner.objects == {}
        assert [call.key for call in box.faulty.calls] == ["k0", "k0", "k1000", "k2000"]

    drive(body)


def test_expired_credentials_are_renewed_once() -> None:
    async def body(box: Box) -> None:
        box.inner.keep("k", b"1")
        box.faulty.plan.add(Misstep(error=CredentialsExpired("expired")), times=1)
        assert (await box.store.head("k")).size == 1
        assert box.faulty.renewed == 1
        box.faulty.plan.add(Misstep(error=CredentialsExpired("expired")), times=None)
        with pytest.raises(Denied, match="expired"):
            await box.store.head("k")
        assert box.faulty.renewed == 2

    drive(body)


def test_requests_that_find_the_token_expired_together_renew_it_once() -> None:
    async def body(box: Box) -> None:
        box.inner.keep("k", b"1")
        box.faulty.plan.add(Misstep(error=CredentialsExpired("expired"), latency=1.0), times=6)
        await asyncio.gather(*(box.store.head("k") for _ in range(6)))
        assert box.faulty.renewed == 1

    drive(body)


def test_what_stays_expired_is_denied_and_nothing_else() -> None:
    """Not a class of ours that a client across a socket does not know."""

    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(error=CredentialsExpired("expired", hint="renew it")), times=None)
        outcomes = await asyncio.gather(*(box.store.head("k") for _ in range(6)), return_exceptions=True)
        assert [type(e) for e in outcomes] == [Denied] * 6
        assert all("renew it" in str(e) for e in outcomes)
        assert box.faulty.renewed <= 2

    drive(body)


def test_credentials_that_never_come_are_an_error_by_the_deadline() -> None:
    async def body(box: Box) -> None:
        async def renew() -> bool:
            await asyncio.get_running_loop().create_future()
            return True

        box.store = RetryingStore(
            RenewedBy(renew), RetryPolicy(), limiter=box.limiter, metrics=box.metrics, clock=box.clock
        )
        began = box.clock.monotonic()
        with pytest.raises(Denied, match="took too long"):
            await box.store.head("k")
        assert box.clock.monotonic() - began == pytest.approx(RetryPolicy().deadline)

    drive(body)


class RenewedBy(FaultyStore):
    """Always expired."""

    def __init__(self, renew: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        super().__init__(DictStore())
        self.renewer = renew
        self.plan.add(Misstep(error=CredentialsExpired("expired")), times=None)

    async def renew(self) -> bool:
        return await self.renewer()


def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    async def body(box: Box) -> None:
        box.faulty.plan.add(Misstep(hang=True), times=None)
        waiting = [asyncio.create_task(box.store.get("k")) for _ in range(4)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert box.faulty.running == 2
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert all(task.cancelled() for task in waiting)
        assert box.faulty.running == 0
        box.faulty.plan.clear()
        box.inner.keep("k", b"1")
        assert (await box.store.head("k")).size == 1

    drive(body, RetryPolicy(parallel=2))


def test_the_error_keeps_its_parts() -> None:
    async def body(box: Box) -> None:
        error = Corrupt("half of it", url="mem://bucket/k", offset=7, hint="way out")
        box.faulty.plan.add(Misstep(error=error), times=None)
        with pytest.raises(Corrupt) as caught:
            await box.store.get("k")
        assert (caught.value.url, caught.value.offset, caught.value.hint) == ("mem://bucket/k", 7, "way out")
        assert caught.value.what.startswith("half of it; gave up after 4 tries")

    drive(body)


def test_ranges_that_are_none() -> None:
    async def body(box: Box) -> None:
        for start, end in ((-1, 3), (5, 4)):
            with pytest.raises(ValueError, match="not a range"):
                await box.store.get_range("k", start, end)
        assert memoryview(await box.store.get_range("k", 5, 5)).nbytes == 0
        assert box.faulty.calls == []

    drive(body)
