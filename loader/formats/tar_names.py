"""The names of many tar members, split into keys and fields in arrays. See :mod:`.tar_samples` for the rules."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .tar_columns import Columns, Places, Words, row_bytes

Chars = npt.NDArray[np.uint8]

_DOT, _SLASH = ord("."), ord("/")
_MARKS = (_DOT, _SLASH, 0)


class SplitNames(NamedTuple):
    """The bytes of names on both sides of a dot, zeros behind them."""

    keys: Columns
    lengths: Places
    """Of the keys; a single one if it is the same in all."""
    ends: Columns


def split_names(names: Columns, count: int, *, last_dot: bool) -> SplitNames | None:
    """``count`` names (:class:`~.tar_runs.Run`), each split at the first dot of its base name, or the last one.

    ``None`` if a name has no such dot, a hidden base name, a ``__`` at its start, or bytes behind its end.
    """
    if (names[0] & 0xFFFF == 0x5F5F).any():
        return None
    if all(_alike(column) for column in names if len(column) > 1):
        name = row_bytes(names, 0)
        base = name.rfind(b"/") + 1
        dot = name.rfind(b".", base) if last_dot else name.find(b".", base)
        return _split_at(names, dot) if dot > base and b"\0" not in name else None
    words = np.empty((count, len(names)), "<u8")
    for number, column in enumerate(names):
        words[:, number] = column
    dots = find_dots(words.view(np.uint8), last=last_dot)
    return None if dots is None else _split(words, dots)


def _alike(column: Words) -> bool:
    """Whether the marks that tell where names are split, and where they end, are at the same places in all rows."""
    chars = column.view(np.uint8)
    if not (chars <= _SLASH).any():
        return True
    for mark in _MARKS:
        places = (chars == mark).view("<u8")
        if not (places == places[0]).all():
            return False
    return True


def find_dots(chars: Chars, *, last: bool) -> Places | None:
    """The offset of the dot in each row of characters, of shape ``(names, width)``; ``None`` as in
    :func:`split_names`."""
    width = chars.shape[1]
    ended = (chars == 0).ravel()
    again = ended[:-1] > ended[1:]
    again[width - 1 :: width] = False
    if again.any():
        return None
    is_dot, is_slash = chars == _DOT, chars == _SLASH
    base = np.where(is_slash.any(axis=1), width - is_slash[:, ::-1].argmax(axis=1), 0)
    is_dot &= np.arange(width) >= base[:, None]
    dots: Places = width - 1 - is_dot[:, ::-1].argmax(axis=1) if last else is_dot.argmax(axis=1)
    return None if (dots <= base).any() or not is_dot[np.arange(len(dots)), dots].all() else dots


def _split_at(names: Columns, dot: int) -> SplitNames:
    """All names, split at one offset."""
    keys, left = list(names[: dot // 8]), dot % 8 * 8
    if left:
        keys.append(names[dot // 8] & (1 << left) - 1)
    return SplitNames(keys, np.array([dot]), _behind(names, dot + 1))


def _split(words: Words, dots: Places) -> SplitNames:
    """The names in the rows of ``words``, each split at its own offset."""
    keys, ends = words & _heads(words.shape[1])[dots], np.zeros(words.shape, "<u8")
    for dot in np.flatnonzero(np.bincount(dots)).tolist():
        rows = np.flatnonzero(dots == dot)
        for number, column in enumerate(_behind(list(words[rows].T), dot + 1)):
            ends[rows, number] = column
    return SplitNames(list(keys.T.copy()), dots, list(ends.T.copy()))


@lru_cache(maxsize=16)
def _heads(count: int) -> Words:
    """Row ``n`` leaves the first ``n`` bytes of ``count`` words."""
    places = np.arange(8 * count)
    heads: Words = np.where(places < places[:, None], np.uint8(255), np.uint8(0)).view("<u8")
    return heads


def _behind(names: Columns, at: int) -> list[Words]:
    """The bytes from ``at`` on."""
    first, bits = at // 8, at % 8 * 8
    columns = list(names[first:])
    if not bits:
        return columns
    following = [*columns[1:], np.zeros(1, np.uint64)]
    return [column >> bits | after << 64 - bits for column, after in zip(columns, following, strict=True)]
