"""Waiting for coroutines without leaving one behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from ..clock import Clock

T = TypeVar("T")


async def within(clock: Clock, seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, or ``TimeoutError`` after ``seconds`` by ``clock``. Either way ``work`` has ended."""
    task = asyncio.ensure_future(work)
    timer = asyncio.ensure_future(clock.asleep(seconds))
    try:
        await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError
        return task.result()
    finally:
        await cancel_all([task, timer])


async def all_of(work: Iterable[Callable[[], Awaitable[T]]], *, at_once: int) -> list[T]:
    """The results of all, in order, ``at_once`` running at a time. The first error cancels the rest and is raised."""
    slots = asyncio.Semaphore(at_once)

    async def one(start: Callable[[], Awaitable[T]]) -> T:
        async with slots:
            return await start()

    tasks = [asyncio.ensure_future(one(start)) for start in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel those that still run and wait until they have ended; their errors are their owner's business."""
    tasks = list(tasks)
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report it as forgotten
