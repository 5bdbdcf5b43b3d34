"""The scheduler's decisions one by one: order, budget, shares, several readers; and eviction without any plan."""

from __future__ import annotations

import random
from collections import OrderedDict
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.errors import ConfigError
from cachefs.schedule import Course, Incoming, Plan, S3Fifo, Scheduler
from cachefs.schedule.ranks import Ranks
from cachefs.testing.replay import Replay


def names(count: int, prefix: str = "") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def in_order(objects: list[str], *, epochs: int = 1, size: int = 1, each: int = 10) -> Plan:
    """Each object for ``each`` positions, one after the other, in every epoch."""
    count = len(objects)
    uses = [(i % count, i * each, i * each + each - 1) for i in range(count * epochs)]
    return Plan.of(objects, [size] * count, uses)


def wanted(scheduler: Scheduler) -> list[tuple[object, int]]:
    out = []
    while (next_one := scheduler.next_wanted()) is not None:
        out.append((next_one.key, next_one.number))
    return out


@pytest.mark.parametrize(
    ("objects", "sizes", "uses"),
    [
        (["a"], [1, 2], []),
        (["a"], [-1], []),
        (["a"], [1 << 62], []),
        (["a"], [1], [(1, 0, 0)]),
        (["a"], [1], [(-1, 0, 0)]),
        (["a"], [1], [(0, 5, 4)]),
        (["a"], [1], [(0, -1, 4)]),
        (["a"], [1], [(0, 0, 1 << 62)]),
    ],
)
def test_nonsense_is_no_plan(objects: list[str], sizes: list[int], uses: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ConfigError, match="a plan"):
        Plan.of(objects, sizes, uses)


def test_an_object_that_is_named_twice_is_one() -> None:
    scheduler = Scheduler(budget=10)
    scheduler.declare("a", Plan.of(["x", "y", "x"], [1, 1, 1], [(0, 0, 0), (1, 1, 1), (2, 2, 2)]), job="a")
    held(scheduler, ["x", "y"])
    assert list(scheduler.victims()) == ["y", "x"]
    scheduler.progress("a", 1)
    assert list(scheduler.victims()) == ["x", "y"]
    assert [number for _, number in wanted(scheduler)] == [1, 0]


def test_what_is_needed_soonest_comes_first_and_no_more_than_the_budget() -> None:
    scheduler = Scheduler(budget=30)
    scheduler.declare("a", in_order(names(9, "a"), size=10), job="a")
    assert wanted(scheduler) == [("a", n) for n in (0, 1, 2, 3)], "what is in use, and 30 bytes"
    scheduler.progress("a", 9)
    assert wanted(scheduler) == []
    scheduler.progress("a", 20)
    assert wanted(scheduler) == [("a", 4), ("a", 5)]
    scheduler.progress("a", 85)
    assert wanted(scheduler) == [("a", 8)], "what is over is not brought in"


def test_an_object_larger_than_the_budget_comes_one_ahead() -> None:
    scheduler = Scheduler(budget=1)
    scheduler.declare("a", in_order(names(4), size=100), job="a")
    assert wanted(scheduler) == [("a", 0), ("a", 1)]


def test_the_faster_reader_is_served_first() -> None:
    scheduler = Scheduler(budget=4)
    for key in ("slow", "fast"):
        scheduler.declare(key, in_order(names(9, key)), job=key)
        scheduler.progress(key, 0, now=0.0)
    scheduler.progress("slow", 5, now=10.0)
    scheduler.progress("fast", 5, now=1.0)
    order = [key for key, number in wanted(scheduler) if number > 0]
    assert order == ["fast", "fast", "slow", "slow"]


def test_what_found_no_room_is_asked_for_again_when_a_reader_has_come_on() -> None:
    scheduler = Scheduler(budget=2)
    scheduler.declare("a", in_order(names(5)), job="a")
    first, second = scheduler.next_wanted(), scheduler.next_wanted()
    assert first is not None and second is not None
    scheduler.defer(second)
    assert scheduler.next_wanted() is None
    scheduler.progress("a", 1)
    assert wanted(scheduler)[0] == ("a", second.number)
    scheduler.withdraw("a")
    scheduler.defer(second)
    assert scheduler.next_wanted() is None


def held(scheduler: Scheduler, objects: list[str]) -> None:
    for name in objects:
        scheduler.added(name)


