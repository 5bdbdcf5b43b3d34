"""One epoch's order under each shuffle: ours, the two extremes, and models of what other tools do.

An order is an array: ``order[position]`` is the sample at that position, numbered in the data set's own order; each
global batch is a run of positions, and each rank's part a run of that. The models follow the tools' documentation and
behaviour, in a few lines each; they are models, not the tools:

* :func:`buffer`: WebDataset's shards shuffled and split over all workers, with a buffer in each (filled up first);
* :func:`litdata`: LitData's chunks shuffled, laid end to end, cut into equal runs for the workers, shuffled inside;
* :func:`py2s`: Mosaic Streaming's shards shuffled and cut over canonical nodes, each shard shuffled inside;
* :func:`py1e`: the same deal, then every sample moved by a random distance within a range of ``block`` samples.

Pure: numpy and arithmetic only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from loader.epochs import Orders
from loader.order import EpochOrder
from loader.permute import Int64s


@dataclass(frozen=True)
class Job:
    """The job that all shuffles serve: ``ranks`` of one node with ``workers`` each, and the global batch."""

    batch: int = 256
    ranks: int = 8
    workers: int = 2

    @property
    def streams(self) -> int:
        """Processes that read, where each makes its own part of the order."""
        return self.ranks * self.workers


def perfect(counts: Int64s, epoch: int, seed: int) -> Int64s:
    """Every order equally likely."""
    return _generator(seed, epoch).permutation(int(counts.sum()))


def unshuffled(counts: Int64s, epoch: int, seed: int) -> Int64s:
    """The data set's own order."""
    return np.arange(int(counts.sum()), dtype=np.int64)


def our_epoch(
    counts: Int64s, epoch: int, seed: int, job: Job, *, lanes: int | None = None, block_shards: int | None = None
) -> EpochOrder:
    """The loader's own order of an epoch; shards weigh what they count. None is the loader's default."""
    made = Orders.begin(
        counts, counts * 1000, batch=job.batch, lanes=lanes, seed=seed, block_shards=block_shards, shuffle=True
    )
    return made(epoch)


def walked(epoch: EpochOrder, counts: Int64s) -> Int64s:
    """All of an :class:`EpochOrder` as an array."""
    shard, index = epoch.locate(np.arange(epoch.total, dtype=np.int64))
    return _first(counts)[shard] + index


def buffer(counts: Int64s, epoch: int, seed: int, job: Job, *, size: int) -> Int64s:
    """Shards shuffled, dealt to the workers in turn; each worker shuffles through a buffer of ``size`` samples."""
    rng = _generator(seed, epoch)
    shards = rng.permutation(len(counts))
    parts = [shards[worker :: job.streams] for worker in range(job.streams)]
    return in_batches([_buffered(_samples(counts, part), size, rng) for part in parts], job)


def _buffered(stream: Int64s, size: int, rng: np.random.Generator) -> Int64s:
    """What comes out of a shuffle buffer: each step gives out a random slot and puts the next sample into it.

    So a step gives out what the last step at the same slot put in, or what the slot was filled with.
    """
    size = min(size, len(stream))
    if size == 0:
        return stream
    slots = np.concatenate((np.arange(size), rng.integers(size, size=len(stream) - size)))
    by_slot = np.argsort(slots, kind="stable")
    again = slots[by_slot[1:]] == slots[by_slot[:-1]]
    before, after = by_slot[:-1][again], by_slot[1:][again]
    out = np.empty_like(stream)
    out[after - size] = stream[before]
    out[len(stream) - size :] = rng.permutation(np.delete(stream, before))
    return out


def litdata(counts: Int64s, epoch: int, seed: int, job: Job, *, window: int | None = 256) -> Int64s:
    """Chunks shuffled, laid end to end and cut into equal runs for the workers; inside a chunk, aligned windows of
    ``window`` samples are shuffled, and the samples in each (None: all samples of the chunk)."""
    rng = _generator(seed, epoch)
    chunks = rng.permutation(len(counts))
    laid = _samples(counts, chunks)
    parts: list[Int64s] = []
    for run in _runs(counts[chunks], job.streams):
        begin = sum(len(part) for part in parts)
        window_of = run * 0 if window is None else _within(run) // window
        heads = np.flatnonzero((np.diff(run, prepend=-1) != 0) | (np.diff(window_of, prepend=-1) != 0))
        key = np.repeat(rng.random(len(heads)), np.diff(heads, append=len(run)))
        parts.append(laid[begin : begin + len(run)][np.lexsort((rng.random(len(run)), key, run))])
    return in_batches(parts, job)


