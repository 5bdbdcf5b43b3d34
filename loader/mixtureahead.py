"""What a pass over a mixture asks for ahead: each source's next shards, also those of its next epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from .passes import Prefetch

if TYPE_CHECKING:
    from .definition import Definition
    from .manifest import Manifest
    from .mixtureorder import MixtureOrder

_LEAST_AHEAD: Final = 16
_LAST_PART: Final = 8
"""An epoch's shards are asked for from the last eighth of the epoch before it on."""


class MixtureAhead:
    """Asks for the shards of those sources that are not local files, a window ahead of the position being read."""

    def __init__(self, order: MixtureOrder, sources: Sequence[Definition], manifests: Sequence[Manifest]) -> None:
        self._order = order
        self._sources = [
            _SourceAhead(order, number, source, manifest)
            for number, (source, manifest) in enumerate(zip(sources, manifests, strict=True))
            if manifest.shards and "://" in manifest.shards[0].url and not manifest.format.folder
        ]
        self._next = 0

    @property
    def remote(self) -> bool:
        """Whether there is anything to ask for."""
        return bool(self._sources)

    def reach(self, position: int) -> None:
        """Reading has come to ``position``."""
        if position < self._next:
            return
        order = self._order
        begun = order.begin + min(position, order.total)
        block = order.mixing.block
        self._next = (begun // block + 1) * block - order.begin
        taken = order.taken(begun // block * block - order.begin).tolist()
        for source in self._sources:
            source.reach(taken[source.number])

    def close(self) -> None:
        """Nothing to do: what was asked for comes."""


class _SourceAhead:
    def __init__(self, order: MixtureOrder, number: int, source: Definition, manifest: Manifest) -> None:
        self.number = number
        self._orders = order.sources[number]
        self._source = source
        self._manifest = manifest
        self._asking: dict[int, Prefetch] = {}

    def reach(self, count: int) -> None:
        """So many samples of the source have been read in the run."""
        total = self._orders.total
        epoch, position = divmod(count, total)
        self._in_epoch(epoch, position)
        if total - position <= total // _LAST_PART + 1:
            self._in_epoch(epoch + 1, 0)
        for old in [other for other in self._asking if other < epoch]:
            del self._asking[old]

    def _in_epoch(self, epoch: int, position: int) -> None:
        asking = self._asking.get(epoch)
        if asking is None:
            order = self._orders(epoch)
            ahead = max(_LEAST_AHEAD, 2 * order.plan.lanes)
            asking = Prefetch(self._source.client, self._manifest, order, position, ahead=ahead)
            self._asking[epoch] = asking
        asking.reach(position)
