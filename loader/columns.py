"""Batches of columnar formats: each field of a batch is read for all its samples at once, shard by shard.

What comes out is what ``collate`` makes of the same samples, without a Python object for each of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cachefs.errors import DataError, MissingField

from .collation import allocates_privately, allocator, collate_values, stackable
from .decoders import to_tensor
from .formats import Format
from .permute import Int64s
from .sample import Batch, Stamp
from .samples import ID, REPEAT, Places, Recipe, SampleReader


def reads_columns(format: Format, recipe: Recipe) -> bool:
    """Whether nothing is asked for that needs samples one by one."""
    return format.columnar and recipe.transform is None and recipe.on_error == "raise"


class ColumnGather:
    """Batches read with ``format.columns``."""

    def __init__(self, format: Format, reader: SampleReader) -> None:
        self._format = format
        self._pool = reader.pool
        self._recipe = reader.recipe

    def batch(self, number: int, stamp: Stamp, places: Places) -> Batch:
        """One batch; its tensors are new memory."""
        parts, order = _by_shard(places)
        columns = [self._columns(shard, rows) for shard, rows in parts]
        names = columns[0].keys()
        for other in columns[1:]:
            if other.keys() != names:
                differ = ", ".join(sorted(names ^ other.keys()))
                raise DataError(
                    f"shards differ in the field(s) {differ}", hint="choose fields=[...] that every shard has"
                )
        batch = Batch()
        batch.stamp = stamp
        for name in names:
            batch[name] = _joined([part[name] for part in columns], order)
        if self._recipe.ids:
            batch[ID] = torch.from_numpy(places.ids)
        if self._recipe.repeats:
            repeat = np.zeros(len(places.row), np.bool_) if places.repeat is None else places.repeat.copy()
            batch[REPEAT] = torch.from_numpy(repeat)
        return batch

    def _columns(self, number: int, rows: Int64s) -> dict[str, Any]:
        recipe = self._recipe
        shard = self._pool.get(number)
        found = shard.columns(rows, recipe.wanted)
        absent = [name for name in recipe.fields or () if name not in found]
        if absent:
            present = ", ".join(sorted(shard.read(int(rows[0]))))
            raise MissingField(
                f"sample {rows[0]} has no field {absent[0]!r}", url=shard.url, hint=f"fields present: {present}"
            )
        decode = recipe.decode
        if not decode.idle:
            for name, values in found.items():
                decoder = decode.decoder(name, shard)
                if decoder is not None and decoder is not to_tensor:  # what is an array becomes a tensor anyway
                    numbers = rows.tolist()
                    found[name] = [
                        decode.value(decoder, value, name, shard, i) for i, value in zip(numbers, values, strict=True)
                    ]
        return found


def _by_shard(places: Places) -> tuple[list[tuple[int, Int64s]], Int64s | None]:
    """The rows wanted of each shard, and where in the joined parts each sample lies (``None``: in order)."""
    first = int(places.shard[0])
    if (places.shard == first).all():
        return [(first, places.row)], None
    by_shard = np.argsort(places.shard, kind="stable")
    shards = places.shard[by_shard]
    starts = np.flatnonzero(np.diff(shards, prepend=shards[0] - 1))
    rows = np.split(places.row[by_shard], starts[1:])
    order = np.empty_like(by_shard)
    order[by_shard] = np.arange(len(by_shard))
    return [(int(shards[at]), part) for at, part in zip(starts.tolist(), rows, strict=True)], order


def _joined(parts: list[Any], order: Int64s | None) -> Any:
    if order is None:  # then there is one part
        return _whole(parts[0])
    if all(isinstance(part, np.ndarray) for part in parts) and len({(p.dtype, p.shape[1:]) for p in parts}) == 1:
        return _tensor(parts, order)
    values = [value for part in parts for value in part]
    return collate_values([values[at] for at in order.tolist()])


def _whole(part: Any) -> Any:
    """One shard's values: an array becomes a tensor over the same memory where this process keeps it."""
    if not isinstance(part, np.ndarray):
        return collate_values(part)
    flags = part.flags
    if allocates_privately() and flags.writeable and flags.aligned and flags.c_contiguous and part.dtype.isnative:
        return torch.from_numpy(part) if stackable(part.dtype) else collate_values(list(part))
    return _tensor([part], None)


def _tensor(parts: list[Any], order: Int64s | None) -> Any:
    first = parts[0]
    if not stackable(first.dtype):
        values = [value for part in parts for value in part]
        return collate_values(values if order is None else [values[at] for at in order.tolist()])
    size = sum(len(part) for part in parts)
    tensor, array = allocator()((size, *first.shape[1:]), first.dtype.newbyteorder("="))
    if order is None:
        array[...] = first
    else:
        np.concatenate(parts).take(order, axis=0, out=array, mode="wrap")
    return tensor
