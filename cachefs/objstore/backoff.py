"""When to try again, and how long to wait. Pure: time, chance and the error come from outside."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import Settings
from ..errors import Corrupt, StoreError, Throttled, Unavailable

_FIRST_TRIES = 3


@dataclass(frozen=True)
class RetryPolicy:
    """Times in seconds, sizes in bytes.

    ``deadline``: a request ends by then, with all its tries, in a result or an error. ``stall``: a try that gets no
    byte for this long has failed. ``first_contact``: a store that has never answered is given up on after this time
    and three tries, since a wrong endpoint is more likely then than an outage. ``base`` and ``cap`` bound the pause
    before a try. A wrong reply (``Corrupt``) is asked for ``corrupt_tries`` times. ``upload_rate`` is the slowest
    upload that is waited for. ``parallel``: most requests to the bucket at a time. ``hedge_share``: most second
    requests for late reads, as a part of all reads; 0 for none.
    """

    deadline: float = 300.0
    stall: float = 20.0
    first_contact: float = 10.0
    base: float = 0.1
    cap: float = 10.0
    corrupt_tries: int = 4
    upload_rate: float = 64 * 1024
    parallel: int = 16
    hedge_share: float = 0.05

    @classmethod
    def from_settings(cls, settings: Settings) -> RetryPolicy:
        return cls(
            deadline=settings.request_deadline,
            stall=settings.stall_timeout,
            parallel=settings.origin_parallel,
            hedge_share=settings.hedge_share,
        )


def backoff(tries: int, draw: float, policy: RetryPolicy) -> float:
    """Seconds to wait after the ``tries``-th failure in a row (from 1); ``draw`` is uniform in ``[0, 1)``.

    Exponential with full jitter, so that clients that failed together do not come back together; never less than a
    tenth of the bound. (https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)
    """
    bound = min(policy.cap, policy.base * 2.0 ** min(tries - 1, 32))
    return bound * (0.1 + 0.9 * draw)


@dataclass(frozen=True)
class Failure:
    """A failed try and its circumstances. ``tries`` counts it; ``elapsed`` is since the request began."""

    error: StoreError
    tries: int
    elapsed: float
    store_has_answered: bool
    repeatable: bool
    """Whether doing it twice is the same as once. Otherwise only a store's plain "not now" is tried again."""
    wrong: int = 1
    """How many of the tries got a wrong reply."""


def next_pause(failure: Failure, draw: float, policy: RetryPolicy) -> float | None:
    """Seconds until the next try, or ``None`` to give up with the error at hand."""
    if not _worth_retrying(failure, policy):
        return None
    pause = backoff(failure.tries, draw, policy)
    unknown = not failure.store_has_answered and not isinstance(failure.error, Throttled)
    hopeless = unknown and failure.tries >= _FIRST_TRIES and failure.elapsed + pause >= policy.first_contact
    return pause if not hopeless and failure.elapsed + pause < policy.deadline else None


def _worth_retrying(failure: Failure, policy: RetryPolicy) -> bool:
    if isinstance(failure.error, Throttled):
        return True
    if isinstance(failure.error, Corrupt):
        return failure.repeatable and failure.wrong < policy.corrupt_tries
    return failure.repeatable and isinstance(failure.error, Unavailable)


def attempt_limit(remaining: float, upload_bytes: int | None, policy: RetryPolicy) -> float:
    """Seconds that one try may take. ``upload_bytes``: size of the body it sends, ``None`` for a read.

    A read is cut by the backend when it goes quiet, however long it takes in all. A write gives no sign of progress,
    so it gets the stall time plus what its body takes at the slowest rate that is put up with.
    """
    if upload_bytes is None:
        return remaining
    return min(remaining, policy.stall + upload_bytes / policy.upload_rate)
