"""The pump: bytes in flight stay within the budget, jobs within their lane's limit, and nobody starves."""

from __future__ import annotations

import asyncio

from cachefs.daemon.chunkqueue import Tier
from cachefs.daemon.transfers import Lane, Transfers
from cachefs.metrics import Metrics


class Jobs:
    """An owner whose jobs run until told to end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: list[int] = []
        self.done: list[int] = []
        self.release = asyncio.Event()

    def chunk_bytes(self, chunk: int) -> int:
        return self.size

    async def run(self, chunk: int) -> None:
        self.running.append(chunk)
        await self.release.wait()
        self.running.remove(chunk)
        self.done.append(chunk)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def queue(transfers: Transfers, lane: Lane, jobs: Jobs, count: int) -> None:
    lane.queue.add(jobs, range(count), Tier.OPENED)
    transfers.pump()


def test_budget_bounds_what_is_in_flight() -> None:
    async def check() -> None:
        transfers = Transfers(100, Metrics())
        jobs = Jobs(30)
        queue(transfers, transfers.lane(16), jobs, 5)
        await settle()
        assert jobs.running == [0, 1, 2]
        assert transfers.in_flight == 90
        jobs.release.set()
        await settle()
        assert jobs.done == [0, 1, 2, 3, 4]
        assert transfers.in_flight == 0
        assert not transfers.busy

    asyncio.run(check())


def test_one_job_larger_than_the_budget_runs_alone() -> None:
    async def check() -> None:
        transfers = Transfers(100, Metrics())
        jobs = Jobs(500)
        queue(transfers, transfers.lane(16), jobs, 2)
        await settle()
        assert jobs.running == [0]
        jobs.release.set()
        await settle()
        assert jobs.done == [0, 1]

    asyncio.run(check())


def test_lane_limit_and_lanes_take_turns() -> None:
    async def check() -> None:
        transfers = Transfers(1000, Metrics())
        slow, other = Jobs(1), Jobs(1)
        lane = transfers.lane(2)
        queue(transfers, lane, slow, 10)
        queue(transfers, transfers.lane(2), other, 10)
        await settle()
        assert (slow.running, other.running) == ([0, 1], [0, 1])
        other.release.set()
        await settle()
        assert len(other.done) == 10, "a lane that does not move holds nobody up"
        await transfers.close()
        await transfers.close()

    asyncio.run(check())


def test_turn_holds_budget_until_its_block_ends_and_survives_cancellation() -> None:
    async def check() -> None:
        transfers = Transfers(10, Metrics())
        lane = transfers.lane(4)
        order: list[str] = []

        async def turn(name: str, leave: asyncio.Event) -> None:
            async with transfers.turn(lane, 10):
                order.append(name)
                await leave.wait()

        first, second = asyncio.Event(), asyncio.Event()
        a = asyncio.create_task(turn("a", first))
        b = asyncio.create_task(turn("b", second))
        c = asyncio.create_task(turn("c", second))
        await settle()
        assert order == ["a"]
        b.cancel()
        await settle()
        first.set()
        second.set()
        await asyncio.gather(a, c)
        await settle()
        assert order == ["a", "c"]
        assert transfers.in_flight == 0
        assert not transfers.busy

    asyncio.run(check())


def test_close_cancels_what_runs() -> None:
    async def check() -> None:
        transfers = Transfers(100, Metrics())
        jobs = Jobs(1)
        queue(transfers, transfers.lane(1), jobs, 3)
        await settle()
        await transfers.close()
        assert jobs.done == []
        assert transfers.in_flight == 0

    asyncio.run(check())
