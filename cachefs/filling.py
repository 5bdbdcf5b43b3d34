"""Which bytes of a map have arrived, while the object under it is filled: what is behind :class:`~.shard.FillingView`.

A map belongs to one file. What the shard waits for may come into another one (the entry was evicted and made again, or
is read past the cache from now on); then the map stays as it is, and its reader is told to map anew. A daemon that was
restarted goes on filling the same file, and so does the map.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from .errors import Superseded


class Source(Protocol):
    """A file that is being filled."""

    @property
    def fd(self) -> int: ...

    def has(self, start: int, end: int) -> bool:
        """Whether all of ``[start, end)`` is there."""
        ...

    def present_to(self, start: int) -> int:
        """Up to where every byte from ``start`` on is there."""
        ...


Wait = Callable[[int, int, Callable[[Source], None]], object]
"""``wait(start, end, accept)`` returns once some source has these bytes. It tells ``accept`` of each source from which
it expects them; what ``accept`` raises ends the wait."""


class Arrivals:
    """What is known to have arrived in one map. Thread-safe: what one thread forgets is only found out again."""

    def __init__(self, url: str, source: Source, wait: Wait) -> None:
        self._url = url
        self._source = source
        self._wait = wait
        self._there = 0

    def arrive(self, start: int, end: int) -> int:
        """Return once ``[start, end)`` is there: up to where everything is, from the first byte on.

        Raises :class:`Superseded` when these bytes will not come into this map, else as the shard's ``wait``.
        """
        if not self._source.has(start, end):
            self._wait(start, end, self._accept)
        self._there = self._source.present_to(self._there)
        return self._there

    def _accept(self, source: Source) -> None:
        if source is self._source:
            return
        # Ours is open, so its numbers belong to no other file.
        if not os.path.sameopenfile(source.fd, self._source.fd):
            hint = "map it anew: the shard itself goes on"
            raise Superseded(
                "the cache goes on with another file than the one that is mapped", url=self._url, hint=hint
            )
        self._source = source
