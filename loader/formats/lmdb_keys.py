"""What the keys of an LMDB database say: which records are no samples, and which make one sample together."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Bytes
from .lmdb_pages import DUP, SUB, Ints, Records

_COUNTERS = frozenset({b"length", b"num-samples", b"num_samples"})
_PROMISE = b"num-samples"
_NUMBER = re.compile(rb"\d{1,18}")
_MEMBER = re.compile(rb"(.+)-(\d+)", re.DOTALL)
_MOST_FIELDS = 64
_UNDERSCORE = ord("_")


@dataclass(slots=True)
class Grouping:
    """Sample ``i`` has field ``names[f]`` where ``table[i, f] >= 0``: the number of its record."""

    names: tuple[str, ...]
    table: Ints


def spelled(key: bytes) -> str:
    """A key as text that encodes back to it."""
    return key.decode("utf-8", "surrogateescape")


def key_bytes(data: Bytes, records: Records) -> list[bytes]:
    raw = data.data
    return [
        bytes(raw[at : at + size]) for at, size in zip(records.key_at.tolist(), records.key_size.tolist(), strict=True)
    ]


def bookkeeping(
    data: Bytes, records: Records, skip: tuple[str, ...] | None
) -> tuple[npt.NDArray[np.bool_], int | None]:
    """Which records may be samples, and the number of samples that a ``num-samples`` record promises that is none
    itself (``None``: there is none). ``skip`` as in :class:`~.lmdb.Lmdb`."""
    names = _COUNTERS if skip is None else {name.encode("utf-8", "surrogateescape") for name in skip}
    kept = np.ones(len(records), np.bool_) if skip is not None else ~_dunder(data, records)
    places = np.flatnonzero(np.isin(records.key_size, [len(name) for name in names]))
    promised = None
    for place, key in zip(places.tolist(), key_bytes(data, records.only(places)), strict=True):
        if key not in names:
            continue
        number = _number(data, records, place) if key in _COUNTERS else None
        kept[place] = skip is None and number is None
        if key == _PROMISE and not kept[place]:
            promised = number
    return kept, promised


def _dunder(data: Bytes, records: Records) -> npt.NDArray[np.bool_]:
    """Which keys begin and end with two underscores."""
    found: npt.NDArray[np.bool_] = records.key_size >= 5
    places = np.flatnonzero(found)
    first = records.key_at[places]
    last = first + records.key_size[places] - 1
    found[places] = np.all([data[at] == _UNDERSCORE for at in (first, first + 1, last - 1, last)], axis=0)
    return found


def _number(data: Bytes, records: Records, i: int) -> int | None:
    at, size = int(records.at[i]), int(records.size[i])
    if at < 0 or size > 18 or records.flags[i] & (SUB | DUP):
        return None
    raw = data[at : at + size].tobytes()
    return int(raw) if _NUMBER.fullmatch(raw) else None


def group(data: Bytes, records: Records, url: str, promised: int | None) -> Grouping | None:
    """Records whose keys are a field's name, ``-`` and a number, by that number, in the order in which they come.

    ``None`` where ``promised`` is another count of such numbers, or keys are of another kind. Without ``promised``
    (the user asked for it) that is a ``FormatError``.
    """
    fields: dict[bytes, int] = {}
    samples: dict[bytes, int] = {}
    rows, columns = [], []
    for i, key in enumerate(key_bytes(data, records)):
        match = _MEMBER.fullmatch(key)
        if match is None or (match[1] not in fields and len(fields) == _MOST_FIELDS):
            if promised is not None:
                return None
            what = f"key {spelled(key)!r} is no field and number, such as image-000000001"
            raise FormatError(what, url=url, offset=int(records.key_at[i]), hint="formats.Lmdb(skip=(...), group=True)")
        columns.append(fields.setdefault(match[1], len(fields)))
        rows.append(samples.setdefault(match[2], len(samples)))
    if promised is not None and promised != len(samples):
        return None
    table = np.full((len(samples), len(fields)), -1, np.int64)
    table[rows, columns] = np.arange(len(rows))
    return Grouping(tuple(map(spelled, fields)), table)
