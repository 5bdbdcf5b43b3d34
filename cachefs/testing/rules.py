"""Which request a scripted fault is for: an ordered list of rules that are used up as they match."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

F = TypeVar("F")


class Request(Protocol):
    """What rules look at."""

    @property
    def method(self) -> str: ...

    @property
    def key(self) -> str: ...


@dataclass
class _Rule(Generic[F]):
    fault: F
    matches: Callable[[Any], bool]
    after: int
    times: int | None


class FaultPlan(Generic[F]):
    """The first rule that matches a request and is not used up decides. Thread-safe."""

    def __init__(self) -> None:
        self._rules: list[_Rule[F]] = []
        self._lock = threading.Lock()

    def add(
        self,
        fault: F,
        *,
        method: str | None = None,
        key: str | None = None,
        matches: Callable[[Any], bool] | None = None,
        after: int = 0,
        times: int | None = 1,
    ) -> None:
        """Do ``fault`` to the next ``times`` requests (``None``: to all) that match, after letting ``after`` pass."""

        def match(request: Request) -> bool:
            return (
                (method is None or request.method == method)
                and (key is None or request.key == key)
                and (matches is None or matches(request))
            )

        with self._lock:
            self._rules.append(_Rule(fault, match, after, times))

    def clear(self) -> None:
        """Drop all rules."""
        with self._lock:
            self._rules.clear()

    def choose(self, request: Request) -> F | None:
        """The fault for this request, if any; counts the rule down."""
        with self._lock:
            for rule in self._rules:
                if rule.times == 0 or not rule.matches(request):
                    continue
                if rule.after:
                    rule.after -= 1
                    continue
                if rule.times is not None:
                    rule.times -= 1
                return rule.fault
        return None
