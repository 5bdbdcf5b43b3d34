"""What users of a client found out about objects and will ask for again soon."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from .forklock import ForkLock

Value = TypeVar("Value")
_MOST = 4


class Recall:
    """A few values, the least recently used dropped. For any number of threads; goes with the client that owns it."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._guard = ForkLock()
        self._held: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made if it is not there. A key must name one version of what the value tells of.

        Nothing is locked while it is made: two threads may both make it.
        """
        with self._guard.of_this_process():
            if key in self._held:
                self._held.move_to_end(key)
                value: Value = self._held[key]
                return value
        value = make()
        with self._guard.of_this_process():
            self._held[key] = value
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        return value
