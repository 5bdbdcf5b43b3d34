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

from .collation import Allocator, allocates_privately, allocator, collate
from .columnruns import ColumnRuns, Memory, reads_runs
from .columns import ColumnGather, has_repeats, reads_columns
from .dealing import check_whole
from .formats import Format, Tokens
from .gathered import GatheredRun
from .groups import Many
from .members import MemberGather, reads_members
from .mixturereader import SOURCE, MixtureReader
from .mixturerows import JointPool
from .permute import Int64s
from .sample import Batch, Stamp
from .samples import ID, REPEAT, Places, Recipe, SampleReader

if TYPE_CHECKING:
    from .buffers import ShardPool
    from .epochcell import Start
    from .planned import PlannedDataset
    from .reading import Reading
    from .rowgather import WindowRows
    from .teams import Team

Collate = Callable[[Sequence[Any]], Any]

RUN_BYTES = 4 << 20
"""Bytes of token windows that are gathered in one call: enough that what comes with a call does not count, and as much
as numpy asks for in large pages."""


class Batches(IterableDataset[Any]):
    """The batches of a data set (:mod:`loader.planned`); states and epochs are that data set's."""

    def __init__(self, dataset: PlannedDataset, collate_fn: Collate | None) -> None:
        super().__init__()
        self.dataset = dataset
        self.collate_fn = collate_fn

    @property
    def team(self) -> Team:
        """The data set's (:mod:`loader.teams`)."""
        return self.dataset.team

    def __len__(self) -> int:
        """Batches in a whole epoch: the same for every rank."""
        return self.dataset.steps

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next pass (in a DataLoader worker: the worker's)."""
        return self._read(self.dataset.claim_pass())

    def _read(self, claim: Start | None) -> Iterator[Any]:
        check_whole()
        with self.dataset.begin_pass(claim) as reading:
            for many in _made(reading, self.collate_fn):
                for out, (batch, size) in many:
                    reading.handed_out(batch, size, size)
                    yield out
                del many
            reading.finished()

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`ShardDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`ShardDataset.state_dict`."""
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As :meth:`ShardDataset.load_state_dict`."""
        self.dataset.load_state_dict(state)


def _made(reading: Reading, collate_fn: Collate | None) -> Iterator[Many]:
    """The batches of a pass, some at a time, made by whoever iterates."""
    gather = token_gather(reading, collate_fn) if allocates_privately() else None
    if gather is not None:
        for tokens in reading.runs(max(1, RUN_BYTES // max(gather.sample_bytes, 1))):
            yield GatheredRun(gather.gather(tokens.places, allocator()), tokens)
        return
    whole = batch_reader(reading, collate_fn)
    if collate_fn is None and reads_runs(reading):
        memory = Memory() if allocates_privately() else Memory(each=allocator())
        runs = ColumnRuns(reading, whole, memory)
        yield from map(runs, runs.planned())
        return
    yield ((whole(batch, stamp, places), (batch, stamp.size)) for batch, stamp, places in reading.batches())


def batch_reader(reading: Reading, collate_fn: Collate | None) -> Callable[[int, Stamp, Places], Any]:
    """What makes one batch of a pass, from its number, stamp and places."""
    gather = token_gather(reading, collate_fn)
    if gather is not None:
        return gather.batch
    reader, format = reading.reader, reading.format
    if not isinstance(reader, MixtureReader) and format is not None:
        return _of_one_format(reading, format, reader, collate_fn)
    joined = collate_fn or collate
    return lambda batch, stamp, places: joined(reading.samples(batch, stamp, places))


def _of_one_format(
    reading: Reading, format: Format, reader: SampleReader, collate_fn: Collate | None
) -> Callable[[int, Stamp, Places], Any]:
    joined = collate_fn or collate

    def one_by_one(batch: int, stamp: Stamp, places: Places) -> Any:
        return joined(reading.samples(batch, stamp, places))

    if collate_fn is None and reads_columns(format, reader.recipe):
        columns = ColumnGather(format, reader)

        def by_columns(batch: int, stamp: Stamp, places: Places) -> Any:
            return (one_by_one if has_repeats(places) else columns.batch)(batch, stamp, places)

        return by_columns

    if collate_fn is not None or not reads_members(format, reader.recipe):
        return one_by_one
    members = MemberGather(reader)

    def by_fields(batch: int, stamp: Stamp, places: Places) -> Any:
        found = members.batch(stamp, places)
        return one_by_one(batch, stamp, places) if found is None else found

    return by_fields


def token_gather(reading: Reading, collate_fn: Collate | None) -> TokenGather | None:
    """The short way for token windows, where nothing is asked for that needs samples one by one."""
    if collate_fn is not None:
        return None
    reader, format = reading.reader, reading.format
    if not isinstance(format, Tokens) or not all(_gathers(format, recipe) for recipe in reader.recipes):
        return None
    pool = reader.pool if isinstance(reader, SampleReader) else reader.joint_pool()
    numbers = reader.numbers if isinstance(reader, MixtureReader) and reader.ids else None
    return TokenGather(format, reader.recipes[0], reading.windows(format, pool.capacity), pool, numbers)


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
    """Batches of token windows: ``tokens`` and ``labels`` of shape ``(samples, length)``.

    ``sources``: numbers of a mixture's sources, which the batches have then.
    """

    def __init__(
        self,
        format: Tokens,
        recipe: Recipe,
        rows: WindowRows,
        pool: ShardPool | JointPool,
        sources: Int64s | None = None,
    ) -> None:
        self._rows = rows
        self._pool = pool
        self._ids = recipe.ids
        self._sources = sources
        self._repeats = recipe.repeats
        self._length = format.length
        self._dtype = format.delivered.newbyteorder("=")
        names = {"tokens": 0, "labels": 1} if format.labels else {"tokens": 0}
        self._parts = [(name, at) for name, at in names.items() if recipe.fields is None or name in recipe.fields]
        self._allocate = allocator()

    def batch(self, number: int, stamp: Stamp, places: Places) -> Batch:
        """One batch as new tensors, in shared memory where this is a DataLoader worker."""
        batch = self.gather(places, self._allocate)
        batch.stamp = stamp
        return batch

    def gather(self, places: Places, allocate: Allocator) -> Batch:
        """The samples at ``places`` as one batch without a stamp, its tensors made by ``allocate``."""
        rows = len(places.row)
        batch = Batch()
        arrays = []
        for name, at in self._parts:
            batch[name], array = allocate((rows, self._length), self._dtype)
            arrays.append((array, at))
        joint = self._pool.places(places) if isinstance(self._pool, JointPool) else places
        self._rows.gather(joint, arrays, self._pool)
        if self._ids:
            batch[ID] = torch.from_numpy(places.ids)
        if self._sources is not None and places.origin is not None:
            batch[SOURCE] = torch.from_numpy(self._sources[places.origin.source])
        if self._repeats:
            batch[REPEAT] = torch.from_numpy(
                np.zeros(rows, np.bool_) if places.repeat is None else places.repeat.copy()
            )
        return batch

    @property
    def sample_bytes(self) -> int:
        """What one sample takes in a batch."""
        return len(self._parts) * self._length * self._dtype.itemsize
