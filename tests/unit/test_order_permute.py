"""Keyed permutations: the same everywhere, bijective at every size, as mixed as a random order at tiny sizes too."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cachefs.errors import ConfigError
from loader.permute import Int64s, Permutations, ceil_sqrt, derive, derive_array, permutation, seed_key

SEEDS = 60_000


def images(size: int, seeds: int, elements: range) -> Int64s:
    """The images of some elements under the bijections of many keys, shape (seeds, elements)."""
    which = np.arange(seeds, dtype=np.int64)
    mixers = Permutations(np.full(seeds, size, dtype=np.int64), derive_array(11, which))
    return np.stack([mixers.apply(which, np.full(seeds, i, dtype=np.int64)) for i in elements], axis=1)


def surprise(observed: Int64s, cells: int) -> float:
    """How many standard deviations chi-square lies above what equally likely cells give."""
    expected = observed.sum() / cells
    chi = float(((observed - expected) ** 2 / expected).sum())
    return (chi - (cells - 1)) / math.sqrt(2 * (cells - 1))


def test_keys_do_not_change() -> None:
    assert derive(0) == 16294208416658607535
    assert derive(1, 2, 3) == 105800997263431414
    assert derive_array(1, np.array([2, 2]), np.array([3, -1])).tolist() == [derive(1, 2, 3), derive(1, 2, -1)]
    assert derive(1, 2, 3) != derive(1, 3, 2)


@pytest.mark.parametrize(
    ("size", "key", "expected"),
    [
        (1, 1, [0]),
        (2, 1, [1, 0]),
        (5, 1, [2, 0, 1, 4, 3]),
        (5, 2**63 + 5, [1, 0, 3, 2, 4]),
        (8, 1, [6, 0, 1, 7, 3, 4, 2, 5]),
        (10**6, 7, [940663, 908067, 262145, 762400, 53089, 871181]),
    ],
)
def test_orders_do_not_change(size: int, key: int, expected: list[int]) -> None:
    assert permutation(size, key)[:6].tolist() == expected[:6]


@pytest.mark.parametrize(
    "size", [0, 1, 2, 3, 4, 31, 32, 33, 34, 48, 49, 50, 255, 256, 257, 4095, 4097, 65_537, 300_007]
)
def test_every_size_is_a_bijection(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert np.array_equal(np.sort(permutation(size, key)), np.arange(size))


def test_many_domains_in_one_call_are_the_single_ones() -> None:
    sizes = np.array([1, 2, 32, 33, 1000, 7, 90_000], dtype=np.int64)
    keys = derive_array(5, np.arange(len(sizes)))
    mixers = Permutations(sizes, keys)
    rng = np.random.default_rng(0)
    which = rng.integers(0, len(sizes), 5_000)
    index = rng.integers(0, sizes[which])
    expected = [permutation(int(size), int(key)) for size, key in zip(sizes, keys, strict=True)]
    assert mixers.apply(which, index).tolist() == [int(expected[w][i]) for w, i in zip(which, index, strict=True)]


def test_domains_up_to_2_to_the_62_hold() -> None:
    size = 2**62 - 1
    mixers = Permutations(np.array([size]), derive_array(1, np.array([1])))
    index = np.array([0, 1, size // 2, size - 1])
    out = mixers.apply(np.zeros(4, dtype=np.int64), index)
    assert len(set(out.tolist())) == 4
    assert out.min() >= 0 and out.max() < size


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_a_tiny_domain_are_equally_likely(size: int) -> None:
    rows = images(size, SEEDS, range(size))
    codes = (rows * size ** np.arange(size)).sum(axis=1)
    _, found = np.unique(codes, return_counts=True)
    assert len(found) == math.factorial(size), "an order is never drawn"
    assert surprise(found, math.factorial(size)) < 4


@pytest.mark.parametrize("size", [7, 13, 32, 33, 36, 49, 64])
def test_two_neighbours_go_anywhere(size: int) -> None:
    for first, second in ((0, 1), (0, size - 1), (size // 2, size // 2 + 1)):
        pair = np.concatenate(
            [images(size, SEEDS, range(first, first + 1)), images(size, SEEDS, range(second, second + 1))], 1
        )
        table = np.bincount(pair[:, 0] * size + pair[:, 1], minlength=size * size).reshape(size, size)
        assert surprise(table[~np.eye(size, dtype=bool)], size * (size - 1)) < 4
        assert not table.diagonal().any()


def test_a_large_block_looks_like_a_random_order() -> None:
    size = 100_000
    out = permutation(size, 3)
    steps = np.diff(out)
    fixed = int((out == np.arange(size)).sum())
    correlation = float(np.corrcoef(out, np.arange(size))[0, 1])
    serial = float(np.corrcoef(out[:-1], out[1:])[0, 1])
    assert fixed < 10  # a random order has one on average
    assert abs(correlation) < 4 / math.sqrt(size)
    assert abs(serial) < 4 / math.sqrt(size)
    # the mean distance of neighbours is a third of the size, and a third of the triples turn neither way
    assert abs(float(np.abs(steps).mean()) / size - 1 / 3) < 0.005
    rising = float(((steps[:-1] > 0) & (steps[1:] > 0)).mean())
    assert abs(rising - 1 / 6) < 0.01
    sixteenths = np.bincount((out.reshape(16, -1) * 16 // size + 16 * np.arange(16)[:, None]).ravel(), minlength=256)
    assert surprise(sixteenths, 256) < 4


def test_roots_are_exact() -> None:
    roots = np.array([0, 1, 2, 3, 94_906_267, 2**31 - 1, 2**31], dtype=np.int64)
    squares = roots * roots
    assert ceil_sqrt(squares).tolist() == roots.tolist()
    assert ceil_sqrt(squares[1:] - 1)[1:].tolist() == roots[2:].tolist()
    assert ceil_sqrt(squares[:-1] + 1).tolist() == (roots[:-1] + 1).tolist()


def test_seeds_outside_64_bits_are_refused() -> None:
    assert seed_key(-1) == seed_key(2**64 - 1)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ConfigError, match="64 bits"):
            seed_key(seed)
