"""When a read is late enough to be asked for a second time. Pure: what was seen goes in, a delay comes out.

A second request to another server of the store cuts the tail at the price of a few requests more (Dean and Barroso,
"The Tail at Scale", Communications of the ACM 56(2), 2013: hedged requests after the 95th percentile).
"""

from __future__ import annotations

from collections import deque

_QUANTILE = 0.95
_KEPT = 400
_ENOUGH = 100
_RENEW_EVERY = 20
_LEAST_DELAY = 0.25
_FEW_TIMES_LONGEST = 4.0
_FEW_LEAST_DELAY = 1.0
_TIMES_MEDIAN = 2.0
_SAVED = 5.0


class LatencyBook:
    """How long the last reads of each size took; sizes within a factor of two are alike.

    Reads that all take the same time have no tail: a 95th percentile near the median is no sign of trouble, so the
    delay is at least twice the median, and never less than a quarter of a second. After a few reads only, it is four
    times the longest of them: enough to get past a connection that is as good as dead.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}
        self._delays: dict[int, float] = {}
        self._added: dict[int, int] = {}

    def add(self, size: int, seconds: float) -> None:
        """A read of ``size`` bytes took so long (or longer, if it was not waited for)."""
        kind = size.bit_length()
        seen = self._seen.setdefault(kind, deque(maxlen=_KEPT))
        seen.append(seconds)
        count = self._added[kind] = self._added.get(kind, 0) + 1
        if count % _RENEW_EVERY:
            return
        if len(seen) < _ENOUGH:
            self._delays[kind] = max(_FEW_TIMES_LONGEST * max(seen), _FEW_LEAST_DELAY)
        else:
            ordered = sorted(seen)
            late = ordered[int(_QUANTILE * len(ordered))]
            self._delays[kind] = max(late, _TIMES_MEDIAN * ordered[len(ordered) // 2], _LEAST_DELAY)

    def delay(self, size: int) -> float | None:
        """Seconds after which a read of this size is late; ``None`` while too few were seen to tell."""
        return self._delays.get(size.bit_length())


class Allowance:
    """Extra requests: at every moment at most ``share`` of the reads so far, and only a few in a row."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share}")
        self._share = share
        self._saved = 0.0

    @property
    def none(self) -> bool:
        """There will never be any."""
        return self._share == 0

    def earn(self) -> None:
        """One more read was made."""
        self._saved = min(_SAVED, self._saved + self._share)

    def take(self) -> bool:
        """Whether one may be made now; it counts as made."""
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
