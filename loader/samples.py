"""From positions in the order to finished samples: locate, read, project, decode, number, transform.

One :class:`SampleReader` serves one pass in one process. Work that a batch can share is done once for it: positions are
located together, for several batches at once (``loader.passes``).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import DataError, MissingField

from .buffers import ShardPool
from .decode import Decode
from .opening import OpenShard
from .permute import derive, seed_key
from .sample import Sample

Int64s: TypeAlias = npt.NDArray[np.int64]
Transform: TypeAlias = Callable[[Any, np.random.Generator], Any]

ID = "__id__"
REPEAT = "__repeat__"
_ALWAYS = "__key__"
_TRANSFORM = 0x7472616E73666F72


@dataclass(frozen=True)
class Recipe:
    """What is done to each sample once it is read. ``fields`` are in the format's own spelling."""

    decode: Decode
    fields: tuple[str, ...] | None = None
    transform: Transform | None = None
    ids: bool = False
    repeats: bool = False
    on_error: Literal["raise", "skip"] = "raise"
    wanted: frozenset[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.fields is not None:
            object.__setattr__(self, "wanted", frozenset((*self.fields, _ALWAYS)))


class Origin(NamedTuple):
    """Of a mixture's samples: which source each is from, which of its epochs, and the how-manieth of it in the run."""

    source: Int64s
    epoch: Int64s
    number: Int64s


class Places(NamedTuple):
    """Where some samples lie, in the order wanted: shard, number in it; ``repeat`` marks those added as padding."""

    shard: Int64s
    row: Int64s
    repeat: npt.NDArray[np.bool_] | None = None
    origin: Origin | None = None

    @property
    def ids(self) -> Int64s:
        """The samples' ids: shard number << 32 | number in the shard."""
        return self.shard << 32 | self.row

    def part(self, first: int, last: int) -> Places:
        """Those from number ``first`` to before ``last``."""
        return self.taken(slice(first, last))

    def taken(self, which: slice | Int64s) -> Places:
        """Those with these numbers."""
        repeat = None if self.repeat is None else self.repeat[which]
        origin = None if self.origin is None else Origin(*(column[which] for column in self.origin))
        return Places(self.shard[which], self.row[which], repeat, origin)


class SampleReader:
    """Reads samples of one pass. ``seed`` and ``epoch`` key the transform's random numbers."""

    def __init__(self, pool: ShardPool, recipe: Recipe, *, seed: int, epoch: int) -> None:
        self.pool = pool
        self.recipe = recipe
        self._seed = seed
        self._key = derive(seed_key(seed), epoch, _TRANSFORM)
        self._untouched = pool.again()  # what repeats are copied from
        self._plain = recipe.transform is None and not recipe.ids and not recipe.repeats

    @property
    def recipes(self) -> list[Recipe]:
        """What is done to samples, of one kind each."""
        return [self.recipe]

    def read(self, places: Places) -> list[Any]:
        """The finished samples, in order.

        A sample that is damaged or lacks a wanted field raises ``DataError``; with ``on_error="skip"`` its place in
        the list holds the error instead.
        """
        repeats = itertools.repeat(False) if places.repeat is None else places.repeat.tolist()
        return self._read(places, repeats)

    def read_untouched(self, places: Places) -> list[Any]:
        """The same as copies of what is stored, whatever has been written into samples that were handed out."""
        return self._read(places, itertools.repeat(True))

    def _read(self, places: Places, copied: Iterable[bool]) -> list[Any]:
        recipe, get = self.recipe, self.pool.get
        wanted = recipe.wanted
        decode = None if recipe.decode.idle else recipe.decode
        out: list[Any] = []
        for number, i, copy_it in zip(places.shard.tolist(), places.row.tolist(), copied, strict=False):
            try:
                shard = self._pristine(number) if copy_it else get(number)
                sample = shard.read(i, wanted)
                if copy_it:
                    sample = copy.deepcopy(sample)
                if wanted is not None:
                    self._check(sample, shard, i)
                if decode is not None:
                    decode(sample, shard, i)
                out.append(sample)
            except DataError as e:
                if recipe.on_error == "raise":
                    raise
                out.append(e)
        if not self._plain:
            self._finish(out, places)
        return out

    def in_epoch(self, epoch: int) -> SampleReader:
        """This reader, through the same open shards, in another epoch. Only one of them is to be closed."""
        other = copy.copy(self)
        other._key = derive(seed_key(self._seed), epoch, _TRANSFORM)
        return other

    def _pristine(self, number: int) -> OpenShard:
        """A shard whose views are never handed out, so nobody has written into them."""
        return self._untouched.get(number)

    def close(self) -> None:
        """Close all open shards. Idempotent; samples already handed out stay valid."""
        self.pool.close()
        self._untouched.close()

    def _check(self, sample: Sample, shard: OpenShard, i: int) -> None:
        there = sample.keys()
        absent = [name for name in self.recipe.fields or () if name not in there]
        if absent:
            present = shard.read(i)
            raise MissingField(
                f"sample {i} has no field {absent[0]!r}",
                url=shard.url,
                hint=f"fields present: {', '.join(sorted(present)) or 'none'}",
            )

    def _finish(self, out: list[Any], places: Places) -> None:
        recipe = self.recipe
        ids = places.ids.tolist()
        repeat = [False] * len(out) if places.repeat is None else places.repeat.tolist()
        for at, sample in enumerate(out):
            if isinstance(sample, DataError):
                continue
            if recipe.ids:
                sample[ID] = ids[at]
            if recipe.repeats:
                sample[REPEAT] = repeat[at]
            if recipe.transform is not None:
                out[at] = self._transformed(recipe.transform, sample, ids[at])

    def _transformed(self, transform: Transform, sample: Sample, number: int) -> Any:
        try:
            result = transform(sample, self._generator(number))
        except BaseException as e:
            shard, i = number >> 32, number & 0xFFFFFFFF
            where = f"in the transform of sample {i} of shard {shard}: {self.pool.url(shard)}"
            if isinstance(e, StopIteration):  # which would end the epoch of whoever iterates, without a word
                raise RuntimeError(f"StopIteration {where}") from e
            e.add_note(where)
            raise
        return Sample(result) if type(result) is dict else result

    def _generator(self, number: int) -> np.random.Generator:
        """Random numbers for one sample: the same on every machine, whoever reads it and in whatever order."""
        key = np.array([derive(self._key, number, half) for half in (0, 1)], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key))


def with_stand_ins(samples: list[Any], neighbours: Callable[[], Iterable[list[Any]]]) -> list[Any]:
    """``samples`` with a copy of a good one in place of each ``DataError``, so that damage never shifts the order.

    That is the last good sample before it, else the next one behind it; where all are bad, the first good one that
    ``neighbours`` gives. It depends on nothing but the samples, so a resumed run stands in the same ones. Raises
    ``DataError`` if there is none far and wide.
    """
    good = [isinstance(sample, DataError) for sample in samples].count(False)
    if good == len(samples):
        return samples
    last: Any = None
    if good == 0:
        around = (sample for part in neighbours() for sample in part if not isinstance(sample, DataError))
        last = next(around, None)
        if last is None:
            raise DataError(f"no readable sample near a damaged one: {samples[0]}") from samples[0]
    else:
        last = next(sample for sample in samples if not isinstance(sample, DataError))
    out = []
    for sample in samples:
        if isinstance(sample, DataError):
            out.append(copy.deepcopy(last))
        else:
            out.append(sample)
            last = sample
    return out