def test_what_nobody_needs_goes_first_then_what_is_needed_last() -> None:
    scheduler = Scheduler(budget=1)
    held(scheduler, ["x", "2", "0", "y", "1"])
    scheduler.used("x")
    scheduler.declare("a", in_order(names(5)), job="a")
    assert list(scheduler.victims()) == ["y", "x", "2", "1", "0"]
    assert list(scheduler.victims(Incoming("3", 1, ahead=False))) == ["y", "x", "2", "1"], "0 is in use"
    assert list(scheduler.victims(Incoming("3", 1, ahead=True))) == ["y", "x"], "the others are needed sooner"
    assert list(scheduler.victims(Incoming("new", 1, ahead=True))) == ["y", "x"]
    assert list(scheduler.victims(Incoming("new", 1, ahead=False))) == ["y", "x", "2", "1"]
    scheduler.progress("a", 10)
    assert list(scheduler.victims()) == ["y", "x", "0", "2", "1"], "its use is over"
    scheduler.withdraw("a")
    assert list(scheduler.victims()) == ["y", "x", "0", "2", "1"]


def test_an_object_of_several_plans_counts_for_the_one_that_needs_it_first() -> None:
    scheduler = Scheduler(budget=1)
    objects = names(4)
    scheduler.declare("a", in_order(objects), job="job")
    scheduler.declare("b", in_order(objects[::-1]), job="job")
    held(scheduler, objects)
    assert set(list(scheduler.victims())[:2]) == {"1", "2"}
    scheduler.progress("a", 40)
    assert list(scheduler.victims()) == ["0", "1", "2", "3"]
    scheduler.withdraw("b")
    assert set(scheduler.victims()) == set(objects), "nobody needs them, and they are there"


def test_what_a_resting_reader_needs_goes_before_what_others_need() -> None:
    scheduler = Scheduler(budget=1)
    scheduler.declare("train", in_order(names(3, "t")), job="job")
    scheduler.declare("test", in_order(names(3, "v")), job="job")
    held(scheduler, ["spare", *names(3, "v"), *names(3, "t")])
    scheduler.pause("test")
    assert list(scheduler.victims()) == ["spare", "v2", "v1", "v0", "t2", "t1", "t0"]
    assert list(scheduler.victims(Incoming("t0", 1, ahead=True)))[:4] == ["spare", "v2", "v1", "v0"]
    assert {key for key, _ in wanted(scheduler)} == {"train"}
    scheduler.pause("test", paused=False)
    assert {key for key, _ in wanted(scheduler)} == {"test"}
    assert list(scheduler.victims())[-2:] in (["t0", "v0"], ["v0", "t0"])


@pytest.mark.parametrize("shares", [(1.0, 1.0), (3.0, 1.0), (1.0, 4.0)])
def test_two_jobs_get_their_shares(shares: tuple[float, float]) -> None:
    rng = random.Random(3)
    replay = Replay(capacity=400, budget=20)
    jobs = ["a", "b"]
    for job, share in zip(jobs, shares, strict=True):
        objects, uses = names(600, job), []
        for epoch in range(3):
            order = list(range(600))
            rng.shuffle(order)
            uses += [(number, 600 * epoch + at, 600 * epoch + at) for at, number in enumerate(order)]
        replay.declare(job, Plan.of(objects, [1] * 600, uses), job=job, share=share)
    plans = [replay._plans[job] for job in jobs]
    for at in range(1800):
        for job, plan in zip(jobs, plans, strict=True):
            replay.progress(job, at)
            name = plan.names[plan.item[at]]
            replay.access(name, 1)
            if at == 1190:  # the second epoch, when all have more to keep than fits
                part = {j: sum(n.startswith(j) for n in replay.held) / 400 for j in jobs}
                for j, share in zip(jobs, shares, strict=True):
                    assert part[j] == pytest.approx(share / sum(shares), rel=0.1)


def test_a_job_alone_borrows_all_and_gives_it_back() -> None:
    replay = Replay(capacity=100, budget=10)
    replay.declare("a", in_order(names(300, "a"), epochs=2, each=1), job="a")
    replay.run("a", stop=300)
    assert sum(name.startswith("a") for name in replay.held) == 100
    replay.declare("b", in_order(names(300, "b"), epochs=2, each=1), job="b")
    replay.run("b", stop=300)
    assert sum(name.startswith("b") for name in replay.held) == pytest.approx(50, rel=0.1)


