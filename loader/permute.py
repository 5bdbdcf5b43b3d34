"""Keyed permutations with random access: the only source of randomness in the order.

Everything here is defined by integer arithmetic modulo 2**64 and nothing else, so the same seed gives the same order
on every machine and with every numpy version, for as long as ``loader.lanes.ORDER_VERSION`` stands. numpy's own
generators promise no such thing.

* :func:`derive` and :func:`derive_array` turn a key and some integers into a new 64-bit key. The mixer is the finaliser
  of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
* :class:`Permutations` holds one bijection of ``range(n)`` for each of many ``n``; any image costs a bounded number of
  operations and no memory. For n > 32 it is a Feistel network over Z_a x Z_b with a*b just above n (Black and Rogaway:
  "Ciphers with arbitrary finite domains", 2002, the generalised Feistel with cycle walking), of which only about one
  value in sqrt(n) has to be walked. For a tiny n such a network reaches too few of the n! orders; there a Fisher-Yates
  shuffle is followed for the one element asked for, which takes n - 1 steps and is uniform.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError

Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
UInt64s: TypeAlias = npt.NDArray[np.uint64]

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MUL1: Final = 0xBF58476D1CE4E5B9
_MUL2: Final = 0x94D049BB133111EB
_ROUNDS: Final = 8  # with 6 a test of pairs over many keys still tells it from a random permutation
_TINY: Final = 32
_U32: Final = np.uint64(32)


def seed_key(seed: int) -> int:
    """The user's seed as a 64-bit key; negative seeds are taken modulo 2**64 as torch does. Raises ConfigError."""
    if not -(2**63) <= seed < 2**64:
        raise ConfigError(f"seed {seed} does not fit into 64 bits", hint="use a seed from 0 to 2**64 - 1")
    return derive(seed & _MASK)


def _mix(x: int) -> int:
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MUL1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL2) & _MASK
    return x ^ (x >> 31)


def derive(key: int, *parts: int) -> int:
    """A new 64-bit key from a key and integers; other parts, or the same in another order, give an unrelated one."""
    key = _mix(key & _MASK)
    for part in parts:
        key = _mix(key ^ _mix(part & _MASK))
    return key


def _mix_array(x: UInt64s) -> UInt64s:
    x = x + np.uint64(_GOLDEN)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MUL1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MUL2)
    x ^= x >> np.uint64(31)
    return x


def derive_array(key: int, *parts: Int64s) -> UInt64s:
    """:func:`derive` for arrays of parts of one shape: element i is ``derive(key, parts[0][i], parts[1][i], ...)``."""
    keys = np.full(parts[0].shape, _mix(key & _MASK), dtype=np.uint64)
    for part in parts:
        keys = _mix_array(keys ^ _mix_array(part.astype(np.uint64)))
    return keys


def ceil_sqrt(n: Int64s) -> Int64s:
    """The smallest s with s*s >= n, exact for 0 <= n < 2**62."""
    root: Int64s = np.sqrt(n.astype(np.float64)).astype(np.int64)
    root -= root * root >= n  # the float root may be one too large ...
    root += root * root < n  # ... or, after that, one or two too small
    root += root * root < n
    np.maximum(root, 0, out=root)
    return root


class Permutations:
    """One keyed bijection of ``range(sizes[i])`` for every i. Immutable; O(len(sizes)) memory.

    ``sizes`` (int64, each < 2**62) and ``keys`` (uint64) have one shape ``(m,)``.
    """

    def __init__(self, sizes: Int64s, keys: UInt64s) -> None:
        rows = np.maximum(ceil_sqrt(sizes), 1)
        self._size = sizes.astype(np.uint64)
        self._rows = rows.astype(np.uint64)
        self._cols = np.maximum(-(-sizes // rows), 1).astype(np.uint64)
        self._key = keys

    def apply(self, which: Int64s, index: Int64s) -> Int64s:
        """Images under the bijections ``which`` of ``index``; all three arrays have one shape ``(k,)``.

        ``index[j]`` must lie in ``range(sizes[which[j]])``.
        """
        size, key, value = self._size[which], self._key[which], index.astype(np.uint64)
        tiny = size <= _TINY
        if not tiny.any():
            out = _network(value, size, self._rows[which], self._cols[which], key)
        elif tiny.all():
            out = _shuffle(value, size, key)
        else:
            out = np.empty_like(value)
            out[tiny] = _shuffle(value[tiny], size[tiny], key[tiny])
            large = ~tiny
            place = which[large]
            out[large] = _network(value[large], size[large], self._rows[place], self._cols[place], key[large])
        return out.astype(np.int64)


def _shuffle(x: UInt64s, size: UInt64s, key: UInt64s) -> UInt64s:
    """Where a Fisher-Yates shuffle of ``range(size)``, drawn from ``key``, puts the element ``x``."""
    for last in range(int(size.max(initial=1)) - 1, 0, -1):
        top = np.uint64(last)
        other = _below(key + np.uint64(last * _GOLDEN & _MASK), np.uint64(last + 1))
        swapped = np.where(x == top, other, np.where(x == other, top, x))
        x = np.where(size > top, swapped, x)
    return x


def _network(x: UInt64s, size: UInt64s, rows: UInt64s, cols: UInt64s, key: UInt64s) -> UInt64s:
    out = _feistel(x, rows, cols, key)
    # Cycle walking: an image outside range(size) is mapped again until it is inside. It ends because the network is a
    # bijection of range(rows * cols), so the walk must come back to where it started, which is inside.
    outside = np.flatnonzero(out >= size)
    while outside.size:
        again = _feistel(out[outside], rows[outside], cols[outside], key[outside])
        out[outside] = again
        outside = outside[again >= size[outside]]
    return out


def _feistel(x: UInt64s, rows: UInt64s, cols: UInt64s, key: UInt64s) -> UInt64s:
    left, right = np.divmod(x, cols)
    step = key.copy()
    for i in range(_ROUNDS):
        if i % 2:
            right = _turn(right, left + step, cols)
        else:
            left = _turn(left, right + step, rows)
        step += np.uint64(_GOLDEN)
    left *= cols
    left += right
    return left


def _turn(half: UInt64s, seed: UInt64s, modulus: UInt64s) -> UInt64s:
    """(half + hash of seed) mod modulus, for half < modulus. ``seed`` is used up."""
    turned = _below(seed, modulus)
    turned += half
    # turned < 2 * modulus; below modulus the difference wraps to a huge number and the minimum keeps the first
    np.minimum(turned, turned - modulus, out=turned)
    return turned


def _below(seed: UInt64s, modulus: UInt64s | np.uint64) -> UInt64s:
    """A hash of seed that lies in range(modulus), for modulus <= 2**32. ``seed`` is used up."""
    seed *= np.uint64(_MUL1)
    seed ^= seed >> _U32
    seed *= np.uint64(_MUL2)
    seed >>= _U32
    seed *= modulus  # 32 random bits times modulus, shifted right by 32: below modulus without a division
    seed >>= _U32
    return seed


def permutation(size: int, key: int) -> Int64s:
    """The whole bijection of ``range(size)`` under ``key`` as an array (what :class:`Permutations` computes singly)."""
    one = Permutations(np.array([size], dtype=np.int64), np.array([key], dtype=np.uint64))
    return one.apply(np.zeros(size, dtype=np.int64), np.arange(size, dtype=np.int64))
