"""One address range for the rows of many shards, so that a batch from all of them is one gather.

A batch of token windows comes from dozens of shards. Mapped one by one they are dozens of arrays, and the batch is put
together row by row. Here they are mapped side by side into a range of addresses reserved beforehand, at multiples of
the row's size, so that the whole range is one array of rows and any rows of it are taken in one call that holds no
lock. Reserving costs no memory; the range is as large as the shards that may be open at once.

Only files can be placed (``mmap`` with ``MAP_FIXED``), so this is for Linux and macOS; elsewhere rows are copied shard
by shard.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import CacheError

Bytes = npt.NDArray[np.uint8]

MOST = 1 << 42
"""Bytes of address space that one range may take."""
_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0x40)
_MADV_POPULATE_READ = 22
_POPULATE_MOST = 256 << 20
_ANONYMOUS = mmap.MAP_ANONYMOUS


def supported() -> bool:
    """Whether files can be placed at an address on this system."""
    return sys.platform in ("linux", "darwin")


class RowSpace:
    """A range of ``slots`` places for files of up to ``largest`` bytes, whose rows are ``row`` bytes each.

    Belongs to one thread. Rows are only ever copied out of it: nothing may keep a view of :attr:`memory` beyond the
    call that made it, since places are given to other files.
    """

    def __init__(self, slots: int, largest: int, row: int) -> None:
        unit = math.lcm(mmap.ALLOCATIONGRANULARITY, row)
        self.row = row
        self.slot_bytes = max(-(-largest // unit), 1) * unit
        self.slots = max(1, min(slots, MOST // self.slot_bytes))
        self._map = mmap.mmap(
            -1,
            # some room behind the last slot, for rows that begin in it behind a header
            self.slots * self.slot_bytes + unit,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)
        self._address = self.memory.ctypes.data
        self._mmap = _system_mmap()
        self._mapped: dict[int, int] = {}  # bytes of the file in each place

    @staticmethod
    def fits(largest: int, row: int) -> bool:
        """Whether a range for such files is within :data:`MOST`."""
        unit = math.lcm(mmap.ALLOCATIONGRANULARITY, row)
        return row > 0 and (-(-largest // unit) + 1) * unit * 2 <= MOST

    def place(self, slot: int, fd: int, size: int) -> int:
        """Map ``size`` bytes of ``fd`` into place ``slot``, over what was there; the byte at which it begins.

        The descriptor may be closed afterwards. Raises ``CacheError`` where the system has no room for another map.
        """
        begin = slot * self.slot_bytes
        self.clear(slot)
        self._map_at(begin, fd, size)
        self._mapped[slot] = size
        return begin

    def clear(self, slot: int) -> None:
        """Take away the file in a place: as long as any of it is mapped, its space on disk is not free."""
        size = self._mapped.pop(slot, 0)
        if size:
            self._place_map(slot * self.slot_bytes, size, _ANONYMOUS, -1)

    def _map_at(self, begin: int, fd: int, size: int) -> None:
        if size == 0:
            return
        address = self._place_map(begin, size, 0, fd)
        if sys.platform == "linux" and size <= _POPULATE_MOST:
            # All pages at once: a fault for each costs as much as copying it. A kernel before 5.14 refuses, and then
            # they come one by one.
            ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_READ)

    def _place_map(self, begin: int, size: int, extra: int, fd: int) -> int:
        address = self._address + begin
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE | extra
        if self._mmap(address, size, protection, flags, fd, 0) != address:
            error = ctypes.get_errno()
            raise CacheError(f"no room for another map (error {error})", hint="raise vm.max_map_count")
        return address

    def rows(self, offset: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """The range from byte ``offset`` (less than a row) on as an array ``(rows, row / itemsize)``.

        A file that begins at byte ``b`` has its row ``i`` at ``b / row + i``.
        """
        count = (len(self.memory) - offset) // self.row
        return self.memory[offset : offset + count * self.row].view(dtype).reshape(count, -1)


def _system_mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong,
    ]  # fmt: skip
    return function
