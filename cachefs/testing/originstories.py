"""Seeded stories of an origin that fails while an object is read chunk by chunk. Pure.

A story says what goes wrong and when; who tells it (against :mod:`.memoryserver` with a manual clock, or against a
real server behind :mod:`.s3proxy`) decides what is read and how long a second is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .faults import Fault


@dataclass(frozen=True)
class Trouble:
    """``fault`` for ``times`` requests of one ``method``, after ``after`` of them have passed it unharmed."""

    fault: Fault
    after: int = 0
    times: int = 1
    method: str = "GET"


@dataclass(frozen=True)
class Story:
    """What goes wrong while ``chunks`` chunks are read, ``at_once`` of them at a time.

    ``replaced``, ``expired``: the chunk before whose first request the object gets another version, the token ends;
    ``renewable``: whether a new token is to be had. ``survivable``: all bytes come, whatever the order of requests.
    """

    kinds: tuple[str, ...]
    chunks: int
    at_once: int
    troubles: tuple[Trouble, ...] = ()
    replaced: int | None = None
    expired: int | None = None
    renewable: bool = True
    survivable: bool = True


_FAULTS: dict[str, Callable[[random.Random, int], Fault]] = {
    "reset": lambda draw, size: Fault(reset=True),
    "lost reply": lambda draw, size: Fault(lose_reply=True),
    "cut body": lambda draw, size: Fault(cut_after=draw.randrange(size)),
    "stall": lambda draw, size: Fault(stall_after=draw.randrange(size)),
    "late": lambda draw, size: Fault(latency=draw.random() * 2),
    "slow": lambda draw, size: Fault(rate=size * draw.uniform(0.3, 3.0)),
    "wrong range": lambda draw, size: Fault(shift_range=draw.randrange(1, size)),
    "200 for a range": lambda draw, size: Fault(whole=True),
    "extra byte": lambda draw, size: Fault(extra=1),
    "SlowDown in a 200": lambda draw, size: Fault(status=200, code="SlowDown"),
    "server error": lambda draw, size: Fault(status=draw.choice([500, 502, 504]), code="InternalError"),
    "too many": lambda draw, size: Fault(status=429, code="TooManyRequests"),
    "trickle": lambda draw, size: Fault(rate=size / 1000),
    "other version": lambda draw, size: Fault(etag='"no version"'),
    "denied": lambda draw, size: Fault(status=403, code="AccessDenied"),
}
_WRONG_REPLIES = frozenset({"wrong range", "200 for a range", "extra byte", "SlowDown in a 200"})
_BEFORE_A_BODY = frozenset({"reset", "lost reply", "late", "server error", "too many"})
_FATAL = frozenset({"trickle", "other version", "denied"})
_EVENTS = ("storm", "replaced", "expired", "expired for good")
KINDS = (*_FAULTS, *_EVENTS)
"""Everything that a story may be about."""


def story(seed: int, chunk_bytes: int) -> Story:
    """The story of a seed. Over any ``len(KINDS)`` seeds in a row, each kind is the main subject of one."""
    draw = random.Random(seed)
    main = KINDS[seed % len(KINDS)]
    kinds = (main, *draw.sample([kind for kind in KINDS if kind != main], draw.randrange(3)))
    chunks = draw.randint(2, 8)
    troubles: list[Trouble] = []
    for kind in kinds:
        if kind == "storm":
            troubles.append(Trouble(Fault(status=503), draw.randrange(chunks), draw.randint(4, 10)))
            troubles.append(Trouble(Fault(status=503), 0, draw.randrange(4), "HEAD"))
        elif kind in _FAULTS:
            fault = _FAULTS[kind](draw, chunk_bytes)
            # A wrong reply is asked for again a few times only, so it is not repeated more often than that.
            times = 1 if kind in _WRONG_REPLIES else draw.randint(1, 3)
            troubles.append(Trouble(fault, draw.randrange(chunks), times))
            if kind in _BEFORE_A_BODY:
                troubles.append(Trouble(fault, 0, draw.randrange(2), "HEAD"))
    fatal = _FATAL.intersection(kinds) or "replaced" in kinds or "expired for good" in kinds
    return Story(
        kinds=kinds,
        chunks=chunks,
        at_once=draw.randint(1, 4),
        troubles=tuple(troubles),
        replaced=draw.randrange(1, chunks) if "replaced" in kinds else None,
        expired=draw.randrange(chunks) if "expired" in kinds or "expired for good" in kinds else None,
        renewable="expired for good" not in kinds,
        survivable=not fatal,
    )
