"""Batches of columnar formats made several at a time: their samples are read as if they were one batch, then cut.

The tensors of batches that were made together are views of the same memory, in which they do not overlap: what is
written into one batch is in no other, and the memory is in use as long as one of them is. How many are made at a time
is bounded by :data:`RUN_ROWS` and :data:`RUN_BYTES`; a batch that is as large as that is made by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from cachefs.errors import NearflashError

from .collation import Allocator
from .columns import ColumnGather, Gathered, cut, has_repeats, reads_columns
from .sample import Batch, Stamp
from .samples import Places, SampleReader

if TYPE_CHECKING:
    from .passes import Run
    from .reading import Reading

RUN_ROWS = 16384
"""Samples that are read in one call: enough that calls do not count, also where a shuffle takes them from many places;
few enough that what was made of them is in the processor's cache when it is cut."""
RUN_BYTES = 8 << 20

Made: TypeAlias = "tuple[Any, tuple[int, int]]"
"""A batch, its number and its size."""


def reads_runs(reading: Reading) -> bool:
    """Whether several batches may be read at once: nothing is decoded, which takes its time sample by sample."""
    reader, format = reading.reader, reading.format
    if not isinstance(reader, SampleReader) or format is None:
        return False
    return reads_columns(format, reader.recipe) and reader.recipe.decode.keeps_arrays


class Memory(NamedTuple):
    """Where batches are made. ``run``: that of several together (``None``: any that is private to this
    process); ``each``: where each of them is copied to (``None``: it stays in the run's)."""

    run: Allocator | None = None
    each: Allocator | None = None


class ColumnRuns:
    """Makes batches, some at a time; several threads may do so at once. ``whole``: makes a single one."""

    def __init__(self, reading: Reading, whole: Callable[[int, Stamp, Places], Any], memory: Memory) -> None:
        assert isinstance(reading.reader, SampleReader) and reading.format is not None
        self._reading = reading
        self._gather = ColumnGather(reading.format, reading.reader, threading.Lock())
        self._whole = whole
        self._memory = memory
        self._size = 1  # how many batches the next run has; any thread may set it

    def planned(self) -> Iterator[Run]:
        """The batches of the pass in runs, each as long as the ones before tell that it may be."""
        return self._reading.runs_of(lambda: self._size, RUN_ROWS)

    def __call__(self, run: Run) -> Cut | OneByOne:
        """The batches of a run. Raises what the first of them raises; what a later one does comes in its place."""
        if has_repeats(run.places):
            return OneByOne(run, self._whole)
        memory, alone = self._memory, len(run.batches) == 1
        try:
            gathered = self._gather.gather(
                run.places, memory.each if alone and memory.each else memory.run, 2**62 if alone else RUN_BYTES
            )
        except NearflashError:
            if alone:
                raise
            self._size = 1
            return OneByOne(run, self._whole)
        nbytes = gathered if isinstance(gathered, int) else gathered.nbytes
        self._size = fitting(len(run.batches), len(run.places.row), nbytes)
        if isinstance(gathered, int):
            return OneByOne(run, self._whole)
        return Cut(run, gathered, None if alone else memory.each)


def fitting(batches: int, samples: int, nbytes: int) -> int:
    """How many batches are made next, after so many of so many samples and bytes: at most twice as many."""
    return max(1, min(2 * batches, RUN_ROWS * batches // max(samples, 1), RUN_BYTES * batches // max(nbytes, 1)))


class Cut:
    """Batches that were read together, cut from there as they are iterated, for which no error is left."""

    def __init__(self, run: Run, gathered: Gathered, each: Allocator | None) -> None:
        self.nbytes = gathered.nbytes
        self._run = run
        self._each = each
        sizes = self._sizes = [stamp.size for stamp in run.stamps]
        # objects are collated here rather than when they are cut: whoever makes batches ahead has set where they lie
        self._columns = {
            name: column if isinstance(column, torch.Tensor) else cut(column, sizes)
            for name, column in gathered.columns.items()
        }

    def __iter__(self) -> Iterator[Made]:
        run, names = self._run, list(self._columns)
        columns = [self._cut(column) for column in self._columns.values()]
        fields: Iterable[tuple[Any, ...]] = zip(*columns, strict=True) if columns else repeat(())
        for number, stamp, values in zip(run.batches, run.stamps, fields, strict=False):
            batch = Batch(zip(names, values))  # noqa: B905 - as many of both; to have it checked takes half as long
            batch.stamp = stamp
            yield batch, (number, stamp.size)

    def _cut(self, column: torch.Tensor | Iterable[Any]) -> Iterable[Any]:
        if not isinstance(column, torch.Tensor):
            return column
        parts, each = cut(column, self._sizes), self._each
        return parts if each is None else [_copied(part, each) for part in parts]


class OneByOne:
    """Batches that are made only as they are iterated, because together they take too much, or one of them fails."""

    nbytes = 0

    def __init__(self, run: Run, whole: Callable[[int, Stamp, Places], Any]) -> None:
        self._run = run
        self._whole = whole

    def __iter__(self) -> Iterator[Made]:
        for number, stamp, places in self._run.split():
            yield self._whole(number, stamp, places), (number, stamp.size)


def _copied(tensor: torch.Tensor, allocate: Allocator) -> torch.Tensor:
    copied, array = allocate(tuple(tensor.shape), tensor.numpy().dtype)
    array[...] = tensor.numpy()
    return copied
