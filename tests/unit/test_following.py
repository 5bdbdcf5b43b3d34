"""Plans in a daemon without one: what is followed when, while threads are at work and senders stand still."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from cachefs import protocol
from cachefs.daemon.following import Followed, Following
from cachefs.daemon.plans import Plans
from cachefs.errors import ConfigError
from cachefs.flash import EntryKey
from cachefs.schedule import Plan
from cachefs.testing.clock import ManualClock
from cachefs.testing.enginebox import ACCESS

KEY = ("origin", "job", "digest")


def item(number: int) -> protocol.Item:
    return protocol.Item(f"s3://bucket/k{number}", '"v"', 10)


def name(number: int) -> str:
    return EntryKey(ACCESS.endpoint, f"s3://bucket/k{number}", '"v"').name


def numbers(plans: Plans | Following, count: int) -> list[int] | None:
    """What would go, in order."""
    known = {name(n): n for n in range(count)}
    following = plans.following if isinstance(plans, Plans) else plans
    order = following.order(None)
    return None if order is None else [known[one] for one in order]


def holding(plans: Plans | Following, count: int) -> None:
    following = plans.following if isinstance(plans, Plans) else plans
    following.begin({name(n): 10 for n in range(count)}, 80 * count)


def whole(digest: str, order: list[int], *, called: str = "a", each: int = 10) -> list[protocol.Plan]:
    """An offer and a plan in one piece: objects in this order."""
    uses = [(n, each * at, each * at + each - 1) for at, n in enumerate(order)]
    objects = [item(n) for n in range(len(order))]
    return [
        protocol.Plan(called, digest, "job"),
        protocol.Plan(called, digest, "job", objects=objects, uses=uses, last=True),
    ]


async def told(plans: Plans, pieces: list[protocol.Plan], session: str = "one") -> list[str]:
    return [(await plans.declare(session, ACCESS, piece)).state for piece in pieces]


class Gated(ManualClock):
    """Whoever sleeps waits at the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Event()
        self.gate = threading.Event()

    def sleep(self, seconds: float) -> None:
        self.came.set()
        assert self.gate.wait(60)

    async def arrived(self) -> None:
        assert await asyncio.to_thread(self.came.wait, 60)


