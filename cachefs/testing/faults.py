"""What a proxy or a fake store does wrong, and to which request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Matcher = Callable[["RequestRecord"], bool]


@dataclass
class RequestRecord:
    """One request that the proxy has seen.

    ``range`` is ``(start, end)`` with the end exclusive (``None``: open), ``status`` 0 until there is a reply,
    ``bytes_sent`` counts body bytes handed to the client so far, ``fault`` is what was done to it, ``time`` the
    wall-clock second in which it came.
    """

    method: str
    bucket: str
    key: str
    query: str
    range: tuple[int, int | None] | None
    status: int = 0
    bytes_sent: int = 0
    fault: Fault | None = None
    time: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Fault:
    """What to do with one request. Several parts may be set; without any the request passes unharmed.

    ``latency``: seconds before it is passed on. ``status`` and ``code``: answered so, without asking the server.
    ``reset``: the connection is reset instead of an answer, the server never sees it. ``lose_reply``: the server
    carries it out, the client gets a reset. ``cut_after``: reset after so many body bytes. ``stall_after``: nothing
    more after so many body bytes, the connection stays open. ``shift_range``: the reply's Content-Range names a range
    so many bytes further. ``whole``: a 206 turns into a 200 without Content-Range. ``etag``: replaces the reply's.
    ``rate``: bytes a second for the reply's body.
    """

    latency: float = 0.0
    status: int | None = None
    code: str = "SlowDown"
    reset: bool = False
    lose_reply: bool = False
    cut_after: int | None = None
    stall_after: int | None = None
    shift_range: int = 0
    whole: bool = False
    etag: str | None = None
    rate: float | None = None


PASS = Fault()


@dataclass
class _Rule:
    fault: Fault
    matches: Matcher
    after: int
    times: int | None


@dataclass
class FaultPlan:
    """An ordered list of rules; the first that matches a request and is not used up decides. Thread-safe."""

    _rules: list[_Rule] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(
        self,
        fault: Fault,
        *,
        method: str | None = None,
        key: str | None = None,
        matches: Matcher | None = None,
        after: int = 0,
        times: int | None = 1,
    ) -> None:
        """Do ``fault`` to the next ``times`` requests (``None``: to all) that match, after letting ``after`` pass."""

        def match(request: RequestRecord) -> bool:
            return (
                (method is None or request.method == method)
                and (key is None or request.key == key)
                and (matches is None or matches(request))
            )

        with self._lock:
            self._rules.append(_Rule(fault, match, after, times))

    def clear(self) -> None:
        with self._lock:
            self._rules.clear()

    def choose(self, request: RequestRecord) -> Fault:
        """The fault for this request, ``PASS`` for none; counts the rule down."""
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
        return PASS
