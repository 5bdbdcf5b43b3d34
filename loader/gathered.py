"""A run of batches that were gathered into one, and are cut from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .sample import Batch

if TYPE_CHECKING:
    from .passes import Run


class GatheredRun:
    """The batches of ``run``, whose samples lie one after another in ``whole``: views that do not overlap, and keep the
    memory of all of them as long as one is in use."""

    def __init__(self, whole: Batch, run: Run) -> None:
        self.whole = whole
        self._run = run

    def __iter__(self) -> Iterator[tuple[Batch, tuple[int, int]]]:
        stamps, names = self._run.stamps, self.whole.keys()
        sizes = [stamp.size for stamp in stamps]
        columns = [tensor.split(sizes) for tensor in self.whole.values()]
        for number, stamp, parts in zip(self._run.batches, stamps, zip(*columns, strict=True), strict=True):
            batch = Batch(zip(names, parts, strict=True))
            batch.stamp = stamp
            yield batch, (number, stamp.size)
