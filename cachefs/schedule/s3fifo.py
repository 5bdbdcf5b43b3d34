"""S3-FIFO: eviction where nobody said what will be read (Yang et al., "FIFO queues are all you need", SOSP 2023).

New entries wait in a small queue, a tenth of the cache. What is used twice more before its turn comes moves to the main
queue, the rest goes, and is remembered for a while: if it comes back it goes to the main queue at once. So a scan
passes through the small queue and leaves the main one alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Mapping

_SMALL = 0.1
_MOST_USES = 3
_LEAST_USES = 2
"""Uses that move an entry from the small queue to the main one."""


class S3Fifo:
    """The two queues and the ghosts. Told of every entry; :meth:`order` names those to evict, best first."""

    def __init__(self) -> None:
        self._small: dict[str, int] = {}
        self._main: dict[str, int] = {}
        self._ghosts: OrderedDict[str, None] = OrderedDict()
        self._uses: dict[str, int] = {}
        self._small_bytes = 0
        self._main_bytes = 0

    def begin(self, sizes: Mapping[str, int]) -> None:
        """What is there already, least recently used first: it has proved itself. All that was said before is void."""
        self._small.clear()
        self._uses.clear()
        self._main = dict(sizes)
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

        Those that were used move on between the queues while it is looked at, as they do in the algorithm; an entry
        that is named and not removed (a reader holds it) stays where it is. Nothing else may change until it is closed.
        """
        small, main = iter(self._small.items()), iter(self._main.items())
        moved: dict[str, int] = {}  # to the end of the main queue, where they come up again
        again: deque[tuple[str, int]] = deque()
        small_bytes, main_bytes = self._small_bytes, self._main_bytes  # without what was named
        first_small, first_main = next(small, None), next(main, None)
        try:
            while first_small or first_main:
                if first_main is None or (first_small and small_bytes > _SMALL * (small_bytes + main_bytes)):
                    assert first_small is not None, "one of them is there"
                    (name, size), first_small = first_small, next(small, None)
                    small_bytes -= size
                    stays = self._uses.get(name, 0) >= _LEAST_USES
                    if stays:
                        del self._uses[name]
                else:
                    (name, size), first_main = first_main, next(main, None)
                    main_bytes -= size
                    stays = self._uses.get(name, 0) > 0
                    if stays:
                        self._uses[name] -= 1
                if stays:
                    moved.pop(name, None)
                    moved[name] = size
                    again.append((name, size))
                    main_bytes += size
                if first_main is None and again:
                    first_main = again.popleft()
                if not stays:
                    yield name
        finally:
            for name, size in moved.items():
                self._to_main(name, size)

    def _to_main(self, name: str, size: int) -> None:
        """To the end of the main queue, from wherever it is."""
        if name in self._small:
            del self._small[name]
            self._small_bytes -= size
            self._main_bytes += size
        else:
            del self._main[name]
        self._main[name] = size
