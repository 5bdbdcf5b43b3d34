"""Dealing a data set's shards to lanes: the part of the order that stays the same in every epoch.

A *lane* is one of C fixed, disjoint streams; each global batch takes its samples from all lanes in turn. Three cases:

* shuffled, at least 4 * C shards (or counts not known): each shard belongs whole to one lane, lanes balanced by bytes
  or by samples. The deal does not look at counts unless it balances by samples, so it is the same before and after
  they are known;
* shuffled, fewer shards than that and all counts known: the shards are laid end to end in an order drawn from the seed
  and *cut* into C runs of equal sample counts, so that one shard can feed many lanes (and nodes). A data set that is
  counted while it is read (``loader.manifest``: ``progressive``) is never cut, also not once all is counted
  (``cut=False``): its order must not depend on who knows how much;
* not shuffled: one lane that holds the shards in their listing order, whatever ``lanes`` says. Position i is then
  sample i of the data set, and a batch is a run of neighbouring samples. No node owns any of them: every node reads
  every shard.

Pure: numpy and arithmetic only.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from cachefs.errors import ConfigError, EmptyDataset
from cachefs.hashing import name_digest

from .permute import Int64s, derive, derive_array, seed_key

ORDER_VERSION: Final = 1
"""Raised whenever a change makes any seed give another order; a state records it."""

Balance: TypeAlias = Literal["bytes", "samples"]

_SHARD_ORDER: Final = 1
_LANE_NAMES: Final = 2


@dataclass(frozen=True, eq=False)
class LanePlan:
    """Which samples belong to which lane. Immutable (its arrays are read-only); picklable; O(shards + lanes) memory.

    A *piece* is samples ``start`` to ``stop`` of one shard; the three arrays list all pieces, lane after lane, inside
    a lane by (shard, start). Pieces of lane i are ``bounds[i]:bounds[i + 1]``. ``stop`` is -1 where a shard's count is
    not known yet. ``lengths`` counts each lane's samples, those of unknown shards left out.
    """

    shard: Int64s
    start: Int64s
    stop: Int64s
    bounds: Int64s
    lengths: Int64s
    shuffle: bool
    cut: bool
    digest: str

    @property
    def lanes(self) -> int:
        """C, the number of lanes; some may be empty."""
        return len(self.lengths)

    @property
    def complete(self) -> bool:
        """Whether every shard's count is known."""
        return not bool((self.stop < 0).any())

    def pieces(self, lane: int) -> tuple[Int64s, Int64s, Int64s]:
        """(shard, start, stop) of one lane's pieces, as read-only views."""
        own = slice(int(self.bounds[lane]), int(self.bounds[lane + 1]))
        return self.shard[own], self.start[own], self.stop[own]

    def with_counts(self, counts: Int64s) -> LanePlan:
        """The same plan of whole shards with more counts known."""
        if self.cut:
            raise ConfigError("lanes that are cut by samples cannot take other sample counts")
        stop = np.asarray(counts, dtype=np.int64)[self.shard]
        return _plan(self.shard, self.start, stop, self.bounds, shuffle=self.shuffle, cut=False)


def default_lanes(batch: int, nodes: int) -> int:
    """C for global batch B on P nodes: few lanes for locality, enough for mixing, and each batch even over nodes.

    The smallest divisor of B that is a multiple of P and in [4P, 16P]; else the largest such up to 16P; else the
    largest divisor of B up to 16P.
    """
    if batch < 1 or nodes < 1:
        raise ConfigError(f"a global batch of {batch} on {nodes} nodes cannot be dealt to lanes")
    divisors = [c for c in range(1, min(batch, 16 * nodes) + 1) if batch % c == 0]
    even = [c for c in divisors if c % nodes == 0]
    wide = [c for c in even if c >= 4 * nodes]
    if wide:
        return wide[0]
    return even[-1] if even else divisors[-1]


