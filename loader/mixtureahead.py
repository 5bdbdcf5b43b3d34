"""What a pass over a mixture tells the node's cache: which shards of its sources are needed when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from .passes import Prefetch
from .planahead import Following, Needs

if TYPE_CHECKING:
    from cachefs.client import Client
    from cachefs.shard import ObjectStat

    from .definition import Definition
    from .manifest import Manifest
    from .mixtureorder import MixtureOrder
    from .permute import Int64s
    from .planahead import PlanNames

_LEAST_AHEAD: Final = 16
_LAST_PART: Final = 8
"""A source's next epoch is asked for from the last eighth of the one before it on."""
_MOST_TURNS: Final = 4
"""A source that is read more often than that is needed all the time."""


class ShardUses(NamedTuple):
    """Shards of one source, and between which positions each is read."""

    shard: Int64s
    first: Int64s
    last: Int64s


def uses_of(order: MixtureOrder, source: int, position: int, end: int) -> ShardUses:
    """When the shards of a source are read from ``position`` to before ``end``, which may lie in later epochs.

    In positions of this epoch, as bounds: that a sample is the k-th of its source says where it is to within a block.
    Pure.
    """
    orders, size = order.sources[source], order.sources[source].total
    begin, stop = (int(order.taken(at)[source]) for at in (position, end))
    if begin == stop:  # so small a share that it is not read
        none = np.zeros(0, dtype=np.int64)
        return ShardUses(none, none, none)
    turns = range(begin // size, -(-stop // size))
    if len(turns) > _MOST_TURNS:
        shard = orders(turns[0]).uses_from(0).shard
        return ShardUses(shard, np.full_like(shard, position), np.full_like(shard, end - 1))
    parts: list[tuple[Int64s, Int64s, Int64s]] = []
    for turn in turns:
        uses = orders(turn).uses_from(max(begin - turn * size, 0))
        soon = uses.first < stop - turn * size
        parts.append((uses.shard[soon], uses.first[soon] + turn * size, uses.last[soon] + turn * size))
    shard, first, last = (np.concatenate([np.zeros(0, np.int64), *column]) for column in zip(*parts, strict=True))
    bounds = [np.clip(order.about(source, count, side), position, end - 1) for count, side in ((first, -1), (last, 1))]
    return ShardUses(shard, bounds[0], bounds[1])


class MixtureAhead:
    """Declares a plan to the daemon and goes by it, or asks for a window ahead where the daemon takes none.

    For those sources that are not local files; those that one daemon serves are in one plan.
    """

    def __init__(
        self,
        order: MixtureOrder,
        position: int,
        sources: Sequence[Definition],
        manifests: Sequence[Manifest],
        names: PlanNames,
    ) -> None:
        self._groups: list[_Group] = []
        for number, (source, manifest) in enumerate(zip(sources, manifests, strict=True)):
            if manifest.shards and "://" in manifest.shards[0].url and not manifest.format.folder:
                client = source.client
                group = next((one for one in self._groups if one.is_of(client)), None)
                if group is None:
                    group = _Group(order, client, position, names)
                    self._groups.append(group)
                group.sources.append((number, manifest))

    @property
    def remote(self) -> bool:
        """Whether there is anything to ask for."""
        return bool(self._groups)

    def reach(self, position: int) -> None:
        """Reading has come to ``position``."""
        for group in self._groups:
            group.reach(position)

    def close(self) -> None:
        """Plans rest until the next pass's take their place, or the client's end. Idempotent."""
        for group in self._groups:
            group.close()


class _Group(Following):
    """Sources of one daemon."""

    def __init__(self, order: MixtureOrder, client: Client, position: int, names: PlanNames) -> None:
        super().__init__(client, names, position)
        self.sources: list[tuple[int, Manifest]] = []
        self._order = order

    def is_of(self, client: Client) -> bool:
        """Whether that client's daemon is this one."""
        return client is self._client or client.settings == self._client.settings

    def _ask(self, position: int) -> _Asking:
        return _Asking(self._order, self._client, position, self.sources)

    def _needs(self, began: int, position: int) -> Needs:
        """What the rest of this epoch and the next one need."""
        order = self._order
        end = order.total + order.usual
        objects: list[ObjectStat] = []
        uses: list[tuple[int, int, int]] = []
        for source, manifest in self.sources:
            of = uses_of(order, source, min(began, order.total), end)
            shards, numbers = np.unique(of.shard, return_inverse=True)
            numbers = numbers + len(objects)
            objects += [manifest.stat(shard) for shard in shards.tolist()]
            uses += list(zip(numbers.tolist(), of.first.tolist(), of.last.tolist(), strict=True))
        spans = np.array([(first, last + 1) for _, first, last in uses], dtype=np.int64)
        return Needs(objects, uses, np.unique(spans))  # between these nothing changes


class _Asking:
    """Asks for the sources' shards a window ahead."""

    def __init__(
        self, order: MixtureOrder, client: Client, position: int, sources: Sequence[tuple[int, Manifest]]
    ) -> None:
        self._order = order
        taken = order.taken(min(position, order.total)).tolist()
        self._sources = [_SourceAhead(order, client, at, manifest, taken[at]) for at, manifest in sources]
        self._next = 0

    def reach(self, position: int) -> None:
        """Nothing new is known before reading comes to another block of the mixing."""
        if position < self._next:
            return
        order = self._order
        block = order.mixing.block
        begun = order.begin + min(position, order.total)
        self._next = (begun // block + 1) * block - order.begin
        taken = order.taken(self._next).tolist()
        for source in self._sources:
            source.reach(taken[source.number])


class _SourceAhead:
    """``begin``: how many samples of the source were read before the pass."""

    def __init__(self, order: MixtureOrder, client: Client, number: int, manifest: Manifest, begin: int) -> None:
        self.number = number
        self._orders = order.sources[number]
        self._client = client
        self._manifest = manifest
        self._epoch, position = divmod(begin, self._orders.total)
        self._asking = self._ask(self._epoch, position)
        self._following: Prefetch | None = None

    def reach(self, count: int) -> None:
        """Soon so many samples of the source will have been read in the run."""
        total = self._orders.total
        epoch, position = divmod(count, total)
        if epoch > self._epoch:
            self._asking.reach(total)
            following = self._following if epoch == self._epoch + 1 else None
            self._epoch, self._asking, self._following = epoch, following or self._ask(epoch, 0), None
        self._asking.reach(position)
        if total - position <= total // _LAST_PART + 1:
            if self._following is None:
                self._following = self._ask(epoch + 1, 0)
            self._following.reach(0)

    def _ask(self, epoch: int, position: int) -> Prefetch:
        order = self._orders(epoch)
        ahead = max(_LEAST_AHEAD, 2 * order.plan.lanes)
        return Prefetch(self._client, self._manifest, order, position, ahead=ahead)
