"""The receiving side of arenas: batches of DataLoader workers as tensors over the workers' memory.

A worker's arena is mapped when its first tensor arrives and kept until its process object is gone (DataLoader's
iterator holds it) and the last tensor over it, whichever is later. What arrives is an ordinary tensor; when it and all
its views are gone, here and in children that were forked meanwhile (``loader.forks``), its ticket is given back, and
the worker may use the place for another batch.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from typing import Any

import torch

from cachefs.errors import DataError

from .arena import ArenaName, Sent
from .arenamap import ArenaMap
from .forks import FORKS


class ArenaView:
    """Another process's arena, mapped here."""

    def __init__(self, fd: int, name: ArenaName) -> None:
        self._map = ArenaMap(fd, name.size)

    def storage(self, sent: Sent) -> torch.UntypedStorage:
        """The memory of a tensor that arrived."""
        array = self._map.array(sent.offset, sent.nbytes)
        # holds this view, and so its map, as long as the memory is in use
        use = FORKS.use(self._give_back, sent.ticket)
        weakref.finalize(array, use.end).atexit = False
        return torch.from_numpy(array).untyped_storage()

    def adopt(self) -> None:
        """Let the worker know that this view stays."""
        self._map.adopt()

    def _give_back(self, ticket: int) -> None:
        self._map.give_back(ticket)


class Views:
    """The arenas that are mapped in this process.

    Takes no lock: what one worker sends is received by one thread at a time, and should two threads map one arena
    nevertheless, both maps are right.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, ArenaView] = weakref.WeakValueDictionary()
        self._adopted: dict[int, ArenaView] = {}

    def storage(self, sent: Sent) -> torch.UntypedStorage:
        """The memory of a tensor that arrived. Raises ``DataError`` if its arena cannot be opened any more."""
        view = self._adopted.get(sent.name.key)
        if view is None or sent.handle is not None:
            view = self._open(sent.name, sent.handle)
        return view.storage(sent)

    def __len__(self) -> int:
        return len(self._alive)

    def _open(self, name: ArenaName, handle: Any) -> ArenaView:
        view = self._alive.get(name.key)
        if view is None:
            fd = _opened(name) if handle is None else handle.detach()
            try:
                view = self._alive[name.key] = ArenaView(fd, name)
            finally:
                os.close(fd)
        elif handle is not None:
            os.close(handle.detach())  # the worker keeps it for us until then
        self._adopt(name, view)
        return view

    def _adopt(self, name: ArenaName, view: ArenaView) -> None:
        """Keep a view as long as its worker's process object lives, if that is a child of this process."""
        if name.key in self._adopted:
            return
        for process in multiprocessing.active_children():
            if process.pid == name.pid:
                self._adopted[name.key] = view
                weakref.finalize(process, self._adopted.pop, name.key, None).atexit = False
                view.adopt()
                return


def _opened(name: ArenaName) -> int:
    """An arena whose file was not sent along, by the name that the system has for it."""
    try:
        fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as e:
        raise DataError(f"a batch's memory in process {name.pid} cannot be opened: {e}") from e
    if ArenaMap.key_of(fd) != name.key:
        os.close(fd)
        raise DataError(f"a batch's memory in process {name.pid} is gone")
    return fd


VIEWS = Views()
"""The views of this process: what arrives finds them here, since unpickling passes nothing along."""
