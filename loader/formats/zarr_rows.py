"""Rows of zarr arrays by number: views of mapped chunks, or of pieces that are decoded once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .zarr_array import ZarrArray

_PIECES = 2
"""Decoded pieces that an array keeps; a part of a shard is one piece."""
_MAPS = 64
"""Mapped chunks that an array keeps. Both are bounds for shards that are read whole: views keep what they need."""


class Rows(ABC):
    """The rows ``start`` to before ``stop`` of an array, in runs of ``run``; a run is fetched when it is asked for.

    A run that is damaged fails with the same error each time.
    """

    def __init__(self, array: ZarrArray, start: int, stop: int, run: int, keep: int) -> None:
        self.array = array
        self._start = start
        self._stop = stop
        self._run = run
        self._keep = keep
        self._held: OrderedDict[int, npt.NDArray[Any] | FormatError] = OrderedDict()

    @abstractmethod
    def _fetch(self, number: int) -> npt.NDArray[Any]:
        """The rows of one run, ``number * run`` and on; those behind the array's end may be there as well."""

    def row(self, i: int) -> Any:
        """Row ``start + i``: a view, or a scalar."""
        number, at = divmod(self._start + i, self._run)
        return self._get(number)[at]

    def rows(self, which: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The rows ``start + which``, joined."""
        wanted = which + self._start
        numbers = wanted // self._run
        if len(which) and (numbers == numbers[0]).all():
            held = self._get(int(numbers[0]))
            local = wanted - numbers[0] * self._run
            if (np.diff(local) == 1).all():
                return held[int(local[0]) : int(local[-1]) + 1]
            gathered: npt.NDArray[Any] = held[local]
            return gathered
        out = np.empty((len(which), *self.array.shape[1:]), self.array.dtype)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            out[mine] = self._get(number)[wanted[mine] - number * self._run]
        return out

    def _get(self, number: int) -> npt.NDArray[Any]:
        held = self._held.get(number)
        if held is None:
            try:
                held = self._fetch(number)
            except FormatError as e:
                held = e
            self._held[number] = held
            while len(self._held) > self._keep:
                self._held.popitem(last=False)
        else:
            self._held.move_to_end(number)
        if isinstance(held, FormatError):
            raise held.with_traceback(None)  # else each raise would add to the one before
        return held


class MappedRows(Rows):
    """Rows of a plain array: a run is a chunk, and a row a view of its map."""

    def __init__(self, array: ZarrArray, start: int, stop: int) -> None:
        super().__init__(array, start, stop, array.chunk[0], _MAPS)

    def _fetch(self, number: int) -> npt.NDArray[Any]:
        return self.array.mapped_chunk(number)


class DecodedRows(Rows):
    """Rows of any array: a run is a piece of the shard, decoded into memory."""

    def __init__(self, array: ZarrArray, start: int, stop: int, piece: int) -> None:
        super().__init__(array, start, stop, piece, _PIECES)

    def _fetch(self, number: int) -> npt.NDArray[Any]:
        first = number * self._run
        return self.array.decode(first, min(first + self._run, self.array.rows))
