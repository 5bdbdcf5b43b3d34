"""Equal keys side by side: which samples of many lie in the same place, so that each place is gone to once."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .permute import Int64s

_SHORT = 1 << 15


class Grouped(NamedTuple):
    """``order``: the numbers of all keys, equal ones together and in their order; ``groups``: each key, and its first
    place in ``order`` and the one behind its last."""

    order: Int64s
    groups: list[tuple[int, int, int]]

    @property
    def back(self) -> Int64s:
        """Where in ``order`` each key's number is."""
        back = np.empty_like(self.order)
        back[self.order] = np.arange(len(self.order))
        return back


def grouped(keys: Int64s) -> Grouped:
    """Groups keys that are not negative, of which there is at least one. Keys ascend from group to group."""
    # 16-bit keys make numpy's stable sort a radix sort
    order = np.argsort(keys.astype(np.int16) if keys.max() < _SHORT else keys, kind="stable")
    found = keys[order]
    starts = [0, *(np.flatnonzero(np.diff(found)) + 1).tolist(), len(found)]
    return Grouped(order, [(int(found[start]), start, end) for start, end in pairwise(starts)])