def py2s(counts: Int64s, epoch: int, seed: int, job: Job, *, canonical: int) -> Int64s:
    """Shards shuffled once and for all and cut over ``canonical`` nodes; in each epoch a node's shards are shuffled,
    and each of them inside. The nodes are read in turn."""
    rng = _generator(seed, epoch)
    nodes = []
    for samples, part in _canonical(counts, seed, canonical, inside=True):
        key = rng.permutation(int(part.max(initial=0)) + 1)
        nodes.append(samples[np.lexsort((rng.random(len(samples)), key[part]))])
    return dealt_to_ranks(in_turn(nodes), job)


def py1e(counts: Int64s, epoch: int, seed: int, job: Job, *, canonical: int = 1, block: int = 1 << 18) -> Int64s:
    """As :func:`py2s`, but a shard's samples then each move by a random distance, so that the shard spreads over about
    ``block`` places of its node (each shard draws its own range, 0.75 to 1.25 times that)."""
    rng = _generator(seed, epoch)
    nodes = []
    for samples, part in _canonical(counts, seed, canonical, inside=False):
        key = rng.permutation(int(part.max(initial=0)) + 1)
        samples, part = (a[np.lexsort((rng.random(len(samples)), key[part]))] for a in (samples, part))
        heads = np.flatnonzero(np.diff(part, prepend=-1))
        size = np.diff(heads, append=len(part))
        reach = np.maximum(rng.integers(int(0.75 * block), int(1.25 * block), size=len(heads)) - size, 0) / 2
        low, high = np.maximum(-reach, -heads), np.minimum(reach, len(part) - heads - size)
        moved = np.arange(len(part)) + np.repeat(low, size) + rng.random(len(part)) * np.repeat(high - low, size)
        nodes.append(samples[np.argsort(moved, kind="stable")])
    return dealt_to_ranks(in_turn(nodes), job)


def _canonical(counts: Int64s, seed: int, nodes: int, *, inside: bool) -> list[tuple[Int64s, Int64s]]:
    """Each canonical node's samples, and which of its shard parts each is of: the same in every epoch.

    ``inside``: a shard is shuffled before it is cut, so that what its parts hold is random.
    """
    rng = np.random.default_rng((seed, 1 << 30))
    shards = rng.permutation(len(counts))
    laid = _samples(counts, shards)
    if inside:
        laid = laid[np.lexsort((rng.random(len(laid)), np.repeat(np.arange(len(shards)), counts[shards])))]
    out, begin = [], 0
    for run in _runs(counts[shards], nodes):
        out.append((laid[begin : begin + len(run)], run - run.min(initial=len(counts))))
        begin += len(run)
    return out


def in_turn(streams: Sequence[Int64s]) -> Int64s:
    """One sample of each stream in turn; a stream that is empty leaves."""
    number = np.concatenate([np.full(len(s), i, dtype=np.int64) for i, s in enumerate(streams)])
    place = np.concatenate([np.arange(len(s), dtype=np.int64) for s in streams])
    return np.concatenate(streams)[np.lexsort((number, place))]


def in_batches(streams: Sequence[Int64s], job: Job) -> Int64s:
    """What the ranks see together where each worker makes whole batches of its rank, and a rank takes its workers in
    turn: stream ``rank * workers + worker``."""
    per_rank = job.batch // job.ranks
    rank = np.concatenate([np.full(len(s), i // job.workers, dtype=np.int64) for i, s in enumerate(streams)])
    step = np.concatenate(
        [np.arange(len(s)) // per_rank * job.workers + i % job.workers for i, s in enumerate(streams)]
    )
    return np.concatenate(streams)[np.lexsort((rank, step))]


def dealt_to_ranks(order: Int64s, job: Job) -> Int64s:
    """The order with each batch's samples sorted by rank, where the ranks are dealt single samples in turn."""
    position = np.arange(len(order), dtype=np.int64)
    return order[np.lexsort((position, position % job.ranks, position // job.batch))]


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.default_rng((seed, epoch))


def _first(counts: Int64s) -> Int64s:
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts)))[:-1]


def _samples(counts: Int64s, shards: Int64s) -> Int64s:
    """The samples of these shards, one shard after the other."""
    count = counts[shards]
    return np.arange(int(count.sum()), dtype=np.int64) + np.repeat(_first(counts)[shards] - _first(count), count)


def _runs(counts: Int64s, parts: int) -> list[Int64s]:
    """Shards laid end to end and cut into equal runs: for each run, the shard (by its place) of every sample."""
    laid = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    edges = [i * len(laid) // parts for i in range(parts + 1)]
    return [laid[a:b] for a, b in pairwise(edges)]


def _within(run: Int64s) -> Int64s:
    """The place of each sample in its shard's part of the run."""
    heads = np.flatnonzero(np.diff(run, prepend=-1))
    return np.arange(len(run), dtype=np.int64) - np.repeat(heads, np.diff(heads, append=len(run)))
