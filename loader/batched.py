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

from .collation import collate, empty
from .formats import Tokens
from .sample import Batch, Stamp
from .samples import ID, REPEAT, Places, Recipe, SampleReader

if TYPE_CHECKING:
    from .dataset import ShardDataset
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
        with self.dataset.begin_pass() as reading:
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
        return TokenGather(tokens, reading.reader).batch
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

    def __init__(self, format: Tokens, reader: SampleReader) -> None:
        self._format = format
        self._reader = reader
        self._scratch = np.empty((0, format.window), format.stored)

    def batch(self, number: int, stamp: Stamp, places: Places) -> Batch:
        """One batch as new tensors, in shared memory where this is a DataLoader worker."""
        format, recipe = self._format, self._reader.recipe
        rows = len(places.shard)
        batch = Batch()
        if format.labels or format.delivered != format.stored:
            if len(self._scratch) < rows:
                self._scratch = np.empty((rows, format.window), format.stored)
            self._gather(places, self._scratch[:rows])
            for name, first in (("tokens", 0), ("labels", 1)):
                if (name == "tokens" or format.labels) and (recipe.fields is None or name in recipe.fields):
                    batch[name] = out = empty((rows, format.length), _torch_dtype(format.delivered))
                    np.copyto(out.numpy(), self._scratch[:rows, first : first + format.length])
        elif recipe.fields is None or "tokens" in recipe.fields:
            batch["tokens"] = out = empty((rows, format.length), _torch_dtype(format.delivered))
            self._gather(places, out.numpy())
        if recipe.ids:
            batch[ID] = torch.from_numpy(places.ids)
        if recipe.repeats:
            repeat = places.repeat if places.repeat is not None else np.zeros(rows, np.bool_)
            batch[REPEAT] = torch.from_numpy(np.ascontiguousarray(repeat))
        batch.stamp = stamp
        return batch

    def _gather(self, places: Places, out: Any) -> None:
        format, pool = self._format, self._reader.pool
        for number, group in places.by_shard():
            source = pool.get(number).source
            if len(group) == len(out):
                format.gather(source, places.index, out)
            elif len(group) == 1:
                out[group[0]] = source[places.index[group[0]]]
            else:
                out[group] = source[places.index[group]]


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