def test_a_plan_of_many_objects_is_followed_in_full() -> None:
    """A hundred thousand of them; a quarter is held."""
    count = 100_000
    scheduler = Scheduler(budget=100)
    objects = names(count)
    held(scheduler, objects[: count // 4])
    scheduler.declare("a", in_order(objects, epochs=2), job="a")
    asked = 0
    for position in range(0, 20_000, 10):
        scheduler.progress("a", position)
        asked += len(wanted(scheduler))
    assert asked == 2000 + 100
    gone = []
    for _ in range(100):
        gone.append(next(scheduler.victims(Incoming(objects[-1], 1, ahead=False))))
        scheduler.removed(gone[-1])
    assert gone == objects[1998:1898:-1], "of those that were used: they are needed last, in the next epoch"


def test_over_its_share_a_job_yields_what_is_in_use_last() -> None:
    """A source of a mixture is all in use for as long as it is read."""
    scheduler = Scheduler(budget=20)
    hog, objects = names(8, "a"), names(2, "b")
    scheduler.declare("a", Plan.of(hog, [10] * 8, [(n, 0 if n < 5 else n, 1000) for n in range(8)]), job="a")
    scheduler.declare("b", in_order(objects, size=10), job="b")
    held(scheduler, hog)
    for ahead in (False, True):
        order = list(scheduler.victims(Incoming("b0", 10, ahead)))
        assert order[:3] == ["a7", "a6", "a5"], "what is needed later goes first"
        assert order[3:] == ["a4", "a3", "a2", "a1"], "until both have the same"
    assert not set(scheduler.victims(Incoming("new", 10, ahead=False))) & set(names(5, "a")), "nobody's, so no share"
    scheduler.declare("b", in_order(objects, size=10), job="b", share=9.0)
    assert list(scheduler.victims(Incoming("b0", 10, ahead=False)))[3:] == ["a4", "a3", "a2", "a1", "a0"]
    held(scheduler, ["b0"])
    assert "b0" not in list(scheduler.victims(Incoming("b1", 10, ahead=False))), "its own in use stays"


def test_what_a_resting_reader_shares_with_one_that_reads_goes_in_that_ones_order() -> None:
    scheduler = Scheduler(budget=1)
    objects = names(6)
    scheduler.declare("rests", in_order(objects), job="job")
    scheduler.declare("reads", in_order([*names(3, "r"), *objects[3::-1]]), job="job")
    held(scheduler, [*objects, *names(3, "r")])
    scheduler.pause("rests")
    order = ["5", "4", "0", "1", "2", "3", "r2", "r1", "r0"]
    assert list(scheduler.victims()) == order, "4 and 5 are needed by no other"
    scheduler.withdraw("rests")
    assert [name for name in scheduler.victims() if name not in ("4", "5")] == order[2:]


def test_to_rest_and_to_go_on_ranks_nothing_anew() -> None:
    scheduler = Scheduler(budget=1)
    objects = names(2000)
    scheduler.declare("a", in_order(objects), job="job")
    held(scheduler, objects)
    places = dict(scheduler._places)
    scheduler.pause("a")
    assert all(scheduler._places[name] is place for name, place in places.items())
    assert next(scheduler.victims(Incoming("new", 1, ahead=False))) == "1999"
    scheduler.pause("a", paused=False)
    assert all(scheduler._places[name] is place for name, place in places.items())


def test_between_the_steps_all_decisions_are_there() -> None:
    scheduler = Scheduler(budget=1)
    objects = names(2000)
    held(scheduler, objects)
    plan = in_order(objects)
    course = Course(plan, 0)
    steps = 0
    for _ in scheduler.follow("a", course, course.first_to_come(), job="job"):
        steps += 1
        gone = f"{1000 + steps}"
        scheduler.removed(gone)
        assert sorted([*scheduler.victims(), gone]) == sorted({*objects} - {f"{1001 + n}" for n in range(steps - 1)})
        scheduler.progress("a", steps)
    assert steps > 3
    left = {*objects} - {f"{1001 + n}" for n in range(steps)}
    assert list(scheduler.victims())[:3] == ["1999", "1998", "1997"]
    before = len(left)
    for _ in scheduler.forget("a"):
        name = next(scheduler.victims(Incoming("new", 1, ahead=True)), None) or next(scheduler.victims())
        scheduler.removed(name)
        left.discard(name)
        assert set(scheduler.victims()) == left and len(list(scheduler.victims())) == len(left)
    assert len(left) < before and scheduler.held_bytes() == {} and not scheduler.planned


@settings(max_examples=10)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 1500), st.sampled_from([1, 1000])), max_size=50), st.data())
def test_ranks_keep_all_in_order(changes: list[tuple[bool, int, int]], data: st.DataObject) -> None:
    """Beyond the size of a block."""
    ranks, held = Ranks(), dict[str, tuple[int, int]]()
    rng = random.Random(data.draw(st.integers(0, 1000)))

    def put(first: int, size: int) -> None:
        name = f"{first} {size}"
        if name not in held:
            held[name] = size, first
            ranks.add(name, size, first)

    for first in rng.sample(range(5000), 1500):
        put(first, 1)
    before = [[entry.name for entry in stream] for stream in ranks.streams(0, 1.0)]
    streams = ranks.streams(0, 1.0)
    for add, first, size in changes:
        if add:
            put(first, size)
        elif held:
            name = rng.choice(list(held))
            ranks.remove(name, *held.pop(name))
    assert [[entry.name for entry in stream] for stream in streams] == before, "a snapshot"
    for stream in ranks.streams(0, 1.0):
        distances = [entry.distance for entry in stream]
        assert distances == sorted(distances, reverse=True)
    assert sorted(ranks.names()) == sorted(held)
    assert ranks.bytes == sum(size for size, _ in held.values())
    for name in list(held):
        ranks.remove(name, *held.pop(name))
    assert ranks.names() == [] and ranks.bytes == 0


