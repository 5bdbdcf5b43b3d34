"""Idle entries: whoever needs their space waits until it is free to go, whoever gives it up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from cachefs.daemon.disk import Disk
from cachefs.daemon.holdings import Holdings
from cachefs.errors import CacheFull
from cachefs.flash import EntryKey
from cachefs.testing.clock import ManualClock


class SlowDisk:
    """Of one entry's size. What is given up is so once the test says."""

    def __init__(self) -> None:
        self.taken = 0
        self.retiring: list[tuple[asyncio.Future[None], tuple[Callable[[], None], ...]]] = []

    async def obtain(self, key: EntryKey, size: int, *, ahead: bool) -> Any:
        if self.taken:
            raise CacheFull("no room")
        self.taken += 1
        return SimpleNamespace(entry=SimpleNamespace(superseded=False))

    def retire(self, key: EntryKey, held: object) -> None:
        self.taken -= 1

    def later(self, *calls: Callable[[], None]) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self.retiring.append((future, calls))
        return future

    def retire_now(self) -> None:
        for future, calls in self.retiring:
            for call in calls:
                call()
            future.set_result(None)
        self.retiring.clear()


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_miss_waits_for_what_another_one_is_giving_up() -> None:
    async def go() -> None:
        disk = SlowDisk()
        holdings = Holdings(cast(Disk, disk), ManualClock())
        first = await holdings.obtain(EntryKey("", "s3://b/one", "v"), 1)
        holdings.give_back(first)
        dropping = asyncio.create_task(holdings.drop_idle())
        await turns()
        missing = asyncio.create_task(holdings.obtain(EntryKey("", "s3://b/two", "v"), 1))
        await turns()
        assert not dropping.done() and not missing.done()
        disk.retire_now()
        assert await dropping
        assert (await missing).users == 1
        assert not await holdings.drop_idle(), "there is nothing left"

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_caller_that_is_cancelled_leaves_the_giving_up_to_go_on() -> None:
    async def go() -> None:
        disk = SlowDisk()
        holdings = Holdings(cast(Disk, disk), ManualClock())
        holdings.give_back(await holdings.obtain(EntryKey("", "s3://b/one", "v"), 1))
        dropping = asyncio.create_task(holdings.drop_idle())
        await turns()
        dropping.cancel()
        await turns()
        assert dropping.cancelled() and not disk.retiring[0][0].cancelled()
        disk.retire_now()

    asyncio.run(asyncio.wait_for(go(), 60))
