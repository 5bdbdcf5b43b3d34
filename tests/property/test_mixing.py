"""Which source each position of a mixture is taken from, against a plain model of the definition."""

from __future__ import annotations

import heapq
from fractions import Fraction
from itertools import accumulate
from math import floor
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cachefs.errors import ConfigError
from loader.epochs import OrderSettings
from loader.mixing import MOST, MOST_SHARES, Mixing, exact_shares, tempered
from loader.mixtureorder import EpochCut, MixtureSettings, MixtureWords
from loader.permute import derive, permutation, seed_key

SHARES = st.lists(st.integers(0, 9) | st.integers(0, 10**6), min_size=1, max_size=9).filter(any)
MIXINGS = st.builds(
    lambda shares, block, seed: Mixing(tuple(shares), block, seed),
    SHARES,
    st.sampled_from([1, 2, 3, 7, 16, 33, 64, 256]),
    st.integers(-(2**63), 2**64 - 1),
)


def split(shares: tuple[int, ...], whole: int) -> list[int]:
    """``whole`` positions given to sources by the tree, recursively and in exact arithmetic."""
    heap: list[tuple[int, int, object]] = [(share, at, at) for at, share in enumerate(shares) if share]
    heapq.heapify(heap)
    made = len(shares)
    while len(heap) > 1:
        one, other = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (one[0] + other[0], made, (one, other)))
        made += 1
    out = [0] * len(shares)

    def give(node: tuple[int, int, object], count: int) -> None:
        if isinstance(node[2], int):
            out[node[2]] = count
            return
        assert isinstance(node[2], tuple)
        one, other = node[2]
        part = floor(Fraction(count * one[0], node[0]) + Fraction(1, 2))
        give(one, part)
        give(other, count - part)

    give(heap[0], whole)
    return out


def model(mixing: Mixing, blocks: int) -> list[tuple[int, int]]:
    """(source, number) of the positions of the first blocks, one by one."""
    out: list[tuple[int, int]] = []
    counts = [0] * len(mixing.shares)
    for block in range(blocks):
        before, after = (split(mixing.shares, mixing.block * b) for b in (block, block + 1))
        row = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) for _ in range(new - old)]
        key = derive(derive(seed_key(mixing.seed), 0x6D6978), block)
        for place in permutation(mixing.block, key).tolist():
            out.append((row[place], counts[row[place]]))
            counts[row[place]] += 1
    return out


@given(MIXINGS, st.data())
@settings(max_examples=60, deadline=None)
def test_positions_are_those_of_the_definition(mixing: Mixing, data: st.DataObject) -> None:
    blocks = max(1, min(12, 400 // mixing.block))
    expected = model(mixing, blocks)
    source, number = mixing.locate(np.arange(len(expected), dtype=np.int64))
    assert list(zip(source.tolist(), number.tolist(), strict=True)) == expected
    some = np.array(data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=30)), dtype=np.int64)
    source, number = mixing.locate(some)  # any of them, in any order
    assert list(zip(source.tolist(), number.tolist(), strict=True)) == [expected[at] for at in some.tolist()]
    upto = data.draw(st.integers(0, len(expected)))
    taken = [sum(source == at for source, _ in expected[:upto]) for at in range(len(mixing.shares))]
    assert mixing.taken(upto).tolist() == taken


