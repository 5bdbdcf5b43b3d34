"""Uploads in parts: noticing that one makes no progress, and ending the source of parts in an orderly way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..clock import Clock
from ..errors import Stalled
from .abc import ObjectMeta
from .tasks import cancel_all

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Parts:
    """An iterator of parts that passes on another one's, as flat views, and remembers what happened.

    ``size`` is the number of bytes so far, ``error`` what the source raised. After :meth:`stop` the next part, or the
    one that is being waited for, is a ``CancelledError``: to the uploader a failed source, so it aborts the upload.
    """

    def __init__(self, source: AsyncIterator[Buffer], on_part: Callable[[], None] = lambda: None) -> None:
        self.size = 0
        self.error: BaseException | None = None
        self._source = source
        self._on_part = on_part
        self._stopped = False
        self._waiting: asyncio.Future[Buffer] | None = None

    def stop(self) -> None:
        self._stopped = True
        if self._waiting is not None:
            self._waiting.cancel()

    def __aiter__(self) -> Parts:
        return self

    async def __anext__(self) -> memoryview:
        try:
            if self._stopped:
                raise asyncio.CancelledError
            view = await self._next()
        except StopAsyncIteration:
            raise
        except BaseException as e:
            self.error = e
            raise
        self.size += view.nbytes
        self._on_part()
        return view

    async def _next(self) -> memoryview:
        while True:
            self._waiting = asyncio.ensure_future(_anext(self._source))
            try:
                part = await self._waiting
            except _End:
                raise StopAsyncIteration from None
            finally:
                waiting, self._waiting = self._waiting, None
                await cancel_all([waiting])
            view = memoryview(part)
            if view.nbytes:
                return view.cast("B")


class _End(Exception):
    """Stands for StopAsyncIteration, which a task cannot raise."""


async def _anext(source: AsyncIterator[Buffer]) -> Buffer:
    try:
        return await anext(source)
    except StopAsyncIteration:
        raise _End from None


async def watched_upload(
    upload: Callable[[Parts], Awaitable[ObjectMeta]],
    parts: AsyncIterator[Buffer],
    *,
    clock: Clock,
    idle: float,
    url: str,
) -> ObjectMeta:
    """The result of ``upload`` of these parts; :class:`Stalled` when for ``idle`` seconds it takes none nor ends."""
    progress = clock.monotonic()

    def on_part() -> None:
        nonlocal progress
        progress = clock.monotonic()

    task = asyncio.ensure_future(upload(Parts(parts, on_part)))
    try:
        while not task.done():
            left = progress + idle - clock.monotonic()
            if left <= 0:
                raise Stalled(f"the upload makes no progress in {idle:.0f} s", url=url)
            timer = asyncio.ensure_future(clock.asleep(left))
            try:
                await asyncio.wait({task, timer}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_all([timer])
        return task.result()
    finally:
        await cancel_all([task])


S = TypeVar("S")
R = TypeVar("R")

_LEAST_PART = 5 << 20
_ABORT_SECONDS = 10.0


async def upload_parts(
    parts: AsyncIterator[Buffer],
    send: Callable[[int, Sequence[memoryview]], Awaitable[S]],
    complete: Callable[[Sequence[S]], Awaitable[R]],
    abort: Callable[[], Awaitable[None]],
    *,
    concurrency: int,
) -> tuple[int, R]:
    """Send parts, numbered from 1, ``concurrency`` at a time, and complete; the size in bytes and the reply.

    Buffers are gathered until they make a part that S3 allows. Any error, and being cancelled, aborts the upload
    first; an abort that fails in turn is reported as a note on the error.
    """
    slots = asyncio.Semaphore(concurrency)
    tasks: list[asyncio.Task[S]] = []
    source = Parts(parts)

    async def one(number: int, pieces: Sequence[memoryview]) -> S:
        try:
            return await send(number, pieces)
        finally:
            slots.release()

    try:
        async for pieces in _gathered(source):
            await slots.acquire()
            failed = next((task for task in tasks if task.done() and not task.cancelled() and task.exception()), None)
            if failed is not None:
                failed.result()
            tasks.append(asyncio.create_task(one(len(tasks) + 1, pieces)))
        return source.size, await complete(await asyncio.gather(*tasks))
    except BaseException as e:
        await cancel_all(tasks)
        await _abort(abort, e)
        raise


async def _gathered(parts: AsyncIterator[memoryview]) -> AsyncIterator[list[memoryview]]:
    pieces: list[memoryview] = []
    size = 0
    first = True
    async for part in parts:
        pieces.append(part)
        size += part.nbytes
        if size >= _LEAST_PART:
            yield pieces
            pieces, size, first = [], 0, False
    if pieces or first:
        yield pieces


async def _abort(abort: Callable[[], Awaitable[None]], error: BaseException) -> None:
    task = asyncio.ensure_future(abort())
    done, _ = await asyncio.wait({task}, timeout=_ABORT_SECONDS)
    await cancel_all([task])
    if not done or (not task.cancelled() and task.exception() is not None):
        error.add_note(f"the upload could not be aborted: {task.exception() if done else 'no answer'}")
