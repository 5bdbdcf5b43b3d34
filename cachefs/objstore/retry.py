"""The one policy for failed requests, over any backend: limits, retries, deadlines, counts.

Decisions are in :mod:`.backoff` and :mod:`.limiter`; here they meet the clock and the store.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ..clock import Clock
from ..errors import Corrupt, Denied, NearflashError, PreconditionFailed, Stalled, StoreError, Throttled, Unavailable
from ..metrics import Metrics
from .abc import Listing, ObjectMeta, ObjectStore
from .backoff import Failure, RetryPolicy, attempt_limit, next_pause
from .buffers import as_pieces
from .hedging import Hedger
from .limiter import Limiter
from .multipart import watched_upload
from .renewal import Renewal
from .replies import CredentialsRefused
from .tasks import all_of, within

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_LEAST_STEP = 1 << 20
_DELETE_BATCH = 1000


@dataclass(frozen=True)
class _Request:
    """What a request is, as far as the policy cares. ``counter`` is the metric of its kind.

    ``read_bytes``: how many bytes a read of a range asks for; such a one may be made twice when it is late.
    """

    doing: str
    key: str
    counter: str | None
    upload_bytes: int | None = None
    repeatable: bool = True
    read_bytes: int | None = None


def _ignore(failure: Failure) -> None:
    pass


class RetryingStore(ObjectStore):
    """A store whose requests either succeed or fail for good, by the policy's deadline.

    Owns ``inner`` and closes it. ``limiter`` may be shared by all stores of one bucket on the same event loop.
    ``draw`` gives chance, uniform in ``[0, 1)``.

    A wrong reply is asked for again. A range whose connection keeps breaking is fetched in smaller and smaller
    pieces, and every piece that arrives is kept. A conditional write whose outcome is unknown is never repeated:
    :class:`Unavailable` then says to read back.
    """

    def __init__(
        self,
        inner: ObjectStore,
        policy: RetryPolicy,
        *,
        limiter: Limiter,
        metrics: Metrics,
        clock: Clock,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.url = inner.url
        self._inner = inner
        self._policy = policy
        self._limiter = limiter
        self._metrics = metrics
        self._clock = clock
        self._draw = draw
        self._answered = False
        self._renewal = Renewal(inner.renew)
        self._hedger = Hedger(policy.hedge_share, limiter=limiter, metrics=metrics, clock=clock)

    async def head(self, key: str) -> ObjectMeta:
        return await self._run(_Request("head", key, "origin_heads"), lambda: self._inner.head(key))

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        if not 0 <= start <= end:
            raise ValueError(f"not a range: {start}-{end}")
        began = self._clock.monotonic()
        pieces: list[Buffer] = []
        at, step = start, end - start

        def shrink(failure: Failure) -> None:
            nonlocal step
            if failure.tries > 1 and not isinstance(failure.error, Throttled):
                step = max(min(step, _LEAST_STEP), (step + 1) // 2)

        def next_piece() -> Awaitable[Buffer]:
            return self._inner.get_range(key, at, min(at + step, end), version=version)

        while at < end:
            request = _Request("get", key, "origin_gets", read_bytes=min(at + step, end) - at)
            piece = await self._run(request, next_piece, began=began, on_failure=shrink)
            size = memoryview(piece).nbytes
            self._metrics.add("origin_get_bytes", size)
            pieces.append(piece)
            at += size
        return pieces[0] if len(pieces) == 1 else _joined(pieces, end - start)

    async def get_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], *, version: ObjectMeta | None = None
    ) -> list[Buffer]:
        """Several ranges of one version, as many at a time as the bucket may get requests."""
        work = [partial(self.get_range, key, start, end, version=version) for start, end in ranges]
        return await all_of(work, at_once=self._policy.parallel)

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        meta, data = await self._run(_Request("get", key, "origin_gets"), lambda: self._inner.get(key))
        self._metrics.add("origin_get_bytes", memoryview(data).nbytes)
        return meta, data

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        return await self._run(
            _Request("list", prefix, "origin_lists"),
            lambda: self._inner.list_page(prefix, delimiter=delimiter, token=token),
        )

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        conditional = if_none_match or if_match is not None
        size = sum(piece.nbytes for piece in as_pieces(data))
        refused: list[Failure] = []
        try:
            return await self._run(
                _Request("put", key, "origin_puts", upload_bytes=size, repeatable=not conditional),
                lambda: self._inner.put(key, data, if_none_match=if_none_match, if_match=if_match),
                on_failure=refused.append,
            )
        except PreconditionFailed as e:
            if len(refused) > 1:
                # Whoever said "not now" to an earlier try may have passed it on all the same: what the condition
                # met may be our own write.
                raise Unavailable(
                    "the write was refused for load and tried again, and may have happened", url=e.url, hint="read back"
                ) from e
            raise

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        self._count(_Request("put", key, "origin_puts"))
        return await watched_upload(
            lambda watched: self._inner.put_multipart(key, watched, concurrency=concurrency),
            parts,
            clock=self._clock,
            idle=self._policy.deadline,
            url=f"{self.url}/{key}",
        )

    async def delete(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            await self._run(_Request("delete", batch[0], None), partial(self._inner.delete, batch))

    async def renew(self) -> bool:
        return await self._inner.renew()

    async def close(self) -> None:
        await self._inner.close()

    async def _run(
        self,
        request: _Request,
        make: Callable[[], Awaitable[T]],
        *,
        began: float | None = None,
        on_failure: Callable[[Failure], None] = _ignore,
    ) -> T:
        """The result of ``make()``, tried as often as the policy says, counted from ``began``."""
        began = self._clock.monotonic() if began is None else began
        tries, wrong, renewed = 0, 0, False
        while True:
            tries += 1
            attempts = self._renewal.attempts
            try:
                return await self._try(request, make, began)
            except CredentialsRefused as error:
                if renewed or not await self._renewed(request, began, attempts):
                    raise Denied(error.what, url=error.url, hint=error.hint) from error.__cause__
                renewed = True
                continue
            except StoreError as error:
                elapsed = self._clock.monotonic() - began
                wrong += isinstance(error, Corrupt)
                failure = Failure(error, tries, elapsed, self._answered, request.repeatable, wrong)
                on_failure(failure)
                pause = next_pause(failure, self._draw(), self._policy)
                if pause is None:
                    raise _final(failure) from error.__cause__
            self._metrics.add("origin_retries")
            await self._clock.asleep(pause)

    async def _try(self, request: _Request, make: Callable[[], Awaitable[T]], began: float) -> T:
        remaining = limit = self._remaining(began)

        async def attempt() -> T:
            nonlocal limit
            async with self._limiter.slot():
                limit = attempt_limit(remaining, request.upload_bytes, self._policy)
                once = partial(self._once, request, make)
                if request.read_bytes is not None:
                    return await self._hedger.run(request.read_bytes, once)
                if limit < remaining:
                    return await within(self._clock, limit, once())
                return await once()

        try:
            return await within(self._clock, remaining, attempt())
        except TimeoutError:
            raise Stalled(f"no answer in {limit:.0f} s", url=f"{self.url}/{request.key}") from None

    async def _renewed(self, request: _Request, began: float, attempts: int) -> bool:
        """Whether there are other credentials now than when a try began; by the request's deadline."""
        try:
            return await within(self._clock, self._remaining(began), self._renewal.since(attempts))
        except TimeoutError:
            url = f"{self.url}/{request.key}"
            what = "the credentials were refused, and looking for others took too long"
            raise Denied(
                what, url=url, hint="what gives them, a process or a metadata service, does not answer"
            ) from None

    def _remaining(self, began: float) -> float:
        return max(0.0, began + self._policy.deadline - self._clock.monotonic())

    async def _once(self, request: _Request, make: Callable[[], Awaitable[T]]) -> T:
        started = self._clock.monotonic()
        self._count(request)
        try:
            result = await make()
        except Throttled:
            self._answered = True
            self._metrics.add("origin_throttled")
            self._limiter.window.throttled(started, self._clock.monotonic())
            raise
        except StoreError as e:
            self._answered = self._answered or not isinstance(e, Unavailable)
            raise
        self._answered = True
        self._limiter.window.succeeded()
        return result

    def _count(self, request: _Request) -> None:
        self._metrics.add("origin_requests")
        if request.counter is not None:
            self._metrics.add(request.counter)


def _joined(pieces: Sequence[Buffer], size: int) -> bytearray:
    whole = bytearray(size)
    at = 0
    for piece in pieces:
        view = memoryview(piece)
        whole[at : at + view.nbytes] = view
        at += view.nbytes
    return whole


def _final(failure: Failure) -> NearflashError:
    """The error to raise when there is no further try; it says how many there were."""
    error = failure.error
    hint = error.hint
    if isinstance(error, Unavailable) and not failure.repeatable:
        hint = "the write may have happened: read back"
    elif isinstance(error, Unavailable) and not failure.store_has_answered:
        hint = "is the endpoint right, and does the server run?"
    what = error.what
    if failure.tries > 1:
        what += f"; gave up after {failure.tries} tries in {failure.elapsed:.0f} s"
    return type(error)(what, url=error.url, offset=error.offset, hint=hint)
