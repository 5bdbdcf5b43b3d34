"""Gathering the windows of token files: the rows of a batch, whatever shards they are in, in as few calls as can be."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .buffers import other_count
from .formats import Tokens
from .permute import Int64s
from .rowspace import RowSpace, supported

if TYPE_CHECKING:
    from cachefs.client import Client, Shard

    from .manifest import Manifest
    from .opening import OpenShard
    from .samples import Places

Array = npt.NDArray[Any]


class Opens(Protocol):
    """What opens shards by number."""

    def get(self, number: int) -> OpenShard: ...


class WindowRows:
    """Copies windows of many shards into arrays. One thread at a time gathers.

    Shards are placed side by side in a :class:`~loader.rowspace.RowSpace`; those that the cache could not take, and all
    of them where files cannot be placed, are read shard by shard through the pool of the pass. Nobody writes into what
    is placed here, so it stays right for later passes. ``resting``: how many stay placed between passes.
    """

    def __init__(
        self, format: Tokens, manifest: Manifest, client: Client, *, capacity: int, resting: int | None = None
    ) -> None:
        self._format = format
        self._manifest = manifest
        self._client = client
        self._resting = capacity if resting is None else resting
        self._item = format.stored.itemsize
        row = format.step * self._item
        largest = int(manifest.sizes.max(initial=0))
        self._space = _range(capacity, largest, row)
        self._lock = threading.Lock()  # for a thread of an earlier pass that was not waited for any longer
        count = len(manifest.shards)
        self._base = np.full(count, -1, dtype=np.int64)  # first row of each shard in the range, -1 if it is not placed
        self._used = np.zeros(count, dtype=np.int64)  # when it was wanted last
        self._tick = 0
        self._free = [] if self._space is None else list(range(self._space.slots))[::-1]
        self._open: dict[int, tuple[int, Shard]] = {}  # slot and lease of each shard that is placed
        self._leads: dict[int, int] = {}  # bytes of header before each placed shard's first row
        self._lead = 0
        self._unplaceable: set[int] = set()
        self._matrices: dict[int, Array] = {}

    def gather(self, places: Places, parts: list[tuple[Array, int]], pool: Opens) -> None:
        """Fill each array ``(samples, length)`` of ``parts`` with the windows at ``places``, moved by so many tokens.

        A dtype other than the stored one is converted to. ``pool``: what shards are read through that cannot be placed.
        Raises what opening a shard raises.
        """
        with self._lock:
            placed = self._gather(places, parts)
        if not placed:
            _one_by_one(places, parts, pool)

    def _gather(self, places: Places, parts: list[tuple[Array, int]]) -> bool:
        """False where that cannot be done in one call."""
        if self._space is None:
            return False
        base = self._base[places.shard]
        if len(base) and base.min() < 0:
            if not self._place(np.unique(places.shard)):
                return False
            base = self._base[places.shard]
        if not self._free:  # else nobody has to go soon, and nobody will ask which was used last
            self._tick += 1
            self._used[places.shard] = self._tick
        rows = base + places.row
        for array, at in parts:
            self._take(rows, self._lead + at * self._item, array)
        return True

    def _take(self, rows: Int64s, offset: int, array: Array) -> None:
        assert self._space is not None
        stored, length = self._format.stored, array.shape[1]
        if length == self._format.step:
            matrix = self._matrices.get(offset)
            if matrix is None:
                matrix = self._matrices[offset] = self._space.rows(offset, stored)
            if array.dtype == stored and array.flags.c_contiguous:
                # "wrap" copies straight into the array (the default works in a buffer first); rows are in range already
                matrix.take(rows, axis=0, out=array, mode="wrap")
            else:
                np.copyto(array, matrix.take(rows, axis=0, mode="wrap"))
            return
        memory = self._space.memory
        count = (len(memory) - offset - length * self._item) // self._space.row + 1
        windows = np.lib.stride_tricks.as_strided(
            memory[offset : offset + self._item].view(stored),
            shape=(count, length),
            strides=(self._space.row, self._item),
        )
        array[...] = windows[rows]  # take() would first copy the whole range of overlapping windows

    def _place(self, numbers: Int64s) -> bool:
        """Place those of the shards that are missing; False where that cannot be."""
        assert self._space is not None
        if len(numbers) > self._space.slots or not self._unplaceable.isdisjoint(numbers.tolist()):
            return False
        self._tick += 1
        self._used[numbers] = self._tick
        return all(self._place_one(number) for number in numbers[self._base[numbers] < 0].tolist())

    def _place_one(self, number: int) -> bool:
        assert self._space is not None
        stat = self._manifest.stat(number)
        shard = self._client.open(stat.url, version=stat.version, size=stat.size)
        slot = -1
        try:
            shard.wait(0, shard.size)
            if shard.cached:
                slot = self._slot()
                begin = self._space.place(slot, shard.fileno(), shard.size)
                lead = self._check(number, begin, shard.size)
                if not self._leads or lead == self._lead:
                    self._open[number] = (slot, shard)
                    self._lead = self._leads[number] = lead
                    self._base[number] = begin // self._space.row
                    return True
        except BaseException:
            if slot >= 0:
                self._free.append(slot)
            shard.close()
            raise
        # past the cache there is no file to map, and rows behind headers of several sizes are no one array
        if slot >= 0:
            self._free.append(slot)
        self._unplaceable.add(number)
        shard.close()
        return False

    def _slot(self) -> int:
        """A free place; if there is none, that of the shard that was not wanted for the longest time."""
        if not self._free:
            self._forget(self._oldest())
        return self._free.pop()

    def _oldest(self) -> int:
        """The placed shard that was not wanted for the longest time."""
        placed = np.fromiter(self._open, dtype=np.int64, count=len(self._open))
        return int(placed[self._used[placed].argmin()])

    def _check(self, number: int, begin: int, size: int) -> int:
        """The bytes before the shard's first row. Raises ``FormatError`` for a shard that is not what it was."""
        assert self._space is not None
        data = self._space.memory[begin : begin + size]
        url = self._manifest.stat(number).url
        index = self._format.index(data, url)
        if len(index) != self._manifest.samples(number):
            raise other_count(len(index), self._manifest.samples(number), url)
        if len(index) == 0:
            return 0
        lead = self._format.source(data, index).ctypes.data - data.ctypes.data
        return int(lead)

    def _forget(self, number: int) -> None:
        slot, shard = self._open.pop(number)
        self._base[number] = -1
        del self._leads[number]
        self._free.append(slot)
        if self._space is not None:
            self._space.clear(slot)
        shard.close()

    def rest(self) -> None:
        """The pass is over: more shards than may stay placed until the next one are given back.

        Waits for no lock, for finalizers: where a thread still gathers, all stay.
        """
        if self._lock.acquire(blocking=False):
            try:
                while len(self._open) > self._resting:
                    self._forget(self._oldest())
            finally:
                self._lock.release()

    def close(self) -> None:
        """Give back leases. Idempotent; nothing is placed afterwards."""
        with self._lock:
            for number in list(self._open):
                self._forget(number)
            self._matrices.clear()
            self._space = None


def _range(capacity: int, largest: int, row: int) -> RowSpace | None:
    """A range for so many shards, or as many as the process may have addresses for; ``None`` where there is none."""
    if not supported() or not RowSpace.fits(largest, row):
        return None
    for slots in (capacity, capacity // 4, capacity // 16):
        if slots >= 1:
            try:
                return RowSpace(slots, largest, row)
            except OSError:
                continue  # a limit on the process's address space: fewer shards may fit
    return None


def _one_by_one(places: Places, parts: list[tuple[Array, int]], pool: Opens) -> None:
    for to, (number, i) in enumerate(zip(places.shard.tolist(), places.row.tolist(), strict=True)):
        window = pool.get(number).source[i]
        for array, at in parts:
            array[to] = window[at : at + array.shape[1]]