def running(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def followed(count: int) -> Followed:
    plan = Plan.of([name(n) for n in range(count)], [10] * count, [(n, n, n) for n in range(count)])
    return Followed(plan, [item(n) for n in range(count)], ACCESS, 1.0, 0, 0, False)


def test_a_plan_that_went_before_its_thread_came_is_not_followed() -> None:
    following = Following(ManualClock(), fifo=False)
    work = following.begin_to_follow(KEY, followed(5))
    assert following.withdraw([KEY]) is None
    work()
    assert following.order(None) is None and not following.wants


def test_what_came_in_the_place_of_a_plan_is_not_withdrawn_with_it() -> None:
    following = Following(ManualClock(), fifo=False)
    holding(following, 5)
    following.begin_to_follow(KEY, followed(5))()
    leaving = following.withdraw([KEY])
    assert leaving is not None and numbers(following, 5) is not None
    following.begin_to_follow(KEY, followed(5))()
    leaving()
    assert numbers(following, 5) == [4, 3, 2, 1, 0]


def test_a_client_that_dies_while_its_plan_is_being_followed_leaves_nothing() -> None:
    async def go() -> None:
        clock = Gated()
        plans = Plans(clock, fifo=False)
        holding(plans, 5)
        telling = asyncio.create_task(told(plans, whole("d", [0, 1, 2, 3, 4])))
        await clock.arrived()
        plans.leave("one")
        clock.gate.set()
        await telling
        await asyncio.gather(*plans._working)
        assert plans.following.order(None) is None
        assert not plans.any and not plans.wants and plans.stats()["plans"] == 0
        assert plans._memory() == 0 and not plans._readers

    running(go())


def test_the_present_plan_stays_until_the_next_is_followed() -> None:
    async def go() -> None:
        plans = Plans(ManualClock(), fifo=False)
        holding(plans, 4)
        assert await told(plans, whole("first", [0, 1, 2, 3])) == ["more", "known"]
        assert numbers(plans, 4) == [3, 2, 1, 0]
        offer, piece = whole("second", [3, 2, 1, 0])
        assert await told(plans, [offer]) == ["more"]
        assert numbers(plans, 4) == [3, 2, 1, 0] and plans.stats()["plan_progress"] == "job: 0 of 40"
        assert await told(plans, [piece]) == ["known"]
        await asyncio.gather(*plans._working)
        assert numbers(plans, 4) == [0, 1, 2, 3] and plans.stats()["plans"] == 1
        assert await told(plans, [whole("third", [1, 0, 2, 3])[0]]) == ["more"]
        assert await told(plans, [whole("second", [3, 2, 1, 0])[0]]) == ["known"], "back to the one before"
        assert plans.stats()["plans"] == 1 and not plans._former
        plans.leave("one")
        await asyncio.gather(*plans._working)
        assert numbers(plans, 4) is None and not plans._readers

    running(go())


def test_the_former_plan_gives_way_where_there_is_no_memory_for_two() -> None:
    async def go() -> None:
        plans = Plans(ManualClock(), most_bytes=5000)
        assert await told(plans, whole("first", [0, 1, 2, 3])) == ["more", "known"]
        assert await told(plans, whole("second", [3, 2, 1, 0])) == ["more", "known"]
        assert await told(plans, whole("third", list(range(9)))) == ["more", "refused"]
        assert plans._memory() == 0

    running(go())


def test_somebody_else_sends_a_plan_whose_sender_stands_still() -> None:
    async def go() -> None:
        clock = ManualClock()
        plans = Plans(clock)
        offer, piece = whole("d", [0, 1, 2])
        first = protocol.Plan("a", "d", "job", objects=[item(0)])
        assert await told(plans, [offer, first]) == ["more", "more"]
        assert await told(plans, [offer], "two") == ["known"]
        clock.sleep(9)
        assert plans.progress("two", protocol.Progress("a", 1)).state == "known"
        clock.sleep(2)
        assert plans.progress("two", protocol.Progress("a", 2)).state == "lost"
        assert await told(plans, [offer, piece], "two") == ["more", "known"]
        late = protocol.Plan("a", "d", "job", start=1, uses=[(0, 0, 9)], last=True)
        assert await told(plans, [late, offer]) == ["lost", "known"]
        assert plans.progress("one", protocol.Progress("a", 3)).state == "known"

    running(go())


def test_whoever_sends_nonsense_sends_no_more() -> None:
    async def go() -> None:
        plans = Plans(ManualClock())
        offer, piece = whole("d", [0, 1, 2])
        assert await told(plans, [offer]) == ["more"]
        assert await told(plans, [offer], "two") == ["known"]
        with pytest.raises(ConfigError):
            await told(plans, [protocol.Plan("a", "d", "job", objects=[protocol.Item("s3://", '"v"', 1)])])
        assert await told(plans, [offer, piece], "two") == ["more", "known"]

    running(go())


@pytest.mark.parametrize("to", [5, 29_999], ids=["back", "far on"])
def test_going_back_or_far_on_holds_up_nobody(to: int) -> None:
    """The event loop and the store go on while a plan is ranked anew."""

    async def go() -> None:
        count, clock = 3000, Gated()
        clock.gate.set()
        plans, ready = Plans(clock, fifo=False), asyncio.Event()
        plans.on_ready = ready.set
        holding(plans, count)
        order = list(range(count))
        uses = [(n, 10 * at, 10 * at + 9) for at, n in enumerate(order)]
        pieces = [
            *(
                protocol.Plan("a", "d", "job", 1.0, 1000, n, [item(k) for k in range(n, n + 500)])
                for n in range(0, count, 500)
            ),
            protocol.Plan("a", "d", "job", 1.0, 1000, count, [], uses, True),
        ]
        assert set(await told(plans, [protocol.Plan("a", "d", "job", position=1000), *pieces])) == {"more", "known"}
        clock.gate.clear()
        clock.came.clear()
        if to < 1000:
            late = protocol.Plan("b", "d", "job", position=to)
            assert await told(plans, [late], "two") == ["known"]
        else:
            assert plans.progress("one", protocol.Progress("a", to)).state == "known"
        await clock.arrived()
        assert plans.stats()["plan_progress"] == f"job: {to} of 30000", "told at once"
        assert plans.wants, "there is more to come"
        plans.following.removed(name(2500))
        plans.following.added(name(2500), 10)
        assert next(plans.following.order(None) or iter(())) in {name(n) for n in range(count)}
        plans.pause("one", ["a"])
        clock.gate.set()
        await ready.wait()
        goes_first = numbers(plans, count)
        assert goes_first is not None and sorted(goes_first) == order
        assert goes_first[-1] == (0 if to < 1000 else 2999)
        assert plans.stats()["plan_progress"] == f"job: {to} of 30000" + (", paused" if to > 1000 else "")

    running(go())


@pytest.mark.parametrize(
    "piece",
    [
        protocol.Plan("a" * 257, "d"),
        protocol.Plan("a", "d" * 257),
        protocol.Plan("a", "d", "j" * 257),
        protocol.Plan("a", "d", position=-1),
        protocol.Plan("a", "d", position=1 << 62),
        protocol.Plan("a", "d", objects=[protocol.Item("s3://bucket/k", "v" * 1025, 1)]),
        protocol.Plan("a", "d", objects=[item(0)] * (protocol.PAGE_ITEMS + 1)),
        protocol.Plan("a", "d", uses=[(0, 0, 0)] * 10_001),
    ],
    ids=["name", "digest", "job", "negative", "large", "version", "objects", "uses"],
)
def test_what_a_client_may_say_is_bounded(piece: protocol.Plan) -> None:
    plans = Plans(ManualClock())
    with pytest.raises(ConfigError, match=r"a plan|a piece"):
        asyncio.run(plans.declare("one", ACCESS, piece))
    assert not plans._declared


def test_positions_of_readers_are_bounded_and_versions_count() -> None:
    async def go() -> None:
        plans = Plans(ManualClock())
        await told(plans, [protocol.Plan("a", "d")])
        for position in (-1, 1 << 62):
            with pytest.raises(ConfigError, match="position"):
                plans.progress("one", protocol.Progress("a", position))
        await told(plans, [protocol.Plan("a", "d", objects=[protocol.Item("s3://bucket/k", "v" * 1000, 1)])])
        assert plans._memory() > 1500

    running(go())


def test_the_progress_of_many_plans_is_shown_in_part() -> None:
    async def go() -> None:
        plans = Plans(ManualClock())
        for n in range(20):
            await told(plans, whole(f"d{n}", [0], called=f"plan {n}"))
        assert str(plans.stats()["plan_progress"]).endswith("job: 0 of 10; and 4 more")

    running(go())


def test_what_never_fits_is_not_waited_for() -> None:
    async def go() -> None:
        plans = Plans(ManualClock())
        plans.following.begin({}, 800)
        objects = [item(0), protocol.Item("s3://bucket/large", '"v"', 800), item(2)]
        last = protocol.Plan("a", "d", objects=objects, uses=[(0, 0, 9), (1, 10, 19), (2, 20, 29)], last=True)
        assert await told(plans, [protocol.Plan("a", "d"), last]) == ["more", "known"]
        wanted = [plans.following.next_wanted() for _ in range(3)]
        assert [one and one[1].url for one in wanted] == ["s3://bucket/k0", "s3://bucket/k2", None]

    running(go())


def test_a_reader_that_is_silent_for_long_holds_up_nobody() -> None:
    async def go() -> None:
        clock = ManualClock()
        plans = Plans(clock)
        assert await told(plans, whole("d", [0, 1, 2])) == ["more", "known"]
        assert await told(plans, whole("d", [0, 1, 2])[:1], "two") == ["known"]
        clock.advance(299)
        plans.progress("one", protocol.Progress("a", 20))
        assert plans.stats()["plan_progress"] == "job: 0 of 30"
        clock.advance(2)
        plans.progress("one", protocol.Progress("a", 21))
        assert plans.stats()["plan_progress"] == "job: 21 of 30"
        plans.progress("two", protocol.Progress("a", 3))
        assert plans.stats()["plan_progress"] == "job: 3 of 30", "it speaks again"
        await asyncio.gather(*plans._working)

    running(go())


def test_what_found_no_room_is_asked_for_again_once_there_is_some() -> None:
    following, told = Following(ManualClock(), fifo=False), list[str]()
    following.on_room = lambda: told.append("room")
    following.begin({"other": 10, "more": 10}, 800)
    following.begin_to_follow(KEY, followed(5))()
    wanted = following.next_wanted()
    assert wanted is not None
    following.removed("more")
    following.defer(wanted[0])
    assert not following.wants and not told
    following.removed("other")
    assert told == ["room"] and following.next_wanted() == wanted
