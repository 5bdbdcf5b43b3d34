"""Which client holds which leases. A session is one process; its leases end with its last connection."""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass, field

from ..config import Origin
from ..errors import CacheError
from ..flash import Entry
from .engine import Engine, Opening
from .origins import Access


@dataclass(eq=False)
class Session:
    """One client process: its origin, how many connections it has, and what it has open by lease number."""

    ident: str
    access: Access = field(repr=False)
    connections: int = 0
    leases: dict[int, Opening] = field(default_factory=dict)

    def entry(self, lease: int) -> Entry | None:
        """The cache entry of a lease; ``None`` for one that this daemon never gave."""
        opening = self.leases.get(lease)
        return None if opening is None or opening.holding is None else opening.holding.entry


class Sessions:
    """All clients of a daemon. Lease numbers start at random: one of a former daemon is not mistaken for ours."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: dict[str, Session] = {}
        self._numbers = itertools.count((secrets.randbits(32) << 20) + 1)

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def leases(self) -> int:
        return sum(len(session.leases) for session in self._sessions.values())

    def join(self, ident: str, origin: Origin) -> Session:
        """A connection says hello. Raises :class:`CacheError` if the session is known with another origin."""
        session = self._sessions.get(ident)
        if session is None:
            session = self._sessions[ident] = Session(ident, Access.by(origin))
        if session.access.origin != origin:
            raise CacheError("this session was begun with another origin")
        session.connections += 1
        return session

    def leave(self, session: Session) -> None:
        """A connection ended; the last one takes the leases with it."""
        session.connections -= 1
        if not session.connections:
            self.release(session, list(session.leases))
            self._engine.plans.leave(session.ident)
            del self._sessions[session.ident]

    def grant(self, session: Session, opening: Opening) -> int:
        """Take over an opening's lease under a new number."""
        number = next(self._numbers)
        session.leases[number] = opening
        return number

    def release(self, session: Session, numbers: list[int]) -> None:
        """Give leases back; unknown numbers are ignored."""
        for number in numbers:
            opening = session.leases.pop(number, None)
            if opening is not None:
                self._engine.release(opening)