@given(MIXINGS, st.data())
@settings(max_examples=60, deadline=None)
def test_after_so_many_positions_a_source_has_been_read_so_often(mixing: Mixing, data: st.DataObject) -> None:
    blocks = max(1, min(20, 600 // mixing.block))
    source, number = mixing.locate(np.arange(blocks * mixing.block, dtype=np.int64))
    there = np.bincount(source, minlength=len(mixing.shares)).tolist()
    wanted = [data.draw(st.integers(0, count)) for count in there]
    for at, (want, position) in enumerate(zip(wanted, mixing.reached(wanted), strict=True)):
        last = np.flatnonzero((source == at) & (number == want - 1))
        assert position == (0 if want == 0 else last[0] + 1)


@given(
    st.lists(st.integers(0, 9) | st.floats(0, 1) | st.floats(0, 1).map(lambda x: x**20), min_size=1, max_size=60),
    st.integers(0, 2**30),
    st.integers(1, 2**17),
)
@settings(deadline=None)
def test_no_source_is_two_positions_from_its_share_and_none_is_ever_taken_back(
    weights: list[float], block: int, size: int
) -> None:
    if not any(weights):
        return
    shares = exact_shares(weights)
    mixing = Mixing(shares, size, 0)
    totals = mixing.totals(np.arange(block, block + 4, dtype=np.int64))
    assert (totals.sum(axis=1) == np.arange(block, block + 4) * size).all()
    assert (np.diff(totals, axis=0) >= 0).all()
    for row, whole in zip(totals.tolist(), range(block * size, (block + 4) * size, size), strict=True):
        for count, share in zip(row, shares, strict=True):
            assert abs(Fraction(whole * share, sum(shares)) - count) < 2
            assert share or not count


@given(MIXINGS, st.integers(0, 2**47))
@settings(max_examples=30, deadline=None)
def test_positions_far_behind_are_as_near(mixing: Mixing, far: int) -> None:
    far -= far % mixing.block
    source, number = mixing.locate(np.arange(far, far + 2 * mixing.block, dtype=np.int64))
    counts = mixing.taken(far).tolist()
    for at, k in zip(source.tolist(), number.tolist(), strict=True):
        assert k == counts[at]
        counts[at] += 1
    assert mixing.taken(far + 2 * mixing.block).tolist() == counts


def test_the_order_of_a_mixture_stays_what_it_is() -> None:
    """A change of this breaks the states of running jobs: then ``MIXING_VERSION`` has to change too."""
    source, number = Mixing((6, 3, 1), 8, 7).locate(np.arange(24, dtype=np.int64))
    assert source.tolist() == [0, 0, 0, 2, 0, 1, 0, 1, 2, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 1]
    assert number.tolist() == [0, 1, 2, 0, 3, 0, 4, 1, 1, 2, 5, 6, 3, 7, 8, 9, 10, 11, 12, 4, 2, 13, 5, 6]
    far = Mixing(exact_shares([0.5, 0.25, 1e-3, 0.2]), 256, -1).locate(np.arange(10**9, 10**9 + 8, dtype=np.int64))
    assert [column.tolist() for column in far] == [
        [3, 1, 0, 0, 0, 0, 3, 0],
        [210304942, 262881178, 525762355, 525762356, 525762357, 525762358, 210304943, 525762359],
    ]


class TestShares:
    @pytest.mark.parametrize(
        ("weights", "shares"),
        [
            ([0.7, 0.3], (7, 3)),
            ([3, 1], (3, 1)),
            ([0.5, 0, 1], (1, 0, 2)),
            ([5], (1,)),
            ([0.1, 0.2, 0.7], (1, 2, 7)),
            ([10**12, 10**12], (1, 1)),
        ],
    )
    def test_what_is_written_is_meant(self, weights: list[float], shares: tuple[int, ...]) -> None:
        assert exact_shares(weights) == shares

    @given(st.lists(st.floats(0, 1e12) | st.integers(0, 10**12), min_size=1, max_size=40).filter(any))
    @example([1e-300, 1.0])
    @example([1.0] + [1e-12] * 30)
    def test_they_can_be_worked_with_and_are_near(self, weights: list[float]) -> None:
        shares = exact_shares(weights)
        assert sum(shares) <= MOST_SHARES
        whole = sum(map(Fraction, weights))
        for weight, share in zip(weights, shares, strict=True):
            assert (share > 0) == (weight > 0)
            assert abs(Fraction(share, sum(shares)) - Fraction(weight) / whole) < Fraction(len(weights) + 1, 2**29)

    @pytest.mark.parametrize("weights", [[], [0, 0], [-1, 2], [float("nan")], [float("inf"), 1], [True], ["1"]])
    def test_others_are_refused(self, weights: list[float]) -> None:
        with pytest.raises(ConfigError):
            exact_shares(weights)

    def test_a_temperature_makes_them_more_alike(self) -> None:
        assert exact_shares(tempered([900, 100], 1)) == (9, 1)
        assert tempered([900, 0, 100], 2) == (1.0, 0.0, 0.333333333)
        assert tempered([900, 0, 100], float("inf")) == (1.0, 0.0, 1.0)
        assert tempered([5, 0, 5], 3) == (1.0, 0.0, 1.0)
        for wrong in (0, -1, float("nan"), True, "2"):
            with pytest.raises(ConfigError, match="temperature"):
                tempered([1, 2], wrong)  # type: ignore[arg-type]

    def test_a_weight_too_small_for_its_source_is_told(self) -> None:
        with pytest.raises(ConfigError, match="source 1"):
            Mixing((2**29, 1), 256, 0).reached([1, 10**9])


@given(st.integers(1, 200), st.integers(1, 50), st.sampled_from(["up", "down", None]), st.integers(0, 250))
def test_an_epoch_ends_where_its_batches_do(length: int, batch: int, whole: Any, position: int) -> None:
    cut = EpochCut(length, batch, whole)
    end = cut.end(0)
    if whole == "up":
        assert length <= end < length + batch and end % batch == 0
    elif whole == "down" and length >= batch:
        assert length - batch < end <= length and end % batch == 0
    else:
        assert end == length
    for at in range(0, end + 1 if length >= batch else 1, batch):
        assert cut.end(at) == end  # the same from every batch on the way
    if whole is not None and position:
        rest = cut.end(position) - position  # of batches of another size
        assert rest % batch == 0 and rest - max(length - position, 0) in range(1 - batch, batch)


SETTINGS = st.builds(
    OrderSettings,
    seed=st.integers(-(2**63), 2**64 - 1),
    lanes=st.integers(1, 2**30),
    block_shards=st.integers(1, 2**30),
    shuffle=st.booleans(),
    exchange=st.booleans(),
    balance=st.sampled_from(["bytes", "samples"]),
    cut=st.booleans(),
)


@given(st.integers(-(2**63), 2**64 - 1), st.lists(st.tuples(st.integers(0, MOST), SETTINGS), min_size=1, max_size=5))
def test_settings_come_back_from_their_words(seed: int, sources: list[tuple[int, OrderSettings]]) -> None:
    offsets, of = zip(*sources, strict=True)
    made = MixtureSettings(seed, 256, 3, 2**40, 2**41, offsets, of)
    words = MixtureWords(len(sources))
    packed = list(accumulate(words.pack(made), lambda _, word: word))
    assert len(packed) == words.count
    assert words.unpack(np.array(packed, dtype=np.int64).tolist()) == made
