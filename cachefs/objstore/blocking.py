"""An object store for synchronous code: the same methods, over one event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ..clock import SYSTEM_CLOCK, Clock
from ..config import Origin, Settings
from ..errors import CacheError, DeadlineExceeded
from ..metrics import Metrics
from .abc import Listing, ObjectMeta, ObjectStore
from .open import open_store
from .url import ObjectUrl

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_STOP_SECONDS = 10.0


class _Runner:
    """One event loop in one thread, with the store that belongs to it."""

    def __init__(self, make: Callable[[], ObjectStore]) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="objstore", daemon=True)
        self._thread.start()
        self.store = make()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise CacheError("the store was closed during the call", url=self.store.url) from None
        except BaseException:
            future.cancel()  # an interrupted caller (Ctrl-C) leaves nothing running behind it
            raise

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._wind_up(), self._loop).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the store's thread did not end in {_STOP_SECONDS:.0f} s", url=self.store.url)
        self._loop.close()

    async def _wind_up(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        if others:
            await asyncio.wait(others)
        await self.store.close()
        await self._loop.shutdown_asyncgens()


class BlockingStore:
    """:class:`ObjectStore`'s methods, synchronous. May be called from several threads at once.

    The thread and the store behind it are made at the first call. A process that was forked from one that used this
    object gets its own at its first call. Ends of waits are those of the retry policy (``settings``). A context
    manager; :meth:`close` is idempotent, and a call after it raises :class:`CacheError`.
    """

    def __init__(
        self,
        url: ObjectUrl | str,
        origin: Origin,
        *,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._open = partial(open_store, url, origin, settings=settings, metrics=metrics, clock=clock)
        # Opening one makes no connection, but refuses what can never work: here, not at the first call.
        self.url = self._open().url
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._runner: _Runner | None = None
        self._closed = False

    def head(self, key: str) -> ObjectMeta:
        """See :meth:`ObjectStore.head`."""
        return self._run(lambda store: store.head(key))

    def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        """See :meth:`ObjectStore.get_range`."""
        return self._run(lambda store: store.get_range(key, start, end, version=version))

    def get_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], *, version: ObjectMeta | None = None
    ) -> list[Buffer]:
        """See :meth:`ObjectStore.get_ranges`."""
        return self._run(lambda store: store.get_ranges(key, ranges, version=version))

    def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        """See :meth:`ObjectStore.get`."""
        return self._run(lambda store: store.get(key))

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listing]:
        """See :meth:`ObjectStore.list`; a page is asked for when it is wanted."""
        token: str | None = None
        while True:
            page, token = self._run(partial(_list_page, prefix, delimiter, token))
            yield page
            if token is None:
                return

    def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        """See :meth:`ObjectStore.put`."""
        return self._run(lambda store: store.put(key, data, if_none_match=if_none_match, if_match=if_match))

    def put_multipart(self, key: str, parts: Iterable[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        """See :meth:`ObjectStore.put_multipart`; ``parts`` is iterated in another thread, one part at a time."""
        return self._run(lambda store: store.put_multipart(key, _in_thread(parts), concurrency=concurrency))

    def delete(self, keys: Sequence[str]) -> None:
        """See :meth:`ObjectStore.delete`."""
        self._run(lambda store: store.delete(keys))

    def close(self) -> None:
        """Cancel what still runs, release the connections and end the thread."""
        with self._own_lock():
            self._closed = True
            runner, self._runner = self._runner, None
        if runner is not None and runner.pid == os.getpid():
            runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, call: Callable[[ObjectStore], Coroutine[Any, Any, T]]) -> T:
        runner = self._started()
        return runner.run(call(runner.store))

    def _started(self) -> _Runner:
        with self._own_lock():
            if self._closed:
                raise CacheError("the store is closed", url=self.url)
            if self._runner is None or self._runner.pid != os.getpid():
                self._runner = _Runner(self._open)
            return self._runner

    def _own_lock(self) -> threading.Lock:
        """The lock; a new one in a forked process, where a thread that held it is gone."""
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
        return self._lock


def _list_page(
    prefix: str, delimiter: bool, token: str | None, store: ObjectStore
) -> Coroutine[Any, Any, tuple[Listing, str | None]]:
    return store.list_page(prefix, delimiter=delimiter, token=token)


async def _in_thread(parts: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    source = iter(parts)
    end = object()
    while (part := await asyncio.to_thread(next, source, end)) is not end:
        yield part  # type: ignore[misc]
