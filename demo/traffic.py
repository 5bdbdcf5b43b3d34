"""What left the origin, as the counting proxy in front of it saw it: the referee of all claims about GETs and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Get:
    """One finished GET of object bytes: key, bytes sent, first byte's offset, wall-clock second in which it came."""

    key: str
    start: int
    size: int
    time: float

    def overlaps(self, other: Get) -> bool:
        """Whether the two carried a byte in common."""
        return self.key == other.key and self.start < other.start + other.size and other.start < self.start + self.size


def by_key(gets: Iterable[Get]) -> dict[str, int]:
    """Bytes sent per key."""
    total: Counter[str] = Counter()
    for get in gets:
        total[get.key] += get.size
    return dict(total)


def of_keys(gets: Iterable[Get], keys: Collection[str]) -> list[Get]:
    """Those of some keys."""
    return [g for g in gets if g.key in keys]


def between(gets: Iterable[Get], start: float, end: float) -> list[Get]:
    """Those that came in ``[start, end)``."""
    return [g for g in gets if start <= g.time < end]


def refetched(gets: Iterable[Get], killed_at: float, grace: float) -> list[Get]:
    """GETs after a kill for bytes that had been fetched longer than ``grace`` seconds before it.

    Bytes fetched within the grace may not have reached the disk with their digests; asking for those again is right.
    """
    seen = list(gets)
    kept = [g for g in seen if g.time < killed_at - grace]
    return [g for g in seen if g.time >= killed_at and any(g.overlaps(k) for k in kept)]
