"""One pass over a data set: the batches that one worker of one rank takes, in order, and where each of them ends.

A pass reads the positions from its start to the epoch's end, cut into global batches from the start on; worker w of n
takes batches w, w + n, ... DataLoader asks its workers in turn, so the order is the same for every number of workers,
also in a pass that was resumed.

A pass that begins within a batch (a state saved between two samples, one rank only) is cut anew from there but ends
where the uninterrupted pass ends (``stop``), with a short last batch: no sample is lost, none is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import numpy as np

from .batches import Positions, rank_positions, steps
from .order import EpochOrder
from .permute import Int64s
from .sample import Stamp
from .samples import Places
from .workers import Place, Worker

if TYPE_CHECKING:
    from cachefs.client import Client

    from .manifest import Manifest

_LOCATE = 8192
_LOCATE_FIRST = 1024
"""Positions that are located in one call: few at first, so that the first batch is there soon, and never so many that
the arrays worked with leave the processor's cache."""
ALL: Final = 2**62
"""Behind every position."""


class Order(Positions, Protocol):
    """The sequence of one epoch, as a plan needs it: :class:`loader.order.EpochOrder`, or that of a mixture."""

    @property
    def complete(self) -> bool:
        """Whether all positions are settled."""

    @property
    def floor(self) -> int:
        """The first position that can be asked for."""

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The samples there: (shard, index in the shard)."""


OrderT = TypeVar("OrderT", bound=Order)
OrderT_co = TypeVar("OrderT_co", bound=Order, covariant=True)


class Reach(Protocol[OrderT_co]):
    """The order of a pass's epoch as far as it is known, with the positions from ``first`` to before ``upto``, as far
    as the epoch has them: waits until the sample counts for that are known."""

    def __call__(self, *, first: int, upto: int) -> OrderT_co: ...


@dataclass(frozen=True)
class BatchRule:
    """How an epoch is cut into batches, for one rank. ``run``: which run of each it takes, by default the one of its
    number."""

    global_batch: int
    place: Place
    drop_last: bool
    pad: bool
    run: int = -1

    def __post_init__(self) -> None:
        if self.run < 0:
            object.__setattr__(self, "run", self.place.rank)

    @property
    def share(self) -> int:
        """How many samples of a whole batch are this rank's."""
        world, size = self.place.world, self.global_batch
        return (self.run + 1) * size // world - self.run * size // world


@dataclass(frozen=True)
class Run:
    """Some batches of one rank, and where their samples lie, batch after batch."""

    batches: range
    stamps: list[Stamp]
    places: Places

    def cut(self, each: Callable[[], int]) -> Iterator[Run]:
        """In pieces of whole batches, each of as many as ``each`` says when it begins, at least one."""
        start = at = 0
        while start < len(self.batches):
            end = start + max(each(), 1)
            if start == 0 and end >= len(self.batches):
                yield self
                return
            stamps = self.stamps[start:end]
            size = sum([stamp.size for stamp in stamps])
            yield Run(self.batches[start:end], stamps, self.places.part(at, at + size))
            start, at = end, at + size

    def split(self) -> Iterator[tuple[int, Stamp, Places]]:
        """The batches one by one."""
        at = 0
        for batch, stamp in zip(self.batches, self.stamps, strict=True):
            yield batch, stamp, self.places.part(at, at + stamp.size)
            at += stamp.size


