"""One run of a piece of work for all who want it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Work under way, by key. Belongs to one event loop.

    The work goes on when a caller is cancelled, and is cancelled when the last one is. All callers get its result or
    its error; the next caller after that starts anew.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, tuple[asyncio.Task[T], list[None]]] = {}

    async def do(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of the ``work`` under way for ``key``, or of this one, started now."""
        found = self._running.get(key)
        if found is None:
            task = asyncio.ensure_future(work())
            found = self._running[key] = (task, [])
            task.add_done_callback(lambda done: self._forget(key, done))
        task, callers = found
        callers.append(None)
        try:
            return await asyncio.shield(task)
        finally:
            callers.pop()
            if not callers and not task.done():
                self._forget(key, task)
                task.cancel()

    def _forget(self, key: Hashable, task: asyncio.Task[T]) -> None:
        found = self._running.get(key)
        if found is not None and found[0] is task:
            del self._running[key]
