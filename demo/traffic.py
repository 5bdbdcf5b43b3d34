"""What the counting proxy in front of the origin saw: the referee of all claims about GETs, bytes and commits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cachefs.testing.faults import RequestRecord

DONE = frozenset({200, 206})
_COMMIT = re.compile(r"step-(\d{12,})-g\d{6,}/manifest\.json")
"""A checkpoint's commit record, as ``ckptstore.layout`` names it."""


@dataclass(frozen=True)
class Get:
    """One GET: key, offset of its first byte, object bytes sent (0 for an error), wall-clock seconds in which it came
    and in which all had been sent (0: never)."""

    key: str
    start: int
    size: int
    time: float
    done: float

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
    """GETs after a kill for bytes whose GET had ended longer than ``grace`` seconds before it.

    What came later may not have reached the disk with its digests; asking for that again is right.
    """
    seen = list(gets)
    kept = [g for g in seen if 0 < g.done < killed_at - grace]
    return [g for g in seen if g.time >= killed_at and any(g.overlaps(k) for k in kept)]


def gets_of(requests: Iterable[RequestRecord], bucket: str) -> list[Get]:
    """All GETs of objects in a bucket, whatever came of them (a listing has no key)."""
    return [
        Get(r.key, r.range[0] if r.range else 0, r.bytes_sent if r.status in DONE else 0, r.time, r.done)
        for r in requests
        if r.method == "GET" and r.bucket == bucket and r.key
    ]


def committed(requests: Iterable[RequestRecord], bucket: str, prefix: str) -> int:
    """The newest step under ``prefix`` whose commit record the origin has accepted; 0 for none."""
    found = [
        int(match[1])
        for r in requests
        if r.method == "PUT" and r.bucket == bucket and r.status in DONE and r.key.startswith(prefix)
        if (match := _COMMIT.fullmatch(r.key.removeprefix(prefix)))
    ]
    return max(found, default=0)
