"""Values that are made where they are to lie: a batch of several shards is not put together from arrays of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class Pending(ABC):
    """One field of many samples, which :meth:`loader.formats.Format.columns` may give in place of an array. All that
    can go wrong has gone well already."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    """That of the array; the first axis is the sample."""

    @abstractmethod
    def fill(self, out: npt.NDArray[Any], parts: Sequence[Self], order: Int64s | None) -> None:
        """Write the values of ``parts``, of which this is the first, into the contiguous ``out``: row ``k`` becomes row
        ``order[k]`` of theirs, one part behind the other; without ``order`` as they come. All are of one field."""

    def made(self) -> npt.NDArray[Any]:
        """These values by themselves, as a new array."""
        out = np.empty(self.shape, self.dtype)
        self.fill(out, [self], None)
        return out

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.made())