@dataclass(frozen=True)
class PassPlan(Generic[OrderT]):
    """Which positions of ``order`` a rank reads, batch by batch, from ``position`` on.

    ``reach`` gives more of an order that lacks sample counts; with a complete order all is pure.
    """

    order: OrderT
    rule: BatchRule
    position: int = 0
    stop: int | None = None
    reach: Reach[OrderT] | None = None

    @property
    def latest(self) -> OrderT:
        """The order as far as it has been asked for."""
        latest: OrderT = self.__dict__.get("_latest", self.order)
        return latest

    def reaching(self, upto: int) -> OrderT:
        """The order with all positions before ``upto``, or complete."""
        order = self.latest
        if not order.complete and order.settled < upto and self.reach is not None:
            order = self.reach(first=self.position, upto=upto)
            self.__dict__["_latest"] = order
        return order

    @property
    def _cut_short(self) -> bool:
        return self.stop is not None and self.rule.place.world == 1

    @cached_property
    def batches(self) -> int:
        """Global batches in the pass. Raises what :func:`loader.batches.steps` raises."""
        rule = self.rule
        if self._cut_short:
            return -(-(self.end - self.position) // rule.global_batch)
        return steps(
            self.reaching(ALL).total,
            rule.global_batch,
            world=rule.place.world,
            drop_last=rule.drop_last,
            pad=rule.pad,
            start=self.position,
        ).batches

    @cached_property
    def end(self) -> int:
        """The position behind the last one that is read; beyond ``order.total`` by the repeats of ``pad``."""
        if self.stop is not None and self._cut_short:
            return self.stop
        behind = self.position + self.batches * self.rule.global_batch
        return behind if self.rule.pad else min(behind, self.reaching(ALL).total)

    def _behind(self, batch: int) -> int:
        return self.position + (batch + 1) * self.rule.global_batch

    def _is_whole(self, batch: int) -> bool:
        """Whether a batch is surely a whole one, by what is known."""
        return self._behind(batch) <= self.latest.settled and not (self._cut_short and self._behind(batch) > self.end)

    def has(self, batch: int) -> bool:
        """Whether the pass has such a batch; waits for no more counts than that takes."""
        self.reaching(self._behind(batch))
        return self._is_whole(batch) or batch < self.batches

    def is_over(self, batch: int) -> bool:
        """Whether the pass surely has no such batch, by what is known: waits for nothing."""
        order = self.latest if self.reach is None else self.reach(first=self.position, upto=0)
        return order.complete and not self.has(batch)

    def positions(self, batch: int) -> Int64s:
        """This rank's positions in global batch ``batch`` of the pass; ``>= order.total`` are repeats.

        Negative numbers are the batches before the pass's start, as far as the epoch has them (:attr:`earlier`).
        """
        rule = self.rule
        first = self.position + batch * rule.global_batch
        if self._cut_short:
            return np.arange(first, min(first + rule.global_batch, self.end), dtype=np.int64)
        return rank_positions(
            self.reaching(first + rule.global_batch),
            0,
            global_batch=rule.global_batch,
            rank=rule.run,
            world=rule.place.world,
            start=first,
            pad=rule.pad,
        )

    @property
    def earlier(self) -> int:
        """How many whole batches of the epoch lie before the pass's start."""
        return self.position // self.rule.global_batch

    def places(self, positions: Int64s) -> Places:
        """Where the samples at these positions lie."""
        if not positions.size:
            return Places(positions, positions)
        order = self.reaching(int(positions.max()) + 1)
        repeat = positions >= order.settled
        if repeat.any():
            return self._located(order, positions % order.total)._replace(repeat=repeat)
        return self._located(order, positions)

    def _located(self, order: OrderT, positions: Int64s) -> Places:
        early = positions < order.floor
        if self.reach is None or not early.any():
            return Places(*order.locate(positions))
        shard, row = np.empty_like(positions), np.empty_like(positions)
        # before what a state left off at: that takes the counts from the epoch's beginning on
        whole = self.reach(first=0, upto=int(positions[early].max()) + 1)
        for part, of in ((early, whole), (~early, order)):
            shard[part], row[part] = of.locate(positions[part])
        return Places(shard, row)

    def stamp(self, batch: int, size: int) -> Stamp:
        end, repeats = self._behind(batch), 0
        if not self._is_whole(batch):
            end = min(end, self.end)
            repeats = max(0, end - self.reaching(end).settled)
        return Stamp(self.order.epoch, end, size, self.stop if self._cut_short else None, repeats)

    def share(self, worker: Worker, first: int = 0) -> Iterator[tuple[int, Stamp, Places]]:
        """``(batch, stamp, places)`` of each batch that this worker reads, those before ``first`` left out."""
        for run in self.runs(worker, first):
            yield from run.split()

    def runs(self, worker: Worker, first: int = 0, most: int = _LOCATE) -> Iterator[Run]:
        """The same in runs of batches that are located together, of about ``most`` samples once some have been: much
        cheaper than one by one."""
        batch = worker.index + -(-max(first - worker.index, 0) // worker.count) * worker.count
        share = max(1, self.rule.global_batch // self.rule.place.world)
        samples = _LOCATE_FIRST
        while self.has(batch):
            batches = range(batch, self._known(batch), worker.count)[: max(1, samples // share)]
            yield self._located_run(batches)
            batch = batches[-1] + worker.count
            samples = min(2 * samples, most)

    def _known(self, batch: int) -> int:
        """How many batches the pass has, or so many that ``batch`` is one of them and all are surely there.

        Whole batches come first where counts become known meanwhile, also before an error about the last one: so that
        it does not depend on what is known at the moment.
        """
        order = self.latest
        if self.reach is not None and not self._cut_short:
            whole = (order.settled - self.position) // self.rule.global_batch
            if batch < whole:
                return whole
        return self.batches

    def _located_run(self, batches: range) -> Run:
        places = self._neighbours(batches) if self._is_whole(batches[-1]) else None
        if places is not None:
            return Run(batches, self._stamps(batches, self.rule.global_batch), places)
        stamps, positions = self._several(batches)
        return Run(batches, stamps, self.places(positions))

    def _neighbours(self, batches: range) -> Places | None:
        """Where the samples of whole batches lie, if they are neighbours in one shard and that is plain to see."""
        size = self.rule.global_batch
        if self.rule.place.world > 1 or batches.step > 1:
            return None
        order = self.reaching(self._behind(batches[-1]))
        count = len(batches) * size
        first = order.neighbours(self.position + batches[0] * size, count) if isinstance(order, EpochOrder) else None
        if first is None:
            return None
        shard, row = first
        return Places(np.full(count, shard, dtype=np.int64), np.arange(row, row + count, dtype=np.int64))

    def _stamps(self, batches: range, size: int) -> list[Stamp]:
        """Those of whole batches of which this rank has so many samples."""
        ends = range(self._behind(batches[0]), self._behind(batches[-1]) + 1, batches.step * self.rule.global_batch)
        epoch, stop = self.order.epoch, self.stop if self._cut_short else None
        return [Stamp(epoch, end, size, stop) for end in ends]

    def _several(self, batches: range) -> tuple[list[Stamp], Int64s]:
        """Stamps and positions of some batches."""
        whole = batches if self._is_whole(batches[-1]) else batches[:-1]
        stamps: list[Stamp] = []
        parts: list[Int64s] = []
        if len(whole):
            positions = self._whole(whole)
            stamps = self._stamps(whole, len(positions) // len(whole))
            parts.append(positions)
        for batch in batches[len(whole) :]:
            parts.append(self.positions(batch))
            stamps.append(self.stamp(batch, len(parts[-1])))
        return stamps, parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _whole(self, batches: range) -> Int64s:
        """Positions of some whole batches: with one node they are the same run, moved along."""
        return self._moved(self.positions(batches[0]), len(batches), batches.step)

    def _moved(self, positions: Int64s, times: int, step: int) -> Int64s:
        """These positions so many times, each time ``step`` batches on."""
        step *= self.rule.global_batch
        out: Int64s = (positions + np.arange(0, times * step, step, dtype=np.int64)[:, None]).ravel()
        return out


class Prefetch:
    """Asks the client for a pass's shards in order of first use, a window ahead of the position being read.

    ``lanes``: those of the node, if it is not to have all.
    """

    def __init__(
        self,
        client: Client,
        manifest: Manifest,
        order: EpochOrder,
        position: int,
        *,
        ahead: int,
        lanes: Int64s | None = None,
    ) -> None:
        uses = order.uses_from(position, lanes)
        self._client = client
        self._manifest = manifest
        self._shard = uses.shard
        self._first = uses.first
        self._ahead = ahead
        self._asked = 0

    def reach(self, position: int) -> None:
        """Reading has come to ``position``: ask for what comes next and has not been asked for."""
        begun = int(np.searchsorted(self._first, position, side="right"))
        if self._asked >= min(begun + self._ahead // 2, len(self._shard)):
            return
        wanted = self._shard[self._asked : begun + self._ahead]
        self._client.prefetch([self._manifest.stat(number) for number in wanted.tolist()])
        self._asked += len(wanted)

    def close(self) -> None:
        """Nothing to do: what was asked for comes."""
