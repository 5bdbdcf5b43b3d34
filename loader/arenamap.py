"""The memory of an arena as both sides see it: a flag, the tickets, and the bytes of the tensors.

A *ticket* is a byte that the sender sets for each tensor it sends and the receiver clears when that tensor has died.
One byte, one store, each way: no lock is shared between processes, so none can be left locked by one that died.
"""

from __future__ import annotations

import mmap
import os
import sys

import numpy as np
import numpy.typing as npt

SLOTS = 1024
"""Stretches that can be in use at once."""
TICKETS = 8
"""Tensors over one stretch that can be under way or in use at once."""
_KEY = 8
_FIRST_TICKET = 64
_DATA = 3 * 4096
assert _FIRST_TICKET + SLOTS * TICKETS <= _DATA


class ArenaMap:
    """An arena of ``size`` bytes of tensors, mapped from an open file of :meth:`file_bytes`."""

    def __init__(self, fd: int, size: int) -> None:
        self._memory = mmap.mmap(fd, self.file_bytes(size))
        whole = memoryview(self._memory)
        self._flag = whole[:1]
        self._key = whole[_KEY : _KEY + 8].cast("Q")
        self._tickets = whole[_FIRST_TICKET : _FIRST_TICKET + SLOTS * TICKETS]
        self._words = self._tickets.cast("Q")  # the tickets of one slot

    @staticmethod
    def file_bytes(size: int) -> int:
        """Bytes of the file for ``size`` bytes of tensors."""
        return _DATA + size

    @staticmethod
    def key_of(fd: int) -> int:
        """The key of the arena in an open file; 0 if there is none."""
        return int.from_bytes(os.pread(fd, 8, _KEY), sys.byteorder)

    @property
    def key(self) -> int:
        """A number, not 0, that is no other arena's."""
        return self._key[0]

    @key.setter
    def key(self, value: int) -> None:
        self._key[0] = value

    def array(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A new array over some of the bytes; the map lives as long as one of them does."""
        return np.ndarray((nbytes,), np.uint8, self._memory, _DATA + offset)

    @property
    def adopted(self) -> bool:
        """Whether the receiver has a map of its own that it keeps: then it need not be told the file again."""
        return self._flag[0] != 0

    def adopt(self) -> None:
        self._flag[0] = 1

    def issue(self, slot: int) -> int | None:
        """A ticket for one more tensor over a slot; ``None`` if there are too many already. The sender's."""
        first = slot * TICKETS
        for ticket in range(first, first + TICKETS):
            if not self._tickets[ticket]:
                self._tickets[ticket] = 1
                return ticket
        return None

    def give_back(self, ticket: int) -> None:
        """The tensor of a ticket has died. The receiver's."""
        self._tickets[ticket] = 0

    def issued(self, slot: int) -> bool:
        """Whether a tensor over a slot is under way or in use."""
        return self._words[slot] != 0
