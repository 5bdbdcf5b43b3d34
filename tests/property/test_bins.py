"""Putting documents into bins: against best-fit decreasing done one piece at a time, and what holds for any lengths."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.formats.bestfit import best_fit
from loader.formats.bins import Bins, Layout, Method

METHODS: tuple[Method, ...] = ("best_fit", "sequential")
LENGTHS = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 70), st.just(16), st.just(-1)), max_size=60)
SIZES = st.sampled_from([1, 2, 7, 16, 40])
KEYS = st.one_of(st.none(), st.integers(0, 2**64 - 1))


def one_by_one(sizes: list[int], length: int) -> list[int]:
    """What is left of each bin after best-fit decreasing."""
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fits = [room for room in left if room >= size]
        if fits:
            left.remove(min(fits))
            left.append(min(fits) - size)
        else:
            left.append(length - size)
    return sorted(left)


def first_fit(sizes: list[int], length: int) -> int:
    """How many bins it takes to put each piece into the first bin with room, in the order given."""
    left: list[int] = []
    for size in sizes:
        for bin, room in enumerate(left):
            if room >= size:
                left[bin] -= size
                break
        else:
            left.append(length - size)
    return len(left)


def pieces_of(layout: Layout) -> list[list[tuple[int, int, int]]]:
    """Each bin's pieces: document, first token, tokens."""
    docs, firsts, sizes = layout.docs.tolist(), layout.firsts.tolist(), layout.sizes.tolist()
    edges = layout.starts.tolist()
    return [list(zip(docs[a:b], firsts[a:b], sizes[a:b], strict=True)) for a, b in itertools.pairwise(edges)]


@given(st.lists(st.integers(1, 63), max_size=120))
def test_groups_of_bins_are_filled_as_single_ones_are(sizes: list[int]) -> None:
    patterns = best_fit(np.bincount(sizes, minlength=64), 64)
    used: list[int] = []
    for group, count in enumerate(patterns.counts.tolist()):
        held = patterns.sizes[patterns.starts[group] : patterns.starts[group + 1]]
        used += [int(held.sum())] * count
    assert sorted(64 - total for total in used) == one_by_one(sizes, 64)
    held_by_all = np.repeat(patterns.sizes, np.repeat(patterns.counts, np.diff(patterns.starts)))
    assert sorted(held_by_all.tolist()) == sorted(sizes)


@given(LENGTHS, SIZES, st.sampled_from(METHODS), KEYS)
def test_every_token_lies_in_one_bin(lengths: list[int], length: int, method: Method, key: int | None) -> None:
    bins = Bins(np.array(lengths, np.int32), length, method)
    found = pieces_of(bins.layout(key))
    assert len(found) == bins.count
    assert bins.layout(key).nbytes > 0
    unreadable = [doc for doc, size in enumerate(lengths) if size < 0]
    good = found[: len(found) - len(unreadable)]
    assert found[len(good) :] == [[(doc, 0, 0)] for doc in unreadable]
    tokens = [(doc, first + at) for pieces in good for doc, first, size in pieces for at in range(size)]
    assert sorted(tokens) == [(doc, at) for doc, size in enumerate(lengths) for at in range(size)]
    assert bins.tokens == len(tokens)
    for pieces in good:
        assert pieces
        assert all(size > 0 for _, _, size in pieces)
        assert sum(size for _, _, size in pieces) <= length
    assert bins.padding == len(good) * length - len(tokens)


@given(LENGTHS, SIZES, KEYS)
def test_best_fit_cuts_long_documents_alone(lengths: list[int], length: int, key: int | None) -> None:
    for pieces in pieces_of(Bins(np.array(lengths, np.int64), length, "best_fit").layout(key)):
        for doc, first, size in pieces:
            assert first % length == 0
            assert size == min(length, max(lengths[doc], 0) - first)


