"""The pass that the workers of a DataLoader read, begun by the process that starts them.

Workers begin to read when they are started, each at a moment of its own, and one of an iterator that is thrown away at
once may be ended before it does. Were they left to begin the pass, which epoch they read would be a matter of timing.
So it is begun while the iterator is being made: each iterator that starts workers is the next pass, and what is set
after it was made holds for the next one. DataLoader does not tell a data set that it starts workers for it; but they
are forked, or sent a copy of the data set, from the call that makes the iterator, and there it is looked for. The pass
goes to the workers with the copy.

Two cases are left to the workers themselves (:mod:`loader.epochcell`): the later passes of persistent workers, and a
data set within an object of somebody else's that is not known here.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from typing import Any, Final

from .calls import callers
from .epochcell import EpochCell, Start
from .workers import find_worker

_MODULE: Final = "torch.utils.data.dataloader"
_ITERATOR: Final = "_BaseDataLoaderIter"
_ATTRIBUTE: Final = "team"


class Team:
    """The workers of the latest iterator over a data set: what the process that starts them and they share.

    ``prepare`` is called before the first of them is started.
    """

    def __init__(self, cell: EpochCell, start: Start | None = None, prepare: Callable[[], None] | None = None) -> None:
        self._cell = cell
        self._prepare = prepare
        self._iterator: weakref.ref[Any] | None = None
        self._begun: Start | None = None
        self._sent = start

    def send(self, iterator: Any) -> None:
        """Let copies that are made now be the workers' of this iterator; the first one begins its pass."""
        if self._iterator is None or self._iterator() is not iterator:
            self._cell.own()
            self._begun = self._cell.begin(None)
            self._iterator = weakref.ref(iterator)
            self._sent = self._begun
            if self._prepare is not None:
                self._prepare()
        self._sent = self._begun

    def sent(self) -> None:
        """Copies that are made from now on are not."""
        self._sent = None

    def take(self) -> Start | None:
        """In a worker: the pass that was begun for it, once."""
        start, self._sent = self._sent, None
        return start

    def awaits(self, epoch: int) -> bool:
        """Whether the latest iterator is one of that epoch, and its user has taken nothing from it yet."""
        iterator = self._iterator() if self._iterator is not None else None
        if iterator is None or getattr(iterator, "_rcvd_idx", None) != 0:
            return False
        following = self._cell.next_pass()
        return following.number > 0 and following.epoch == epoch + 1

    def copy_for(self, cell: EpochCell) -> Team:
        """The team of a copy of the data set that is being sent to a process, maybe a worker."""
        iterator = _starting()
        if iterator is not None and getattr(iterator._dataset, _ATTRIBUTE, None) is self:
            self.send(iterator)
        return Team(cell, self.take(), self._prepare)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None, "_begun": None}


def _starting() -> Any | None:
    """The iterator that is starting its workers in this very call, if any."""
    kind = getattr(sys.modules.get(_MODULE), _ITERATOR, None)
    if not isinstance(kind, type) or find_worker() is not None:
        return None
    for frame in callers():
        if frame.f_code.co_name == "__init__":
            made = frame.f_locals.get("self")
            if isinstance(made, kind) and getattr(made, "_num_workers", None):
                return made
    return None


_sending: list[Team] = []  # while a worker is being forked: the team that it is of


def _before_fork() -> None:
    iterator = _starting()
    team = getattr(iterator._dataset, _ATTRIBUTE, None) if iterator is not None else None
    if isinstance(team, Team):
        team.send(iterator)
        _sending.append(team)


def _after_fork() -> None:
    while _sending:
        _sending.pop().sent()


if hasattr(os, "register_at_fork"):
    # Forked copies share the cell's memory, and what is noted before a fork (loader.epochcell) knows of this pass.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_sending.clear)
