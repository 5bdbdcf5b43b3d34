"""A pass as one process reads it: fresh maps, prefetch, stand-ins for damaged samples."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from cachefs.errors import DataError

from .arenasend import sending
from .epochcell import EpochCell, Start
from .passes import Run
from .plannable import Plannable
from .progress import Progress
from .reader import DataWarning
from .sample import Sample, Stamp
from .samples import Places, with_stand_ins
from .workers import ALONE, Worker

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from .formats import Tokens
    from .rowgather import WindowRows

_NEIGHBOURS = 16
"""Batches before and after one in which a good sample is looked for when all of it is damaged."""


class Reading:
    """One pass read by this process; a context manager. ``worker``: ``None`` where no DataLoader worker reads.

    ``first`` leaves out the batches before it (a worker that goes on). With ``threads`` beyond one, :meth:`samples` may
    be called by several at once. Leaving the context closes what is open; samples that were handed out stay valid.
    """

    def __init__(
        self,
        definition: Plannable,
        cell: EpochCell,
        start: Start,
        *,
        worker: Worker | None,
        first: int = 0,
        threads: int = 1,
    ) -> None:
        self.plan = definition.plan(start)
        self.progress = Progress(start, self.plan, first)
        self._definition = definition
        self._cell = cell
        self._worker = worker
        self._first = first
        self.format = definition.format
        self.reader = definition.reader(self.plan, shared=threads > 1)
        self._prefetch = definition.prefetch(self.plan)
        self._bad = 0
        self._counting = threading.Lock()
        self._windows: tuple[WindowRows, int] | None = None
        if worker is not None:
            sending()

    def windows(self, format: Tokens, capacity: int) -> WindowRows:
        """What gathers the windows of token files, made at first use and given back with the pass. ``capacity``: how
        many shards are open at a time."""
        if self._windows is None:
            self._windows = self._definition.take_rows(format, capacity), capacity
        return self._windows[0]

    def batches(self) -> Iterator[tuple[int, Stamp, Places]]:
        """Number, stamp and places of each batch of this worker's share."""
        self._begin()
        for batch, stamp, places in self.plan.share(self._worker or ALONE, self._first):
            if self._prefetch is not None:
                self._prefetch.reach(stamp.end)
            yield batch, stamp, places

    def runs(self, samples: int) -> Iterator[Run]:
        """As :meth:`batches`, in runs of about so many samples."""
        self._begin()
        for located in self.plan.runs(self._worker or ALONE, self._first):
            each = samples // max(located.stamps[0].size, 1)
            yield from self._cut(located, repeat(each).__next__)

    def runs_of(self, batches: Callable[[], int], most: int) -> Iterator[Run]:
        """As :meth:`batches`, in runs of as many as ``batches`` says when one begins, at least one, and at most about
        ``most`` samples."""
        self._begin()
        for located in self.plan.runs(self._worker or ALONE, self._first, most):
            yield from self._cut(located, batches)

    def _cut(self, located: Run, each: Callable[[], int]) -> Iterator[Run]:
        for run in located.cut(each):
            if self._prefetch is not None:
                self._prefetch.reach(run.stamps[-1].end)
            yield run

    def _begin(self) -> None:
        """Ask for what comes first, before anything is waited for."""
        if self._prefetch is not None:
            self._prefetch.reach(self.plan.position)

    def handed_out(self, batch: int, samples: int, of: int) -> None:
        """The user is about to get sample number ``samples`` of the ``of`` in this batch."""
        progress = self.progress
        if samples < of:
            progress.batches, progress.samples = batch, samples
            return
        progress.batches, progress.samples = batch + (1 if self._worker is None else self._worker.count), 0

    def samples(self, batch: int, stamp: Stamp, places: Places) -> list[Any]:
        """The finished samples of one batch, each with its stamp."""
        samples = self.reader.read(places)
        bad = [sample for sample in samples if isinstance(sample, DataError)]
        if bad:
            self._count(bad)
            samples = self._with_stand_ins(batch, samples, places)
        for sample in samples:
            if isinstance(sample, Sample):
                sample.stamp = stamp
        return samples

    def close(self) -> None:
        """Close all open shards. Idempotent."""
        self.reader.close()
        if self._prefetch is not None:
            self._prefetch.close()
        windows, self._windows = self._windows, None
        if windows is not None:
            self._definition.keep_rows(*windows)

    def _with_stand_ins(self, batch: int, samples: list[Any], places: Places) -> list[Any]:
        """In a mixture a sample stands in for one of the same source only."""
        origin = places.origin
        if origin is None:
            return with_stand_ins(samples, lambda: self._around(batch))
        out = list(samples)
        for source in np.unique(origin.source).tolist():
            of = np.flatnonzero(origin.source == source)
            near = partial(self._beside, source, int(origin.number[of[0]]))
            for at, sample in zip(of.tolist(), with_stand_ins([samples[at] for at in of], near), strict=True):
                out[at] = sample
        return out

    def _beside(self, source: int, number: int) -> Iterator[list[Any]]:
        return (self.reader.read_untouched(places) for places in self.plan.order.near(source, number))

    def _around(self, batch: int) -> Iterator[list[Any]]:
        """This rank's batches before ``batch``, nearest and last sample first, then those behind it."""
        plan = self.plan
        for near in range(batch - 1, max(batch - _NEIGHBOURS, -plan.earlier) - 1, -1):
            yield self.reader.read_untouched(plan.places(plan.positions(near)))[::-1]
        for near in range(batch + 1, batch + _NEIGHBOURS):
            if not plan.has(near):
                return
            yield self.reader.read_untouched(plan.places(plan.positions(near)))

    def _count(self, bad: list[DataError]) -> None:
        with self._counting:
            self._cell.count_bad(self._worker or ALONE, len(bad))
            first = self._bad == 0
            self._bad += len(bad)
        if first:
            warnings.warn(f"damaged samples are skipped, the first: {bad[0]}", DataWarning, stacklevel=3)

    def finished(self) -> None:
        """The last batch was handed out: say what the pass went without. Of whole shards one worker of a rank tells."""
        shards = 0 if (self._worker or ALONE).index else len(self._definition.damaged)
        parts = [f"{self._bad} damaged sample(s) were skipped"] if self._bad else []
        parts += [f"{shards} damaged shard(s) count as empty"] if shards else []
        if parts:
            warnings.warn(f"epoch {self.plan.order.epoch}: {', '.join(parts)}", DataWarning, stacklevel=3)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
