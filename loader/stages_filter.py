"""Batches of the samples that a filter stage leaves: how they are filled up, and where a run goes on in them.

**Batches.** How many samples a stage keeps is known to nobody before they have been read. So each rank fills its
batches up from its own further samples: all have the data set's ``batch_size``. A pass over them goes through the
*rounds* of the epoch: its plan as the rank reads it, once. What is left at the end and fills no batch is dropped, or
with ``drop_last=False`` is the short last batch, or with ``pad=True`` is filled up by round 1: the rank's own kept
samples from the epoch's beginning, marked in ``__repeat__``.

**Steps.** Ranks keep different numbers of samples, and would differ in the number of their batches: with more than one,
``Loader(steps=N)`` is needed. Every rank then gives exactly N batches an epoch. One that runs out goes on with further
rounds, marked in ``__repeat__``; one that has more leaves the rest out, and the next epoch begins.

**States.** A :class:`Point` says where the rank is: the batch of the plan that is not fully used yet, and how many of
its kept samples are. Each rank has one of its own, so each saves and loads its own state, at the same number of ranks
and the same batch size: it then goes on exactly there. Anywhere else a state goes on at the beginning of that batch of
the plan, and the kept samples of it that were used come again: fewer than one batch of that rank, with a warning. To
go on with another number of ranks, give all of them one state: :func:`common_state` of all those saved is the one that
leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cachefs.errors import EmptyDataset

from .sample import Stamp
from .samples import Places

if TYPE_CHECKING:
    from .passes import PassPlan
    from .reading import Reading


@dataclass(frozen=True)
class Point:
    """Where a rank is in a pass: ``kept`` samples of batch ``batch`` of the plan are used, in round ``round``, and
    ``given`` batches of the epoch. Batches are counted from where the pass began, those before it are negative."""

    batch: int = 0
    kept: int = 0
    given: int = 0
    round: int = 0


class Part(NamedTuple):
    """One batch of the plan, to be read. ``last``: whether another round comes next, if there is one."""

    round: int
    batch: int
    last: bool
    stamp: Stamp
    places: Places


class Kept(NamedTuple):
    """What the stages leave of a :class:`Part`."""

    round: int
    batch: int
    last: bool
    samples: list[Any]


class Full(NamedTuple):
    """The samples of one batch. ``then``: where the rank is once it is used; ``None``: in the next epoch."""

    samples: list[Any]
    then: Point | None


def parts(reading: Reading, point: Point, *, rounds: bool) -> Iterator[Part]:
    """What a pass reads from ``point`` on: the rest of that round, and, with ``rounds``, round after round."""
    plan, number = reading.plan, point.round
    if number == 0:
        for batch, stamp, places in reading.batches():
            yield Part(0, batch, rounds and not plan.has(batch + 1), stamp, places)
    else:
        yield from _round(plan, number, point.batch)
    while rounds and plan.has(-plan.earlier):
        number += 1
        yield from _round(plan, number, -plan.earlier)


def _round(plan: PassPlan[Any], number: int, batch: int) -> Iterator[Part]:
    """The epoch once more, from a batch on: its samples are repeats."""
    more = plan.has(batch)
    while more:
        places = plan.places(plan.positions(batch))
        size = len(places.row)
        more = plan.has(batch + 1)
        repeats = places._replace(repeat=np.ones(size, np.bool_))
        yield Part(number, batch, not more, plan.stamp(batch, size), repeats)
        batch += 1


class Refill:
    """Makes batches of ``size`` samples of kept ones, as they come; iterated once.

    ``whole``: whether ``point`` is the beginning of an epoch; ``earlier``: how many batches of the plan lie before the
    pass. ``steps``: how many batches an epoch has, ``None``: as many as there are. Then ``short``: whether what is left
    at the end is one too; ``fill``: whether it is filled up from another round.
    """

    def __init__(
        self,
        kept: Iterator[Kept],
        point: Point,
        *,
        whole: bool,
        earlier: int,
        size: int,
        steps: int | None,
        short: bool = False,
        fill: bool = False,
    ) -> None:
        self._kept = kept
        self._point = point
        self._whole = whole
        self._earlier = earlier
        self._size = size
        self._steps = steps
        self._short = short
        self._fill = fill
        self._left: list[Any] = []

    def __iter__(self) -> Iterator[Full]:
        return self._all() if self._steps is None else self._counted(self._steps)

    def _counted(self, steps: int) -> Iterator[Full]:
        if self._point.given >= steps:
            return
        for samples, then in self._filled():
            over = then.given >= steps
            yield Full(samples, None if over else then)
            if over:
                return

    def _all(self) -> Iterator[Full]:
        """A batch is held back until it is known whether it is the last: then the next epoch comes after it."""
        held: Full | None = None
        for samples, then in self._filled():
            if held is not None:
                yield held
            held = Full(samples, then)
            if self._fill and self._round > 0:
                break
        if self._left and self._short:
            if held is not None:
                yield held
            held = Full(self._left, None)
        if held is not None:
            yield Full(held.samples, None)
        elif self._whole:
            raise EmptyDataset(
                f"the filter stages keep {len(self._left)} samples of this rank's epoch, a batch has {self._size}",
                hint="use a smaller batch size, drop_last=False, or a filter that keeps more",
            )

    def _filled(self) -> Iterator[tuple[list[Any], Point]]:
        """Full batches, and where the rank is behind each; what is left is kept."""
        point, size = self._point, self._size
        self._round, given, skip = point.round, point.given, point.kept
        whole, found = self._whole, False
        for number, batch, last, samples in self._kept:
            if number != self._round:
                if whole and not found:
                    break
                self._round, whole, found = number, True, False
                if self._steps is None and not self._left:
                    return
            found = found or bool(samples)
            at, skip = min(skip, len(samples)), 0
            while at < len(samples):
                taken = samples[at : at + size - len(self._left)]
                self._left += taken
                at += len(taken)
                if len(self._left) == size:
                    given += 1
                    full, self._left = self._left, []
                    yield full, self._behind(number, batch, last, at if at < len(samples) else None, given)
        else:
            return
        raise EmptyDataset("the filter stages keep none of this rank's samples of an epoch")

    def _behind(self, number: int, batch: int, last: bool, used: int | None, given: int) -> Point:
        if used is not None:
            return Point(batch, used, given, number)
        return Point(-self._earlier, 0, given, number + 1) if last else Point(batch + 1, 0, given, number)