def plan_lanes(
    counts: Int64s,
    sizes: Int64s,
    *,
    batch: int,
    nodes: int = 1,
    lanes: int | None = None,
    seed: int,
    shuffle: bool,
    balance: Balance = "bytes",
    cut: bool | None = None,
    epoch: int | None = None,
) -> LanePlan:
    """Deal shards to lanes; a pure function of its arguments.

    ``counts`` (samples, -1 where unknown) and ``sizes`` (bytes) have shape ``(shards,)``, in the manifest's listing
    order. ``batch`` is the global batch in samples and ``nodes`` the number of nodes: they give the default number of
    lanes (:func:`default_lanes`); with fewer than four shards a lane and counts missing it shrinks. ``lanes`` sets it.
    ``cut`` repeats what a state recorded (None: decide as the module says). ``epoch`` draws other lanes for each epoch
    (``exchange=True``).

    Raises EmptyDataset when there is no shard or surely no sample, ConfigError for arguments that cannot be.
    """
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    sizes = np.ascontiguousarray(sizes, dtype=np.int64)
    _check(counts, sizes, lanes, balance)
    known = not bool((counts < 0).any())
    if not shuffle:
        return _whole(counts, np.zeros(len(counts), dtype=np.int64), 1, shuffle=False)
    key = derive(seed_key(seed), *(() if epoch is None else (epoch,)))
    width = lanes if lanes is not None else default_lanes(batch, nodes)
    few = len(counts) < 4 * width
    if cut is None:
        cut = few and known
    if few and lanes is None and not cut:
        width = _shrunk_lanes(batch, nodes, len(counts) // 4)
    if cut:
        if not known:
            raise ConfigError(
                "lanes are cut by samples, but not every shard's sample count is known", hint="index the data set first"
            )
        return _cut(counts, width, key)
    if balance == "samples" and not known:
        raise ConfigError(
            'balance="samples" needs every shard\'s sample count', hint='index the data set first, or use "bytes"'
        )
    weights = sizes if balance == "bytes" else counts
    return _whole(counts, _deal(weights, width, key), width, shuffle=True)


def _check(counts: Int64s, sizes: Int64s, lanes: int | None, balance: str) -> None:
    if counts.ndim != 1 or counts.shape != sizes.shape:
        raise ConfigError(
            f"counts and sizes must be one list per shard, not of shapes {counts.shape} and {sizes.shape}"
        )
    if balance not in ("bytes", "samples"):
        raise ConfigError(f"balance={balance!r} is not known", hint='use "bytes" or "samples"')
    if lanes is not None and lanes < 1:
        raise ConfigError(f"lanes={lanes} must be at least 1")
    if len(counts) == 0:
        raise EmptyDataset("the data set has no shard")
    if counts.min() < -1 or sizes.min() < 0:
        raise ConfigError("a shard's sample count or size is negative")
    if not counts.any():
        raise EmptyDataset(f"none of the {len(counts)} shards holds a sample")


def _shrunk_lanes(batch: int, nodes: int, limit: int) -> int:
    """The largest divisor of the batch up to ``limit``, one that is even over the nodes where there is one."""
    divisors = [c for c in range(1, max(limit, 1) + 1) if batch % c == 0]
    even = [c for c in divisors if c % nodes == 0]
    return (even or divisors)[-1]


def _deal(weights: Int64s, lanes: int, key: int) -> Int64s:
    """The lane of each shard, by greedy balancing: the heaviest first, each to the lane that has least so far.

    "Heaviest" goes by powers of two and is drawn from the key inside one power, so that two keys give different lanes
    also where all weights differ. Lanes that have the same are taken in an order drawn from the key.
    """
    shards = np.arange(len(weights), dtype=np.int64)
    _, power = np.frexp(weights.astype(np.float64))
    order = np.lexsort((shards, derive_array(derive(key, _SHARD_ORDER), shards), -power))
    names = np.argsort(derive_array(derive(key, _LANE_NAMES), np.arange(lanes, dtype=np.int64)), kind="stable")
    out = np.empty(len(weights), dtype=np.int64)
    # (weight, shards, place in the drawn order): where all weights are zero the number of shards is balanced
    heap = [(0, 0, place) for place in range(lanes)]
    amounts = weights.tolist()
    for shard in order.tolist():
        load, held, place = heap[0]
        out[shard] = names[place]
        heapq.heapreplace(heap, (load + amounts[shard], held + 1, place))
    return out


def _whole(counts: Int64s, lane: Int64s, lanes: int, *, shuffle: bool) -> LanePlan:
    """A plan in which each shard belongs whole to ``lane[shard]``."""
    shards = np.argsort(lane, kind="stable").astype(np.int64)
    bounds = np.searchsorted(lane[shards], np.arange(lanes + 1)).astype(np.int64)
    return _plan(shards, np.zeros_like(shards), counts[shards], bounds, shuffle=shuffle, cut=False)


def _cut(counts: Int64s, lanes: int, key: int) -> LanePlan:
    """A plan in which the shards, in an order drawn from the key, are cut into ``lanes`` runs of equal length."""
    shards = np.flatnonzero(counts).astype(np.int64)
    shards = shards[np.lexsort((shards, derive_array(derive(key, _SHARD_ORDER), shards)))]
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts[shards])))
    runs = np.array([i * int(ends[-1]) // lanes for i in range(lanes + 1)], dtype=np.int64)
    edges = np.unique(np.concatenate((ends, runs)))
    first, last = edges[:-1], edges[1:]
    place = np.searchsorted(ends, first, side="right") - 1
    lane = np.searchsorted(runs, first, side="right") - 1
    shard, start = shards[place], first - ends[place]
    order = np.lexsort((start, shard, lane))
    bounds = np.searchsorted(lane, np.arange(lanes + 1)).astype(np.int64)
    return _plan(shard[order], start[order], (start + last - first)[order], bounds, shuffle=True, cut=True)


def _plan(shard: Int64s, start: Int64s, stop: Int64s, bounds: Int64s, *, shuffle: bool, cut: bool) -> LanePlan:
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(np.maximum(stop - start, 0))))
    lengths = np.diff(ends[bounds])
    for array in (shard, start, stop, bounds, lengths):
        array.setflags(write=False)
    digest = name_digest(f"lanes {ORDER_VERSION} {shuffle} {cut}", *(a.tobytes() for a in (shard, start, stop, bounds)))
    return LanePlan(shard, start, stop, bounds, lengths, shuffle, cut, digest)
