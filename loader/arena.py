"""The arena of a DataLoader worker: shared memory in which its batches lie, used again and again.

torch sends a tensor to another process as a new shared memory segment, with a file descriptor that goes through a
socket: system calls, and pages that are zeroed by the kernel and touched for the first time on both sides, for each
tensor of each batch. Here a worker makes one file without a name (``memfd``), the process that reads its batches maps
it once, and then a batch is sent as offsets. Where the memory of a tensor is free again says a byte in the arena
(``loader.arenamap``), which the reader clears when the tensor and all its views are gone.

Nothing waits for a free place: where there is none a tensor is sent the way torch does it. The file has no name, so
however the processes end it is gone with them; and it is not in ``/dev/shm``, which containers keep small.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from multiprocessing import reduction
from typing import Any, NamedTuple

import torch

from .arenamap import SLOTS, ArenaMap
from .arenaspace import Space
from .forks import FORKS

ARENA_BYTES = 1 << 30
"""Most bytes of a worker's batches that are under way or in use at once, in its arena. Takes memory as it is used."""


class ArenaName(NamedTuple):
    """What a receiver has to know of an arena; ``key`` is no other's. It is ``fd`` in process ``pid``."""

    pid: int
    fd: int
    key: int
    size: int


class Sent(NamedTuple):
    """Where a tensor that is sent lies. ``handle`` opens the arena, for a receiver that has not yet."""

    name: ArenaName
    handle: Any
    ticket: int
    offset: int
    nbytes: int


class Arena:
    """The arena of this process. Any thread may take and send; any thread may let go."""

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("nearflash-batches", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, ArenaMap.file_bytes(size))
            self._map = ArenaMap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        weakref.finalize(self, os.close, self._fd).atexit = False
        self._map.key = secrets.randbits(63) | 1
        self._name = ArenaName(os.getpid(), self._fd, self._map.key, size)
        self._held = bytearray(SLOTS)  # slots whose tensors are alive in this process
        self._space = Space(size, SLOTS, self._busy)
        self._first = int(self._map.array(0, 1).ctypes.data)
        self._size = size
        self._lock = threading.Lock()

    @classmethod
    def make(cls) -> Arena | None:
        """One for this process; ``None`` where the system has none to give."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(ARENA_BYTES)
        except (OSError, ValueError):
            return None

    def take(self, nbytes: int) -> torch.Tensor | None:
        """Uninitialised memory as a flat uint8 tensor; ``None`` if there is no place for it now.

        Its place is free again when this tensor and all its views are gone, here and where they were sent, and in
        children that were forked meanwhile.
        """
        FORKS.settle()
        with self._lock:
            block = self._space.take(nbytes)
            if block is None:
                return None
            self._held[block.slot] = 1
        array = self._map.array(block.offset, nbytes)
        # a tensor's storage holds this very array: when it dies nobody here sees the memory any more
        use = FORKS.use(self._let_go, block.slot)
        weakref.finalize(array, use.end).atexit = False
        return torch.from_numpy(array)

    def send(self, storage: torch.UntypedStorage) -> Sent | None:
        """Let a storage go to another process; ``None`` if it is not of this arena or was sent too often."""
        offset = storage.data_ptr() - self._first
        if not 0 <= offset < self._size:
            return None
        with self._lock:
            block = self._space.at(offset)
            if block is None or not self._held[block.slot]:
                return None
            ticket = self._map.issue(block.slot)
        if ticket is None:
            return None
        handle = None if self._map.adopted else reduction.DupFd(self._fd)
        return Sent(self._name, handle, ticket, offset, storage.nbytes())

    def _busy(self, slot: int) -> bool:
        return bool(self._held[slot]) or self._map.issued(slot)

    def _let_go(self, slot: int) -> None:
        # takes no lock: the garbage collector may run it in a thread that holds it
        self._held[slot] = 0
