"""What can be said of an order: how far it is from one in which everything is equally likely.

``order[position]`` is the sample at that position, numbered in the data set's own order. Pure: numpy only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loader.permute import Int64s

Floats = npt.NDArray[np.float64]


def places(order: Int64s) -> Int64s:
    """The position of each sample: the inverse of the order."""
    out = np.empty_like(order)
    out[order] = np.arange(len(order), dtype=np.int64)
    return out


def autocorrelation(order: Int64s, lags: int) -> Floats:
    """How the numbers of two samples correlate that come 1, 2, ... ``lags`` positions apart. 0 is perfect."""
    values = order - order.mean()
    size = 1 << int(len(order) + lags).bit_length()
    power = np.abs(np.fft.rfft(values, size)) ** 2
    out: Floats = np.fft.irfft(power, size)[1 : lags + 1] / np.square(values).sum()
    return out


def scattered(order: Int64s) -> Int64s:
    """How many positions apart two samples come that are neighbours in the data set, for all such pairs."""
    return np.abs(np.diff(places(order)))


def gathered(order: Int64s) -> Int64s:
    """How far apart in the data set two samples are that come one after the other."""
    return np.abs(np.diff(order))


def even_distance(total: int) -> float:
    """The median distance of two samples that are drawn from ``total`` at random."""
    return float(total * (1 - np.sqrt(0.5)))


def distinct(order: Int64s, group: Int64s, batch: int) -> Int64s:
    """How many groups (shards, lanes) each full batch draws from; ``group[sample]`` is a sample's."""
    whole = len(order) // batch * batch
    rows = np.sort(group[order[:whole]].reshape(-1, batch), axis=1)
    out: Int64s = 1 + (np.diff(rows, axis=1) != 0).sum(axis=1)
    return out


def composition(order: Int64s, group: Int64s, batch: int) -> Int64s:
    """Samples of each group in each full batch, shape (batches, groups)."""
    groups, batches = int(group.max()) + 1, len(order) // batch
    row = np.repeat(np.arange(batches, dtype=np.int64), batch)
    counted = np.bincount(row * groups + group[order[: batches * batch]], minlength=batches * groups)
    return counted.reshape(batches, groups).astype(np.int64)


def imbalance(order: Int64s, label: Int64s, batch: int) -> Floats:
    """Each full batch's chi-square against the data set's own shares of the labels, as a multiple of what a perfect
    shuffle has on average.

    A value of f says: the batch's shares scatter as those of a random sample of batch / f would.
    """
    share = np.bincount(label) / len(label)
    expected = batch * share[share > 0]
    chi = (np.square(composition(order, label, batch)[:, share > 0] - expected) / expected).sum(axis=1)
    # drawn without putting back: (classes - 1) * (N - B) / (N - 1)
    out: Floats = chi / ((len(expected) - 1) * (len(order) - batch) / (len(order) - 1))
    return out


def correlation(one: Int64s, other: Int64s) -> float:
    """How the samples' positions in two epochs correlate. 0 is perfect."""
    return float(np.corrcoef(places(one), places(other))[0, 1])


def met_again(one: Int64s, other: Int64s, batch: int) -> float:
    """How often two samples of one batch share a batch in the other epoch too, as a multiple of chance."""
    total = len(one)
    pair = places(one) // batch * (total // batch + 1) + places(other) // batch
    again = _pairs(np.unique(pair, return_counts=True)[1])
    together = [_pairs(np.bincount(places(order) // batch)) for order in (one, other)]
    return again / (together[0] * together[1] / (total * (total - 1) / 2))


def _pairs(counts: Int64s) -> float:
    return float((counts * (counts - 1) / 2).sum())


def in_use(order: Int64s, shard: Int64s) -> Int64s:
    """How many shards are begun and not done with at each position: what has to be at hand there."""
    seen = places(order)
    heads = np.flatnonzero(np.diff(shard, prepend=-1))
    change = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.at(change, np.minimum.reduceat(seen, heads), 1)
    np.add.at(change, np.maximum.reduceat(seen, heads) + 1, -1)
    return np.cumsum(change)[:-1]


def narrow_share(lane: Int64s, lanes: int, batch: int) -> float:
    """The share of batches, the last short one left out, that draw from fewer than half of the lanes.

    ``lane[position]``. Of a batch smaller than the lanes, half of what it could draw from is asked for.
    """
    positions = np.arange(len(lane), dtype=np.int64)
    if len(lane) < batch:
        return 0.0
    return float((2 * distinct(positions, lane, batch) < min(lanes, batch)).mean())
