"""What the proxy records of a request, and what it can do wrong to one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class RequestRecord:
    """One request that the proxy has seen.

    ``range`` is ``(start, end)`` with the end exclusive (``None``: open), ``status`` 0 until there is a reply,
    ``bytes_sent`` counts body bytes handed to the client so far, ``fault`` is what was done to it. ``time`` is the
    wall-clock second in which it came, ``done`` the one in which the whole reply had been handed over (0: it was not).
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
    done: float = 0.0


@dataclass(frozen=True)
class Fault:
    """What to do with one request. Several parts may be set; without any the request passes unharmed.

    ``latency``: seconds before it is passed on. ``status`` and ``code``: answered so, without asking the server.
    ``reset``: the connection is reset instead of an answer, the server never sees it. ``lose_reply``: the server
    carries it out, the client gets a reset. ``cut_after``: reset after so many body bytes. ``stall_after``: nothing
    more after so many body bytes, the connection stays open. ``shift_range``: the reply's Content-Range names a range
    so many bytes further. ``whole``: a 206 turns into a 200 without Content-Range. ``etag``: replaces the reply's.
    ``rate``: bytes a second for the reply's body. ``extra``: so many bytes more than the range has, counted in the
    reply's length. A ``status`` of 200 is an error in the body of what looks like a success.
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
    extra: int = 0
