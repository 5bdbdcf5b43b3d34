"""Whole batches from a data set: ``dataset.batched()``, for ``DataLoader(..., batch_size=None)``.

Token files take a shorter way: the windows of a batch are gathered shard by shard straight into the batch's tensor,
without a Python object for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from .collation import allocator, collate
from .columns import ColumnGather, reads_columns
from .formats import Tokens
from .sample import Batch, Stamp
from .samples import ID, REPEAT, Places, Recipe, SampleReader

if TYPE_CHECKING:
    from .dataset import ShardDataset
    from .epochcell import Start
    from .reading import Reading

Collate = Callable[[Sequence[Any]], Any]


class Batches(IterableDataset[Any]):
    """The batches of a :class:`~loader.dataset.ShardDataset`; states and epochs are that data set's."""

    def __init__(self, dataset: ShardDataset, collate_fn: Collate | None) -> None:
        super().__init__()
        self.dataset = dataset
        self._collate = collate_fn

    def __len__(self) -> int:
        """Batches in a whole epoch: the same for every rank."""
        return self.dataset.steps

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next pass (in a DataLoader worker: the worker's)."""
        return self._read(self.dataset.claim_pass())

    def _read(self, claim: Start) -> Iterator[Any]:
        with self.dataset.begin_pass(claim) as reading:
            whole = _batch_reader(reading, self._collate)
            for batch, stamp, places in reading.batches():
                out = whole(batch, stamp, places)
                reading.handed_out(batch, stamp.size, stamp.size)
                yield out

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`ShardDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`ShardDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`ShardDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)


def _batch_reader(reading: Reading, collate_fn: Collate | None) -> Callable[[int, Stamp, Places], Any]:
    tokens = reading.format
    recipe = reading.reader.recipe
    if isinstance(tokens, Tokens) and collate_fn is None and _gathers(tokens, recipe):
        return TokenGather(tokens, reading.reader, single=reading.single).batch
    if collate_fn is None and reads_columns(reading.format, recipe):
        return ColumnGather(reading.format, reading.reader).batch
    joined = collate_fn or collate
    return lambda batch, stamp, places: joined(reading.samples(batch, stamp, places))


def _gathers(tokens: Tokens, recipe: Recipe) -> bool:
    """Whether nothing is asked for that needs samples one by one."""
    known = {"tokens", "labels"} if tokens.labels else {"tokens"}
    return (
        recipe.transform is None
        and recipe.decode.common
        and recipe.on_error == "raise"
        and (recipe.fields is None or set(recipe.fields) <= known)
    )


class TokenGather:
    """Batches of token windows: ``tokens`` and ``labels`` of shape ``(samples, length)``."""

    def __init__(self, format: Tokens, reader: SampleReader, *, single: bool) -> None:
        recipe = reader.recipe
        self._get = reader.pool.get
        self._gather = format.gather
        self._ids = recipe.ids
        self._repeats = recipe.repeats
        self._single = single
        self._length = format.length
        self._dtype = format.delivered.newbyteorder("=")
        names = {"tokens": 0, "labels": 1} if format.labels else {"tokens": 0}
        self._parts = [(name, at) for name, at in names.items() if recipe.fields is None or name in recipe.fields]
        self._plain = format.delivered == format.stored and not format.labels
        self._window = (format.window, format.stored)
        self._allocate = allocator()

    def batch(self, number: int, stamp: Stamp, places: Places) -> Batch:
        """One batch as new tensors, in shared memory where this is a DataLoader worker."""
        rows = stamp.size
        batch = Batch()
        batch.stamp = stamp
        arrays = []
        for name, _ in self._parts:
            batch[name], array = self._allocate((rows, self._length), self._dtype)
            arrays.append(array)
        if self._single:
            self._from_one(places, arrays)
        else:
            self._from_many(places, arrays)
        if self._ids:
            batch[ID] = torch.from_numpy(places.ids)
        if self._repeats:
            batch[REPEAT] = torch.from_numpy(
                np.zeros(rows, np.bool_) if places.repeat is None else places.repeat.copy()
            )
        return batch

    def _from_one(self, places: Places, arrays: list[Any]) -> None:
        """All samples lie in one shard: one gather, then a conversion of the whole batch where one is asked for."""
        source = self._get(int(places.shard[0])).source
        if self._plain:
            for array in arrays:
                self._gather(source, places.row, array)
            return
        window, stored = self._window
        scratch = np.empty((len(places.row), window), stored)
        self._gather(source, places.row, scratch)
        for (_, at), array in zip(self._parts, arrays, strict=True):
            np.copyto(array, scratch[:, at : at + self._length])

    def _from_many(self, places: Places, arrays: list[Any]) -> None:
        get, length = self._get, self._length
        parts = [(array, at, at + length) for (_, at), array in zip(self._parts, arrays, strict=True)]
        for row, (number, i) in enumerate(zip(places.shard.tolist(), places.row.tolist(), strict=True)):
            window = get(number).source[i]
            for array, first, last in parts:
                array[row] = window[first:last]
