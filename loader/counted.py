"""The shards of a data set that is counted while it is read, as a pool of open shards needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .formats import Format
from .manifest import Manifest
from .tally import Tally

if TYPE_CHECKING:
    from cachefs.shard import ObjectStat


class CountedShards:
    """:class:`loader.buffers.Shards`. ``told``: counts that a state tells of shards that are not counted here."""

    def __init__(self, manifest: Manifest, tally: Tally, told: Mapping[int, int]) -> None:
        self._manifest = manifest
        self._tally = tally
        self._told = told

    @property
    def format(self) -> Format:
        return self._manifest.format

    def stat(self, number: int) -> ObjectStat:
        return self._manifest.stat(number)

    def samples(self, number: int) -> int:
        count = self._tally.of(number)
        return self._told.get(number, count) if count < 0 else count

    def unpacked(self, number: int) -> int | None:
        return self._manifest.unpacked(number)

    def part(self, number: int) -> int | None:
        return self._manifest.part(number)