@given(LENGTHS, SIZES, KEYS)
def test_sequential_leaves_room_in_the_last_bin_alone(lengths: list[int], length: int, key: int | None) -> None:
    bins = Bins(np.array(lengths, np.int64), length, "sequential")
    good = [pieces for pieces in pieces_of(bins.layout(key)) if pieces[0][2]]
    assert all(sum(size for _, _, size in pieces) == length for pieces in good[:-1])
    laid = [piece for pieces in good for piece in pieces]
    for (doc, first, size), (then, begin, _) in itertools.pairwise(laid):
        assert (then, begin) == (doc, first + size) or (begin == 0 and first + size == lengths[doc])
    if key is None:
        assert [doc for doc, first, _ in laid if first == 0] == [d for d, size in enumerate(lengths) if size > 0]


@given(LENGTHS, SIZES, st.sampled_from(METHODS), st.integers(0, 2**64 - 1))
def test_lengths_alone_say_how_many_bins_there_are(lengths: list[int], length: int, method: Method, key: int) -> None:
    bins = Bins(np.array(lengths, np.int32), length, method)
    other = Bins(np.array(lengths[::-1], np.int64), length, method)
    assert other.count == bins.count
    for sizes in (bins.layout(key), bins.layout(None), other.layout(key ^ 1)):
        assert len(sizes.starts) == bins.count + 1
    if method == "best_fit":  # and what a bin is made of

        def made(layout: Layout) -> list[list[int]]:
            return [[size for _, _, size in pieces] for pieces in pieces_of(layout)]

        assert made(bins.layout(key)) == made(bins.layout(None)) == made(other.layout(key))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("length", [512, 2048])
def test_best_fit_takes_no_more_bins_than_first_fit_does(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(5, 1, 1500), 1, length - 1).astype(int)
    count = Bins(sizes, length, "best_fit").count
    assert math.ceil(sizes.sum() / length) <= count <= first_fit(sizes.tolist(), length)


def test_another_key_mixes_documents_anew() -> None:
    lengths = np.random.default_rng(0).integers(1, 20, 400)
    for method in METHODS:
        bins = Bins(lengths, 32, method)
        together: list[Any] = [
            [frozenset(doc for doc, _, _ in pieces) for pieces in pieces_of(bins.layout(key))] for key in (1, 2, 1)
        ]
        assert together[0] == together[2]
        assert len(set(together[0]) & set(together[1])) < bins.count // 10


def test_the_same_key_means_the_same_bins_everywhere() -> None:
    """What was made with this version; another one needs a new version in the data set's digest."""
    lengths = np.array([5, 3, 40, 0, 16, 7, 3, -1, 9, 5, 2, 5], np.int32)
    best = pieces_of(Bins(lengths, 16, "best_fit").layout(1234))
    assert best == GOLDEN_BEST
    assert pieces_of(Bins(lengths, 16, "sequential").layout(1234)) == GOLDEN_SEQUENTIAL


GOLDEN_BEST = [
    [(2, 0, 16)],
    [(2, 16, 16)],
    [(4, 0, 16)],
    [(8, 0, 9), (5, 0, 7)],
    [(2, 32, 8), (0, 0, 5), (6, 0, 3)],
    [(11, 0, 5), (9, 0, 5), (1, 0, 3), (10, 0, 2)],
    [(7, 0, 0)],
]
GOLDEN_SEQUENTIAL = [
    [(9, 0, 5), (11, 0, 5), (2, 0, 6)],
    [(2, 6, 16)],
    [(2, 22, 16)],
    [(2, 38, 2), (5, 0, 7), (0, 0, 5), (4, 0, 2)],
    [(4, 2, 14), (10, 0, 2)],
    [(6, 0, 3), (8, 0, 9), (1, 0, 3)],
    [(7, 0, 0)],
]


def test_a_million_documents_are_few_steps() -> None:
    """The work follows the number of different lengths; done one by one this would take hours."""
    lengths = np.clip(np.random.default_rng(1).lognormal(6, 1.2, 10**6), 0, 10**6).astype(np.int32)
    bins = Bins(lengths, 4096, "best_fit")
    layout = bins.layout(7)
    assert int(layout.sizes.sum(dtype=np.int64)) == bins.tokens
    assert bins.padding < bins.tokens // 1000
