"""The token files of all sources of a mixture as those of one data set, so that a batch is gathered in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .permute import Int64s
from .samples import Places

if TYPE_CHECKING:
    from .buffers import ShardPool
    from .manifest import Manifest
    from .opening import OpenShard


def joint(manifests: Sequence[Manifest]) -> Manifest:
    """The shards of all, one after the other."""
    return replace(
        manifests[0],
        shards=tuple(stat for manifest in manifests for stat in manifest.shards),
        counts=np.concatenate([manifest.counts for manifest in manifests]),
        sizes=np.concatenate([manifest.sizes for manifest in manifests]),
        raw_sizes=None,
        damaged={},
        part_numbers=None,
    )


class JointPool:
    """The open shards of all sources, by their numbers in the joint manifest. ``first``: of each source's shards."""

    def __init__(self, pools: Sequence[ShardPool], first: Int64s) -> None:
        self._pools = pools
        self._first = first
        self.capacity = sum(pool.capacity for pool in pools)

    def get(self, number: int) -> OpenShard:
        source = int(np.searchsorted(self._first, number, side="right")) - 1
        return self._pools[source].get(number - int(self._first[source]))

    def places(self, places: Places) -> Places:
        """Places in the sources as places in the joint manifest."""
        assert places.origin is not None  # of a mixture's plan
        return Places(places.shard + self._first[places.origin.source], places.row)


def first_shards(manifests: Sequence[Manifest]) -> Int64s:
    """The number of each manifest's first shard in the joint one."""
    counts = [len(manifest.shards) for manifest in manifests]
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts[:-1], dtype=np.int64)])
