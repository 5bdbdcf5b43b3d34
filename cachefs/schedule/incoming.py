"""What is to come into the cache, as far as it matters for what has to go."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Incoming:
    """An entry that is to be made: its name, the bytes it takes, and whether nobody waits for it yet (``ahead``)."""

    name: str
    size: int
    ahead: bool
