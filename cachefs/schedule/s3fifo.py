"""S3-FIFO: eviction where nobody said what will be read (Yang et al., "FIFO queues are all you need", SOSP 2023).

New entries wait in a small queue, a tenth of the cache. What is used twice more before its turn comes moves to the main
queue, the rest goes, and is remembered for a while: if it comes back it goes to the main queue at once. So a scan
passes through the small queue and leaves the main one alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping

_SMALL = 0.1
_MOST_USES = 3
_LEAST_USES = 2
"""Uses that move an entry from the small queue to the main one."""


class S3Fifo:
    """The two queues and the ghosts. Told of every entry; :meth:`order` names those to evict, best first."""

    def __init__(self) -> None:
        self._small: OrderedDict[str, int] = OrderedDict()
        self._main: OrderedDict[str, int] = OrderedDict()
        self._ghosts: OrderedDict[str, None] = OrderedDict()
        self._uses: dict[str, int] = {}
        self._small_bytes = 0
        self._main_bytes = 0

    def begin(self, sizes: Mapping[str, int]) -> None:
        """What is there already, least recently used first: it has proved itself. All that was said before is void."""
        self._small.clear()
        self._uses.clear()
        self._main = OrderedDict(sizes)
        self._small_bytes, self._main_bytes = 0, sum(sizes.values())

    def added(self, name: str, size: int) -> None:
        if name in self._ghosts:
            del self._ghosts[name]
            self._main[name] = size
            self._main_bytes += size
        else:
            self._small[name] = size
            self._small_bytes += size

    def used(self, name: str) -> None:
        uses = self._uses.get(name, 0)
        if uses < _MOST_USES and (name in self._small or name in self._main):
            self._uses[name] = uses + 1

    def removed(self, name: str) -> None:
        self._uses.pop(name, None)
        if name in self._main:
            self._main_bytes -= self._main.pop(name)
        elif name in self._small:
            self._small_bytes -= self._small.pop(name)
            self._ghosts[name] = None
            while len(self._ghosts) > max(len(self._main), 1):
                self._ghosts.popitem(last=False)

    def order(self) -> Generator[str, None, None]:
        """All entries, each once, in the order in which they should go.

        Those that are used move on between the queues while it is looked at, as they do in the algorithm; an entry
        that is named and not removed (a reader holds it) stays where it was. Nothing else may change meanwhile.
        """
        named: list[tuple[OrderedDict[str, int], str, int]] = []
        small_bytes, main_bytes = self._small_bytes, self._main_bytes  # without those named
        try:
            while self._small or self._main:
                if self._small and (small_bytes > _SMALL * (small_bytes + main_bytes) or not self._main):
                    queue = self._small
                else:
                    queue = self._main
                name, size = queue.popitem(last=False)
                uses = self._uses.get(name, 0)
                if queue is self._small and uses >= _LEAST_USES:
                    self._uses.pop(name)
                    self._main[name] = size
                    self._small_bytes -= size
                    self._main_bytes += size
                    small_bytes, main_bytes = small_bytes - size, main_bytes + size
                elif queue is self._main and uses:
                    self._uses[name] = uses - 1
                    self._main[name] = size
                else:
                    named.append((queue, name, size))
                    if queue is self._small:
                        small_bytes -= size
                    else:
                        main_bytes -= size
                    yield name
        finally:
            for queue, name, size in reversed(named):
                queue[name] = size
                queue.move_to_end(name, last=False)
