"""Which entries to give up for room: a pure decision."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..schedule import Incoming


@dataclass(frozen=True)
class Candidate:
    """An entry that may be evicted: no lease, nobody holds its file. ``disk_bytes`` come free with it."""

    name: str
    disk_bytes: int
    last_use: float


class Ranking(Protocol):
    """Says which entries go first. A store tells it what it holds, by entry name, with its lock held: no call may go
    back into the store, or wait."""

    def begin(self, sizes: Mapping[str, int], quota: int) -> None:
        """A store was opened: what it holds, least recently used first, and its quota (bytes)."""

    def added(self, name: str, size: int) -> None:
        """An entry was made."""

    def used(self, name: str) -> None:
        """A reader opened an entry."""

    def removed(self, name: str) -> None:
        """An entry is gone."""

    def order(self, incoming: Incoming | None) -> Generator[str, None, None] | None:
        """The entries that may go for what is to come in (``None``: for whatever), best first; names that are unknown
        by now are skipped. ``None`` for all of them, least recently used first. Closed by the caller."""


def choose_victims(candidates: Iterable[Candidate], need: int, *, partly: bool = False) -> list[Candidate]:
    """The entries to evict so that at least ``need`` bytes come free, first to go first.

    ``candidates`` come in the order in which they should go and are looked at only as far as needed. All or nothing: if
    all candidates together do not free ``need`` bytes the list is empty, so that nothing is given up in vain; with
    ``partly`` it holds them all instead.
    """
    if need <= 0:
        return []
    victims: list[Candidate] = []
    freed = 0
    for candidate in candidates:
        victims.append(candidate)
        freed += candidate.disk_bytes
        if freed >= need:
            return victims
    return victims if partly else []
