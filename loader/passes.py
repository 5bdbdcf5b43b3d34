"""One pass over a data set: the batches that one worker of one rank takes, in order, and where each of them ends.

A pass reads the positions from its start to the epoch's end, cut into global batches from the start on; worker w of n
takes batches w, w + n, ... DataLoader asks its workers in turn, so the order is the same for every number of workers,
also in a pass that was resumed.

A pass that begins within a batch (a state saved between two samples, one rank only) is cut anew from there but ends
where the uninterrupted pass ends (``stop``), with a short last batch: no sample is lost, none is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .batches import rank_positions, steps
from .order import EpochOrder
from .permute import Int64s
from .sample import Stamp
from .samples import Places
from .workers import Place, Worker

if TYPE_CHECKING:
    from cachefs.client import Client

    from .manifest import Manifest

_LOCATE = 16384
_LOCATE_FIRST = 1024
"""Positions that are located in one call: few at first, so that the first batch is there soon."""


@dataclass(frozen=True)
class BatchRule:
    """How an epoch is cut into batches, for one rank."""

    global_batch: int
    place: Place
    drop_last: bool
    pad: bool


@dataclass(frozen=True)
class Run:
    """Some batches of one rank, and where their samples lie, batch after batch."""

    batches: range
    stamps: list[Stamp]
    places: Places

    def cut(self, samples: int) -> Iterator[Run]:
        """In pieces of whole batches, of about so many samples each."""
        each = max(1, samples // max(self.stamps[0].size, 1))
        at = 0
        for start in range(0, len(self.batches), each):
            stamps = self.stamps[start : start + each]
            size = sum(stamp.size for stamp in stamps)
            yield Run(self.batches[start : start + each], stamps, self.places.part(at, at + size))
            at += size

    def split(self) -> Iterator[tuple[int, Stamp, Places]]:
        """The batches one by one."""
        at = 0
        for batch, stamp in zip(self.batches, self.stamps, strict=True):
            yield batch, stamp, self.places.part(at, at + stamp.size)
            at += stamp.size


@dataclass(frozen=True)
class PassPlan:
    """Which positions of ``order`` a rank reads, batch by batch, from ``position`` on. Pure."""

    order: EpochOrder
    rule: BatchRule
    position: int = 0
    stop: int | None = None

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
            self.order.total,
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
        return behind if self.rule.pad else min(behind, self.order.total)

    def positions(self, batch: int) -> Int64s:
        """This rank's positions in global batch ``batch`` of the pass; ``>= order.total`` are repeats.

        Negative numbers are the batches before the pass's start, as far as the epoch has them (:attr:`earlier`).
        """
        rule = self.rule
        first = self.position + batch * rule.global_batch
        if self._cut_short:
            return np.arange(first, min(first + rule.global_batch, self.end), dtype=np.int64)
        return rank_positions(
            self.order,
            0,
            global_batch=rule.global_batch,
            rank=rule.place.rank,
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
        total = self.order.total
        repeat = positions >= total
        if not repeat.any():
            return Places(*self.order.locate(positions))
        return Places(*self.order.locate(positions % total), repeat)

    def stamp(self, batch: int, size: int) -> Stamp:
        end = min(self.position + (batch + 1) * self.rule.global_batch, self.end)
        return Stamp(self.order.epoch, end, size, self.stop if self._cut_short else None)

    def share(self, worker: Worker, first: int = 0) -> Iterator[tuple[int, Stamp, Places]]:
        """``(batch, stamp, places)`` of each batch that this worker reads, those before ``first`` left out."""
        for run in self.runs(worker, first):
            yield from run.split()

    def runs(self, worker: Worker, first: int = 0) -> Iterator[Run]:
        """The same in runs of batches that are located together: much cheaper than one by one."""
        own = range(worker.index, self.batches, worker.count)
        own = own[-(-max(first - worker.index, 0) // worker.count) :]
        share = max(1, self.rule.global_batch // self.rule.place.world)
        samples, start = _LOCATE_FIRST, 0
        while start < len(own):
            batches = own[start : start + max(1, samples // share)]
            positions = self._several(batches)
            sizes = [len(part) for part in positions]
            stamps = [self.stamp(batch, size) for batch, size in zip(batches, sizes, strict=True)]
            yield Run(batches, stamps, self.places(np.concatenate(positions)))
            start += len(batches)
            samples = min(2 * samples, _LOCATE)

    def _several(self, batches: range) -> list[Int64s]:
        """The positions of some batches. With one node all whole batches are the same run, moved along."""
        whole = batches if batches[-1] + 1 < self.batches else batches[:-1]
        out: list[Int64s] = []
        if len(whole):
            moved = np.arange(len(whole), dtype=np.int64)[:, None] * (batches.step * self.rule.global_batch)
            out = list(self.positions(whole[0]) + moved)
        return out if len(whole) == len(batches) else [*out, self.positions(batches[-1])]


class Prefetch:
    """Asks the client for a pass's shards in order of first use, a window ahead of the position being read."""

    def __init__(self, client: Client, manifest: Manifest, order: EpochOrder, position: int, *, ahead: int) -> None:
        uses = order.uses_from(position)
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
