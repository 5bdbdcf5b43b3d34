"""How many of an epoch's batches draw from few lanes when shards differ in size.

Lanes get about equal bytes, but not equal: a lane that ends early leaves, and the last batches of an epoch are drawn
from those that are left. Pure: numpy and the loader's own order.
"""

from __future__ import annotations

import numpy as np

from loader.lanes import plan_lanes
from loader.permute import Int64s

from .shuffle_measures import Floats


def lognormal(shards: int, mean: float, sigma: float, seed: int) -> Int64s:
    """Shard sizes whose logarithm is normal with ``sigma``, of about this mean, at least 1."""
    drawn = np.random.default_rng((seed, shards)).lognormal(-sigma * sigma / 2, sigma, shards)
    return np.maximum(np.rint(mean * drawn), 1).astype(np.int64)


def dealt(counts: Int64s, lanes: int, seed: int, *, sizes: Int64s | None = None, by_samples: bool = False) -> Int64s:
    """Samples of each lane as the loader deals them: by the shards' bytes (None: all samples weigh the same), or by
    samples."""
    plan = plan_lanes(
        counts,
        counts * 1000 if sizes is None else sizes,
        batch=lanes,
        lanes=lanes,
        seed=seed,
        shuffle=True,
        balance="samples" if by_samples else "bytes",
    )
    return plan.lengths


def evened(counts: Int64s, lanes: int) -> Floats:
    """Samples of each lane if shards could be divided at will, but for those larger than what is left for a lane: what
    whole shards cost by themselves, whoever deals them."""
    left, rest = lanes, float(counts.sum())
    alone = []
    for count in np.sort(counts)[::-1].tolist():
        if left == 1 or count * left <= rest:
            break
        alone.append(float(count))
        rest, left = rest - count, left - 1
    return np.array(alone + [rest / left] * left)


def narrow(lengths: Int64s | Floats) -> float:
    """The share of an epoch that comes when fewer than half of the lanes are left.

    That is the share of batches that draw from fewer than half of them, for batches of a multiple of the lanes.
    """
    half = np.sort(lengths)[::-1][(len(lengths) + 1) // 2 - 1]
    return float(np.maximum(lengths - half, 0).sum() / lengths.sum())
