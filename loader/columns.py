"""Batches of columnar formats: each field is read for many samples at once, shard by shard.

What comes out is what ``collate`` makes of the same samples, without a Python object for each of them. The samples may
be those of several batches (:mod:`loader.columnruns`): reading costs by the call, so the more rows one is for the
better.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from cachefs.errors import DataError, MissingField

from .collation import Allocator, allocates_privately, allocator, collate_values, stackable
from .decoders import to_tensor
from .formats import Format
from .formats.pending import Pending
from .formats.table import Table
from .grouping import grouped
from .permute import Int64s
from .sample import Batch, Stamp
from .samples import ID, REPEAT, Places, Recipe, SampleReader
from .transfer import tensor_bytes

if TYPE_CHECKING:
    from .opening import OpenShard

Column: TypeAlias = "torch.Tensor | list[Any] | npt.NDArray[Any]"
"""One field of many samples, in order: one tensor, or a list or array of objects that are not collated yet."""
Parts: TypeAlias = list[tuple[int, Int64s]]


class Gathered(NamedTuple):
    """The fields of some samples, and about the bytes that they take."""

    columns: dict[str, Column]
    nbytes: int


def reads_columns(format: Format, recipe: Recipe) -> bool:
    """Whether nothing is asked for that needs samples one by one."""
    return format.columnar and recipe.transform is None and recipe.on_error == "raise"


def has_repeats(places: Places) -> bool:
    """Whether some of the samples were there before: in what has been written into since, so they are copied."""
    return places.repeat is not None and bool(places.repeat.any())


class ColumnGather:
    """Reads with ``format.columns``. Any number of threads may call it, if the reader's pool is one for them.

    ``turns``: taken by whoever makes Python objects of many rows, for threads that did so side by side would only take
    the interpreter's lock from each other.
    """

    def __init__(self, format: Format, reader: SampleReader, turns: AbstractContextManager[Any] | None = None) -> None:
        self._pool = reader.pool
        self._recipe = reader.recipe
        self._tensors: set[str] = set()  # fields whose values become tensors, as far as they have been seen
        self._turns = turns if turns is not None and isinstance(format, Table) else nullcontext()

    def batch(self, number: int, stamp: Stamp, places: Places) -> Batch:
        """One batch without repeats; its tensors are new memory."""
        parts, order = _by_shard(places)
        read = [self._columns(self._pool.get(shard), rows) for shard, rows in parts]
        allocate = None if allocates_privately() else allocator()
        batch = Batch({name: whole(column) for name, column in self._joined(places, read, order, allocate).items()})
        batch.stamp = stamp
        return batch

    def gather(self, places: Places, allocate: Allocator | None, most: int) -> Gathered | int:
        """The samples at ``places``, none a repeat; where they take more than ``most`` bytes, about how many that is.

        Tensors are made by ``allocate``; without one they are memory that is private to this process, though maybe a
        shard's map. Raises what reading raises.
        """
        parts, order = _by_shard(places)
        ready = parts[: self._pool.capacity]  # more would close the first ones
        weights = [self._weight(shard, rows) for shard, rows in ready]
        with self._turns:
            read: list[dict[str, Any]] = []
            for at, (number, rows) in enumerate(parts):
                if at >= len(ready):
                    weights.append(self._weight(number, rows))
                if sum(weights) > most:
                    counted = sum(len(rows) for _, rows in parts[: len(weights)])
                    return sum(weights) * len(places.row) // counted
                read.append(self._columns(self._pool.get(number), rows))
            columns = self._joined(places, read, order, allocate)
        return Gathered(columns, sum(weights) or sum(map(_size, columns.values())))

    def _weight(self, number: int, rows: Int64s) -> int:
        """About what these rows will take, where a row of the shard may take anything."""
        shard = self._pool.get(number)
        if not isinstance(shard.format, Table):
            return 0
        with shard.guard or nullcontext():
            return len(rows) * int(shard.source.row_bytes(rows, self._recipe.wanted, shard.url))

    def _joined(
        self, places: Places, parts: list[dict[str, Any]], order: Int64s | None, allocate: Allocator | None
    ) -> dict[str, Column]:
        names = parts[0].keys()
        for other in parts[1:]:
            if other.keys() != names:
                differ = ", ".join(sorted(names ^ other.keys()))
                raise DataError(
                    f"shards differ in the field(s) {differ}", hint="choose fields=[...] that every shard has"
                )
        out = {
            name: _joined([part[name] for part in parts], order, allocate, tensors=name in self._tensors)
            for name in names
        }
        if self._recipe.ids:
            out[ID] = torch.from_numpy(places.ids)
        if self._recipe.repeats:
            out[REPEAT] = torch.zeros(len(places.row), dtype=torch.bool)
        return out

    def _columns(self, shard: OpenShard, rows: Int64s) -> dict[str, Any]:
        recipe = self._recipe
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
                if decoder is to_tensor:
                    self._tensors.add(name)
                elif decoder is not None:
                    numbers = rows.tolist()
                    found[name] = [
                        decode.value(decoder, value, name, shard, i) for i, value in zip(numbers, values, strict=True)
                    ]
        return found


def whole(column: Column) -> Any:
    """A column of one batch, collated."""
    if isinstance(column, torch.Tensor):
        return column
    return collate_values(column if isinstance(column, list) else column.tolist())


def cut(column: Column, sizes: Sequence[int]) -> Sequence[Any]:
    """A column of several batches as one collated value for each. Tensors are views of the column."""
    if isinstance(column, torch.Tensor):
        return torch.split_with_sizes(column, sizes)
    values = column if isinstance(column, list) else column.tolist()
    out = []
    start = 0
    for size in sizes:
        part = values[start : start + size]
        out.append(part if type(part[0]) is str else collate_values(part))
        start += size
    return out


def _by_shard(places: Places) -> tuple[Parts, Int64s | None]:
    """The rows wanted of each shard, and where in the joined parts each sample lies (``None``: in order)."""
    shards, rows = places.shard, places.row
    first = int(shards[0])
    if (shards == first).all():
        return [(first, rows)], None
    order, groups = found = grouped(shards)
    ascending = bool((shards[1:] >= shards[:-1]).all())
    if not ascending:
        rows = rows[order]
    return [(shard, rows[start:end]) for shard, start, end in groups], None if ascending else found.back


def _joined(parts: list[Any], order: Int64s | None, allocate: Allocator | None, *, tensors: bool) -> Column:
    """A column's parts behind each other, or in another order. ``tensors``: its values become tensors, one by one
    where they are not all of a kind."""
    if all(isinstance(part, Pending) for part in parts):
        first = parts[0]
        tensor, array = _new((sum(map(len, parts)), *first.shape[1:]), first.dtype, allocate)
        first.fill(array, parts, order)
        return tensor
    if all(isinstance(part, np.ndarray) for part in parts) and len({(p.dtype, p.shape[1:]) for p in parts}) == 1:
        if stackable(parts[0].dtype):
            return _tensor(parts, order, allocate)
        if parts[0].dtype == object and parts[0].ndim == 1:
            objects = parts[0] if len(parts) == 1 else np.concatenate(parts)
            return objects if order is None else objects.take(order)
    values = [value for part in parts for value in part]
    if tensors:
        values = list(map(to_tensor, values))
    return values if order is None else [values[at] for at in order.tolist()]


def _tensor(parts: list[Any], order: Int64s | None, allocate: Allocator | None) -> torch.Tensor:
    first = parts[0]
    if len(parts) == 1 and order is None:
        flags = first.flags
        if allocate is None and flags.writeable and flags.aligned and flags.c_contiguous and first.dtype.isnative:
            return torch.from_numpy(first)
    shape, dtype = (sum(map(len, parts)), *first.shape[1:]), first.dtype.newbyteorder("=")
    tensor, array = _new(shape, dtype, allocate)
    if order is not None:
        np.concatenate(parts).take(order, axis=0, out=array, mode="wrap")
    elif len(parts) == 1:
        array[...] = first
    else:
        np.concatenate(parts, out=array)
    return tensor


def _new(
    shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Allocator | None
) -> tuple[torch.Tensor, npt.NDArray[Any]]:
    if allocate is not None:
        return allocate(shape, dtype)
    array = np.empty(shape, dtype)
    return torch.from_numpy(array), array


def _size(column: Column) -> int:
    return column.nbytes if isinstance(column, np.ndarray) else tensor_bytes(column)
