"""Batch buffers that are used again once nobody can see them any more.

A tensor of a batch lies in a slot; when the tensor and everything made from it (slices, views, other tensors over the
same storage) are gone, the slot is free for another batch. So a training loop that keeps a batch keeps it, and one that
does not makes no new memory: pages are touched once, and pinned once where a GPU is to copy from them.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64
_LEAST = 1 << 12


class Slots:
    """Buffers by size, the free ones kept up to ``most`` bytes. Any thread may ask; any thread may free.

    ``pin``: page-locked memory, from which a copy to a GPU needs no staging.
    """

    def __init__(self, *, most: int, pin: bool = False) -> None:
        self._most = most
        self._pin = pin
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}
        self._lock = threading.RLock()  # a buffer may come back while its own thread is asking for one
        self.made = 0
        """Buffers made so far."""
        self.free_bytes = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[torch.Tensor, npt.NDArray[Any]]:
        """An uninitialised tensor, and the array over the same memory to fill it with: write into the array and let go
        of it, and of all views of it, before the tensor is handed out."""
        nbytes = math.prod(shape) * dtype.itemsize
        size = max(_LEAST, 1 << max(nbytes - 1, 1).bit_length())
        buffer = self._take(size)
        array = np.ndarray(shape, dtype, buffer)
        # the tensor's storage holds this array, not the buffer under it: when it dies nobody sees the memory any more
        weakref.finalize(array, self._give_back, size, buffer).atexit = False
        return torch.from_numpy(array), array

    def _take(self, size: int) -> npt.NDArray[np.uint8]:
        with self._lock:
            free = self._free.get(size)
            if free:
                self.free_bytes -= size
                return free.pop()
            self.made += 1
        return self._make(size)

    def _make(self, size: int) -> npt.NDArray[np.uint8]:
        if self._pin:
            buffer: npt.NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
            return buffer
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % _ALIGNMENT
        return raw[start : start + size]

    def _give_back(self, size: int, buffer: npt.NDArray[np.uint8]) -> None:
        with self._lock:
            if self.free_bytes + size <= self._most:
                self.free_bytes += size
                self._free.setdefault(size, []).append(buffer)
