"""Samples that are rows of their batch: token windows, gathered for a whole batch in one call.

A sample's array is a view into the batch's tensor, so :func:`loader.collate` need not put the batch together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .batched import TokenGather, token_gather
from .sample import Rows, Sample, Stamp
from .samples import Places

if TYPE_CHECKING:
    from .reading import Reading


def sample_lists(reading: Reading) -> Callable[[int, Stamp, Places], list[Any]]:
    """What makes the samples of one batch of a pass, from its number, stamp and places."""
    recipes = reading.reader.recipes
    if not all(recipe.decode.keeps_arrays and not recipe.ids and not recipe.repeats for recipe in recipes):
        return reading.samples
    gather = token_gather(reading, None)
    return reading.samples if gather is None else _RowSamples(gather)


class _RowSamples:
    def __init__(self, gather: TokenGather) -> None:
        self._gather = gather

    def __call__(self, number: int, stamp: Stamp, places: Places) -> list[Any]:
        batch = self._gather.batch(number, stamp, places)
        columns = {name: list(tensor.numpy()) for name, tensor in batch.items()}
        samples = []
        if len(columns) == 1:
            [(name, rows)] = columns.items()
            for row in rows:
                sample = Sample()
                sample[name] = row
                sample.stamp = stamp
                samples.append(sample)
        else:
            for parts in zip(*columns.values(), strict=True):
                sample = Sample(zip(columns, parts, strict=True))
                sample.stamp = stamp
                samples.append(sample)
        samples[0].rows = {name: Rows(batch[name], column) for name, column in columns.items()}
        return samples
