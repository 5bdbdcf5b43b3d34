"""Passing over structures of Thrift's compact protocol at the speed of regular expressions.

Nothing in the protocol says how long a structure is: every field must be looked at, and a Parquet footer of many row
groups and columns holds hundreds of thousands. Their structures nest in a fixed way, though (a column chunk has
metadata, which has statistics), and what nests in a fixed way can be told by one expression. It matches less than the
protocol allows, never more; a structure that it does not match is walked field by field.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

_LONGEST = 127
"""Bytes of a text (a statistic), and below of each in a list (a column's path)."""
_LONGEST_NAME = 63
_NAMES = 4
_ITEMS = 14
"""What the short form of a list may hold."""


@cache
def usual_struct() -> re.Pattern[bytes]:
    """What matches a structure of the shape of a column chunk, from the byte behind its head to its last one.

    Possessive throughout: no byte is looked at twice for one place where it is tried.
    """
    number = _heads(4, 5, 6) + _VARINT
    flag = _heads(1, 2)
    text = _heads(8) + _sized(_LONGEST)
    numbers = _heads(9) + _any(b"[\\x%x4-\\x%x6]" % (n, n) + _times(_VARINT, n) for n in range(_ITEMS + 1))
    texts = _heads(9) + _any(b"\\x%x8" % n + _times(_sized(_LONGEST_NAME), n) for n in range(_NAMES + 1))
    counts = _struct(number)
    structs = _heads(9) + _any(b"\\x%xc" % n + _times(counts, n) for n in range(_ITEMS + 1))
    statistics = _heads(12) + _struct(number, text, flag, numbers)
    metadata = _heads(12) + _struct(number, numbers, texts, structs, statistics, text, flag)
    return re.compile(_struct(number, metadata, text), re.DOTALL)


_VARINT = rb"[\x80-\xff]{0,9}+[\x00-\x7f]"


def _heads(*kinds: int) -> bytes:
    """The byte before a field of one of these types, in its short form: the number's step, the type."""
    return b"[" + b"".join(b"\\x%x%x" % (step, kind) for step in range(1, 16) for kind in kinds) + b"]"


def _sized(most: int) -> bytes:
    """Bytes behind their number."""
    return _any(b"\\x%02x.{%d}" % (n, n) for n in range(most + 1))


def _struct(*fields: bytes) -> bytes:
    return b"(?:" + b"|".join(fields) + b")*+\\x00"


def _any(choices: Iterable[bytes]) -> bytes:
    return b"(?:" + b"|".join(choices) + b")"


def _times(what: bytes, count: int) -> bytes:
    return b"(?:%s){%d}" % (what, count)
