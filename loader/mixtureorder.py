"""The order of a mixture: one sequence for the whole run, cut into epochs, each position of it a sample of a source.

Which source a position belongs to, and the how-manieth of that source it is, says :mod:`loader.mixing`. The k-th sample
of a source is the one at position ``k % n`` of that source's own epoch ``k // n`` (n: its samples): in the order in
which the source alone is read. So each sample of a source comes once in each of the source's epochs, whatever the
mixture's epochs are; these only say where a pass ends. The next one goes on behind it, and nothing is left out.

Pure: numpy and arithmetic only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cachefs.errors import ConfigError

from .epochs import Orders, OrderSettings
from .mixing import MOST, Mixing
from .order import EpochOrder
from .passes import PassPlan
from .permute import Int64s
from .samples import Origin, Places
from .settingwords import OrderWords, signed, unsigned

_NEAR: Final = 256
"""Samples of a source before and after a damaged one among which a good one is looked for."""
_TURNS: Final = 4  # orders of a source's epochs that are remembered


@dataclass(frozen=True)
class MixtureSettings:
    """What fixes the order of a mixture, apart from its sources and shares.

    ``seed`` and ``block`` of the mixing. Epoch ``epoch`` begins at position ``begin`` of the sequence, the one behind
    it at ``next`` (later ones follow at their usual distance). Each source had ``offsets`` samples before the sequence.
    """

    seed: int
    block: int
    epoch: int
    begin: int
    next: int
    offsets: tuple[int, ...]
    sources: tuple[OrderSettings, ...]

    def start_of(self, epoch: int, usual: int) -> int:
        """Where an epoch begins in the sequence; one before ``epoch`` where that of a run from the beginning does."""
        if epoch == self.epoch:
            return self.begin
        return self.next + (epoch - self.epoch - 1) * usual if epoch > self.epoch else epoch * usual


class MixtureWords:
    """:class:`loader.settingwords.Words` of the settings of a mixture of so many sources."""

    def __init__(self, sources: int) -> None:
        self._sources = sources

    @property
    def count(self) -> int:
        return 6 + self._sources * (1 + OrderWords.count)

    def pack(self, settings: MixtureSettings) -> list[int]:
        of = OrderWords()
        words = [signed(settings.seed), settings.seed >= 0, settings.block]
        words += [settings.epoch, settings.begin, settings.next, *settings.offsets]
        return [*words, *(word for source in settings.sources for word in of.pack(source))]

    def unpack(self, words: Sequence[int]) -> MixtureSettings:
        of, first = OrderWords(), 6 + self._sources
        seed, natural, block, epoch, begin, following = words[:6]
        return MixtureSettings(
            seed=unsigned(seed) if natural else seed,
            block=block,
            epoch=epoch,
            begin=begin,
            next=following,
            offsets=tuple(words[6:first]),
            sources=tuple(of.unpack(words[at : at + of.count]) for at in range(first, len(words), of.count)),
        )


@dataclass(frozen=True)
class EpochCut:
    """Where epochs end: after ``length`` positions, or after whole batches of ``batch`` with ``whole``."""

    length: int
    batch: int
    whole: Literal["up", "down"] | None

    def end(self, position: int) -> int:
        """The end of an epoch that is read from ``position`` on. It has less than a batch only if ``length`` has."""
        left = max(self.length - position, 0)
        if self.whole is None or (position == 0 and self.whole == "down" and left < self.batch):
            return self.length
        batches = -(-left // self.batch) if self.whole == "up" else left // self.batch
        return position + batches * self.batch


class SourceOrders:
    """The orders of one source's epochs, the latest few remembered. ``total``: its samples."""

    def __init__(self, orders: Orders) -> None:
        self.total = orders.total
        self._orders = orders
        self._made: OrderedDict[int, EpochOrder] = OrderedDict()

    def __call__(self, epoch: int) -> EpochOrder:
        order = self._made.get(epoch)
        if order is None:
            order = self._orders.anchored(epoch, None)
            # one call each, and none that fails where another thread does the same
            self._made = OrderedDict([*list(self._made.items())[1 - _TURNS :], (epoch, order)])
        return order

    def locate(self, numbers: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """(epoch, shard, index in the shard) of the samples with these numbers in the run."""
        epoch, position = np.divmod(numbers, self.total)
        if self.total == 1:
            return epoch, *self(0).locate(position)
        shard, row = np.empty_like(numbers), np.empty_like(numbers)
        for turn in np.unique(epoch).tolist():
            here = epoch == turn
            shard[here], row[here] = self(turn).locate(position[here])
        return epoch, shard, row


class MixtureOrder:
    """One epoch of a mixture: ``total`` positions from ``begin`` of the sequence on (:class:`loader.passes.Order`).

    ``usual``: how many positions epochs have that are read from their beginning.
    """

    complete: Final = True
    floor: Final = 0

    def __init__(
        self,
        mixing: Mixing,
        sources: Sequence[SourceOrders],
        settings: MixtureSettings,
        *,
        epoch: int,
        total: int,
        usual: int,
    ) -> None:
        self.mixing = mixing
        self.sources = sources
        self.settings = settings
        self.epoch = epoch
        self.begin = settings.start_of(epoch, usual)
        self.total = total
        self.usual = usual
        self._offsets = np.array(settings.offsets, dtype=np.int64)
        if self.begin + total > MOST:
            raise ConfigError(f"epoch {epoch} of {usual} samples each is beyond the 2**48 samples that a run may have")

    @property
    def settled(self) -> int:
        return self.total

    def lane_of(self, positions: Int64s) -> Int64s:
        """The source of each position."""
        return self.mixing.locate(self.begin + positions)[0]

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """(shard of its source, index in the shard) of each."""
        places = self.places(positions)
        return places.shard, places.row

    def places(self, positions: Int64s) -> Places:
        """The samples at these positions, and where they are from."""
        source, number = self.mixing.locate(self.begin + positions)
        number += self._offsets[source]
        return self._places(source, number)

    def _places(self, source: Int64s, number: Int64s) -> Places:
        epoch, shard, row = np.empty_like(number), np.empty_like(number), np.empty_like(number)
        for at in np.unique(source).tolist():
            here = source == at
            epoch[here], shard[here], row[here] = self.sources[at].locate(number[here])
        return Places(shard, row, None, Origin(source, epoch, number))

    def taken(self, position: int) -> Int64s:
        """How many samples of each source come before ``position`` in the run."""
        return self._offsets + self.mixing.taken(self.begin + position)

    def about(self, source: int, numbers: Int64s, side: int) -> Int64s:
        """A position before (``side=-1``) or behind (``1``) that of the source's samples with these numbers in the run,
        by no more than the mixing leaves open."""
        each = sum(self.mixing.shares) / self.mixing.shares[source]
        exact = (numbers - self._offsets[source]) * each + side * (2 * each + self.mixing.block)
        out: Int64s = np.floor(exact).astype(np.int64) - self.begin + (side > 0)
        return out

    def near(self, source: int, number: int) -> Iterator[Places]:
        """The samples of a source next to one, singly: those before it, the nearest first, then those behind it."""
        before = range(number - 1, max(number - _NEAR, 0) - 1, -1)
        for other in (*before, *range(number + 1, number + _NEAR)):
            yield self._places(np.array([source], dtype=np.int64), np.array([other], dtype=np.int64))


class MixturePlan(PassPlan[MixtureOrder]):
    """A pass over a mixture."""

    def _located(self, order: MixtureOrder, positions: Int64s) -> Places:
        return order.places(positions)
