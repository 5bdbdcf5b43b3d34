"""The index of a Parquet shard, or of one row group of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .abc import SampleIndex
from .parquet_footer import Leaf, Place


@dataclass(slots=True)
class ParquetIndex(SampleIndex):
    """The row groups of one shard, or one of them: all that is needed of the footer, which is not read again.

    ``groups``: their numbers; ``counts``: their samples; ``spans`` and ``place``: where in the footer they, and what
    all share, are described; ``chunks``: their columns, ``(groups, leaves, 5)``.
    """

    groups: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int64]
    chunks: npt.NDArray[np.int64]
    place: Place
    leaves: tuple[Leaf, ...]
    names: tuple[str, ...]
    images: frozenset[str]
    starts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def nbytes(self) -> int:
        return self.chunks.nbytes + 5 * self.counts.nbytes + 200 * len(self.leaves) + 1000

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The row groups' first bytes."""
        first: npt.NDArray[np.int64] = self.chunks[:, :, 0].min(axis=1, initial=self.place.start)
        return first

    @property
    def size(self) -> int:
        """What they decompress to."""
        return int(self.chunks[:, :, 2].sum())
