"""Telling the daemon what will be read, in pieces that fit into frames."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from . import protocol
from .config import job_environment
from .connection import unexpected
from .errors import ConfigError, ProtocolMismatch
from .hashing import name_digest
from .objstore.url import parse_url
from .session import Session
from .shard import ObjectStat

_PIECE_USES = 10_000
_TRIES = 3
"""A plan whose pieces get lost (the daemon was started anew) is sent this often."""

Use = tuple[int, int, int]


@dataclass(frozen=True)
class Terms:
    """Under what a plan is declared: its name in this process, its reader's position, its job and that one's share."""

    name: str
    position: int
    job: str
    share: float


def declare(session: Session, terms: Terms, objects: Sequence[ObjectStat], uses: Sequence[Use]) -> bool:
    """Declare a plan. False if the daemon does not take it: an older one, or one that holds too many.

    Left by an exception, the plan is withdrawn.
    """
    items, uses = _remote(objects, uses)
    if not items:
        return withdraw(session, terms.name)
    pieces = list(_pieces(items, uses))
    digest = name_digest(*(msgspec.msgpack.encode(piece) for piece in pieces))
    try:
        return _send(session, terms, digest, pieces) == "known"
    except BaseException:  # a Ctrl-C, too: others of the job would wait for the rest of it
        session.withdraw(terms.name)
        session.withdraw_now()
        raise


def progress(session: Session, name: str, position: int) -> bool:
    """False if the daemon knows no such plan, or of no plans."""
    return _ask(session, protocol.Progress(name, position)) == "known"


def withdraw(session: Session, name: str) -> bool:
    """Take a plan back, if there is one of that name."""
    return _ask(session, protocol.Plan(name, "")) == "known"


def default_job(environ: Mapping[str, str] | None = None) -> str:
    """What the processes of one job have in common: its launcher's name for it, where its ranks meet, else their
    process group."""
    env = job_environment(environ)
    for variable in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        if env.get(variable, "none") not in ("none", ""):
            return env[variable]
    if env.get("MASTER_PORT"):
        return f"{env.get('MASTER_ADDR', '')}:{env['MASTER_PORT']}"
    return f"group {os.getpgid(0) if hasattr(os, 'getpgid') else os.getppid()}"


def _send(session: Session, terms: Terms, digest: str, pieces: list[tuple[list[protocol.Item], list[Use]]]) -> str:
    """Offer a plan, and send it if nobody has. What the daemon says of it in the end."""
    state = "lost"
    for _ in range(_TRIES):
        state = _ask(session, _piece(terms, digest))
        start = 0
        for number, (some, when) in enumerate(pieces, 1):
            if state != "more":
                break
            last = number == len(pieces)
            state = _ask(session, _piece(terms, digest, start=start, objects=some, uses=when, last=last))
            start += len(some) + len(when)
        if state != "lost":
            break
    return state


def _ask(session: Session, request: protocol.Plan | protocol.Progress) -> str:
    try:
        reply, _ = session.call(request, version=protocol.WITH_PLANS)
    except ProtocolMismatch:
        return "refused"
    if not isinstance(reply, protocol.Planned):
        raise unexpected(reply)
    return reply.state


def _piece(
    terms: Terms,
    digest: str,
    *,
    start: int = 0,
    objects: list[protocol.Item] | None = None,
    uses: list[Use] | None = None,
    last: bool = False,
) -> protocol.Plan:
    return protocol.Plan(
        terms.name, digest, terms.job, terms.share, terms.position, start, objects or [], uses or [], last
    )


def _remote(objects: Sequence[ObjectStat], uses: Sequence[Use]) -> tuple[list[protocol.Item], list[Use]]:
    """Those that the cache is there for, numbered anew."""
    targets = [parse_url(stat.url) for stat in objects]
    if any(not 0 <= number < len(objects) for number, _, _ in uses):
        raise ConfigError("a plan uses an object that it does not name")
    kept = [number for number, target in enumerate(targets) if not target.is_local]
    items = [protocol.Item(str(targets[n]), objects[n].version, objects[n].size) for n in kept]
    if len(kept) == len(objects):
        return items, list(uses)
    numbers = {number: at for at, number in enumerate(kept)}
    return items, [(numbers[number], first, last) for number, first, last in uses if number in numbers]


def _pieces(items: list[protocol.Item], uses: list[Use]) -> Iterator[tuple[list[protocol.Item], list[Use]]]:
    for start in range(0, len(items), protocol.PAGE_ITEMS):
        yield items[start : start + protocol.PAGE_ITEMS], []
    for start in range(0, len(uses), _PIECE_USES):
        yield [], uses[start : start + _PIECE_USES]