# --- without a plan -------------------------------------------------------------------------------------------------


class Fifo:
    """A cache of so many entries of size 1 under S3-FIFO."""

    def __init__(self, most: int) -> None:
        self.policy = S3Fifo()
        self.most = most
        self.held: set[str] = set()
        self.misses = 0

    def access(self, name: str) -> None:
        if name in self.held:
            self.policy.used(name)
            return
        self.misses += 1
        if len(self.held) == self.most:
            with closing(self.policy.order()) as order:
                gone = next(order)
            self.held.discard(gone)
            self.policy.removed(gone)
        self.held.add(name)
        self.policy.added(name, 1)


def test_a_scan_leaves_what_is_used_often() -> None:
    cache = Fifo(100)
    often = names(50, "hot")
    for _ in range(4):
        for name in often:
            cache.access(name)
    for name in names(1000, "scan"):
        cache.access(name)
    assert set(often) <= cache.held


def test_what_comes_back_soon_after_it_went_is_kept() -> None:
    cache = Fifo(20)
    for name in names(20, "old"):
        for _ in range(4):
            cache.access(name)
    cache.access("once")
    for name in names(3, "scan"):
        cache.access(name)
    assert "once" not in cache.held
    cache.access("once")
    for name in names(30, "more"):
        cache.access(name)
    assert "once" in cache.held


def test_on_a_skewed_load_it_misses_less_than_lru() -> None:
    rng = random.Random(5)
    load = [str(int(rng.paretovariate(0.9))) for _ in range(20_000)]
    cache, recent, misses = Fifo(100), OrderedDict[str, None](), 0
    for name in load:
        cache.access(name)
        misses += name not in recent
        recent[name] = None
        recent.move_to_end(name)
        if len(recent) > 100:
            recent.popitem(last=False)
    assert cache.misses < misses


def test_entries_that_stay_are_named_again_and_nothing_is_lost() -> None:
    rng = random.Random(1)
    policy, inside = S3Fifo(), set(names(5, "first"))
    policy.begin(dict.fromkeys(names(5, "first"), 1))
    for step in range(3000):
        what = rng.random()
        if what < 0.4:
            policy.added(f"n{step}", rng.randint(1, 9))
            inside.add(f"n{step}")
        elif what < 0.7 and inside:
            policy.used(rng.choice(sorted(inside)))
        else:
            with closing(policy.order()) as order:
                named = [name for name, _ in zip(order, range(rng.randint(0, 4)), strict=False)]
            assert len(set(named)) == len(named) and set(named) <= inside
            for name in named:
                if rng.random() < 0.5:
                    policy.removed(name)
                    inside.discard(name)
    assert sorted(policy.order()) == sorted(inside)
    assert sorted(policy.order()) == sorted(inside)
