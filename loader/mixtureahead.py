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
"""A source's next epoch is asked for from the last eighth of the one before it on."""


class MixtureAhead:
    """Asks for the shards of those sources that are not local files, a window ahead of the position being read."""

    def __init__(
        self, order: MixtureOrder, position: int, sources: Sequence[Definition], manifests: Sequence[Manifest]
    ) -> None:
        self._order = order
        remote = [
            number
            for number, manifest in enumerate(manifests)
            if manifest.shards and "://" in manifest.shards[0].url and not manifest.format.folder
        ]
        taken = order.taken(min(position, order.total)).tolist() if remote else []
        self._sources = [_SourceAhead(order, at, sources[at], manifests[at], taken[at]) for at in remote]
        self._next = 0

    @property
    def remote(self) -> bool:
        """Whether there is anything to ask for."""
        return bool(self._sources)

    def reach(self, position: int) -> None:
        """Reading has come to ``position``: nothing new is known before it comes to another block of the mixing."""
        if position < self._next:
            return
        order = self._order
        block = order.mixing.block
        begun = order.begin + min(position, order.total)
        self._next = (begun // block + 1) * block - order.begin
        taken = order.taken(self._next).tolist()
        for source in self._sources:
            source.reach(taken[source.number])

    def close(self) -> None:
        """Nothing to do: what was asked for comes."""


class _SourceAhead:
    """``begin``: how many samples of the source were read before the pass."""

    def __init__(self, order: MixtureOrder, number: int, source: Definition, manifest: Manifest, begin: int) -> None:
        self.number = number
        self._orders = order.sources[number]
        self._source = source
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
        return Prefetch(self._source.client, self._manifest, order, position, ahead=ahead)
