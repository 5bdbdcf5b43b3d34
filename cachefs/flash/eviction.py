"""Which entries to give up for room: a pure decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """An entry that may be evicted: no lease, nobody holds its file. ``disk_bytes`` come free with it."""

    name: str
    disk_bytes: int
    last_use: float


def choose_victims(
    candidates: Iterable[Candidate],
    need: int,
    *,
    next_use: Callable[[Candidate], float] | None = None,
    partly: bool = False,
) -> list[Candidate]:
    """The entries to evict so that at least ``need`` bytes come free, first to go first.

    ``candidates`` come least recently used first and are looked at only as far as needed. With ``next_use`` (the time
    at which a declared plan wants the entry next, ``inf`` for never) the one needed last goes first instead, and the
    least recently used among equals. All or nothing: if all candidates together do not free ``need`` bytes the list is
    empty, so that nothing is given up in vain; with ``partly`` it holds them all instead.
    """
    if need <= 0:
        return []
    if next_use is not None:
        candidates = sorted(candidates, key=next_use, reverse=True)
    victims: list[Candidate] = []
    freed = 0
    for candidate in candidates:
        victims.append(candidate)
        freed += candidate.disk_bytes
        if freed >= need:
            return victims
    return victims if partly else []
