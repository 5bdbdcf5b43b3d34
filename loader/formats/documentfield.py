"""Where the documents of a shard are: 1-D arrays of integers in one field of its samples, found many at once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, DataError, FormatError, MissingField

from .abc import Format, Joined, Opened
from .bestfit import Int64s

Row = npt.NDArray[Any]
TOKENS = "iu"
MASKS = "iubf"
"""Kinds of dtypes."""

_RUN = 1 << 22
"""Tokens that are compared at a time: a file may have billions."""
_AT_ONCE = 1024
"""Samples whose lengths are found in one call, where they have to be read for that."""


class Found(NamedTuple):
    """``lengths`` of all documents, -1 for a sample that cannot be read; ``counts``: how many documents each sample
    has, ``None`` where each has one. ``endless``: the token that ends documents is nowhere."""

    lengths: npt.NDArray[Any]
    counts: Int64s | None
    endless: bool = False

    def samples(self) -> Int64s:
        """The tokens of each sample, -1 for one that cannot be read."""
        if self.counts is None:
            return self.lengths.astype(np.int64)
        if not len(self.counts):
            return np.zeros(0, np.int64)
        return np.add.reduceat(self.lengths, np.cumsum(self.counts) - self.counts, dtype=np.int64)

    def without(self, bad: npt.NDArray[np.bool_]) -> Found:
        """The same, but that these samples cannot be read."""
        if not bad.any():
            return self
        if self.counts is None:
            return self._replace(lengths=np.where(bad, -1, self.lengths))
        first = np.cumsum(self.counts) - self.counts
        lengths = self.lengths.copy()
        lengths[first[bad]] = -1
        kept = ~np.repeat(bad, self.counts)
        kept[first[bad]] = True
        return self._replace(lengths=lengths[kept], counts=np.where(bad, 1, self.counts))


@dataclass(frozen=True)
class DocumentField:
    """Where documents are: in ``field`` of a sample of ``format``. ``dtype``: of the tokens, where the field is bytes;
    ``eos_id``: the token that ends a document, where a field holds several. ``mask``: whether it says something of the
    tokens in another field, one for one, and may hold booleans and fractions. ``out``: what the tokens are delivered
    as; one that it cannot hold counts as damage."""

    format: Format
    field: str
    dtype: str | None = None
    eos_id: int | None = None
    mask: bool = False
    out: str | None = None

    @cached_property
    def wanted(self) -> frozenset[str]:
        """The field as a set: one object, which formats look up by identity."""
        return frozenset({self.field})

    def find(self, opened: Opened, url: str) -> Found:
        """All documents of a shard. Raises ``DataError`` where not one of them can be read, ``ConfigError`` where the
        token that ends them is none that the shard could hold."""
        told = None
        if self.eos_id is None:
            joined = self.joined(opened, url)
            if joined is not None:
                told = joined.lengths
                self._bounded(joined, url)
                if self.out is not None:
                    check_fit(
                        [np.empty(0, joined.values.dtype if joined.dtype is None else joined.dtype)], self.out, url
                    )
            elif self.dtype is None:
                told = self.format.lengths(opened.source, opened.index, self.field, url)
        return Found(told, None) if told is not None else self._find(opened, url)

    def _bounded(self, joined: Joined, url: str) -> None:
        """Refuse samples that overlap so that they make many times the tokens that there are."""
        tokens = int(np.maximum(joined.lengths, 0).sum(dtype=np.int64))
        there = len(joined.values) // (1 if joined.dtype is None else joined.dtype.itemsize)
        if tokens > there:
            raise FormatError(f"its samples overlap: they have {tokens} tokens, but there are {there}", url=url)

    def joined(self, opened: Opened, url: str) -> Joined | None:
        """All tokens of a shard in one array, where they lie so."""
        joined = self.format.joined(opened.source, opened.index, self.field, url)
        if joined is None or joined.dtype != np.uint8 or self.mask:
            return joined
        if self.dtype is None:
            return None  # reading them says what is wrong
        dtype = np.dtype(self.dtype).newbyteorder("<")
        items, over = np.divmod(joined.lengths.astype(np.int64), dtype.itemsize)
        lengths = np.where((joined.lengths < 0) | (over != 0), -1, items)
        return joined._replace(lengths=lengths, dtype=dtype)

    def _find(self, opened: Opened, url: str) -> Found:
        lengths, counts = array("q"), array("q")  # a file of tokens may have many millions
        wrong: DataError | None = None
        wrong_at = 0
        readable = ended = 0
        n = len(opened.index)
        for first in range(0, n, _AT_ONCE):
            for row in self._rows(opened, np.arange(first, min(first + _AT_ONCE, n)), url):
                before = len(lengths)
                if isinstance(row, DataError):
                    lengths.append(-1)
                    if wrong is None:
                        wrong, wrong_at = row, len(counts)
                else:
                    ended += self._split(row, lengths, url)
                    readable += 1
                counts.append(len(lengths) - before)
        if wrong is not None and not readable:
            raise self._hinted(wrong, opened, wrong_at, url)
        found = np.frombuffer(lengths, np.int64) if lengths else np.zeros(0, np.int64)
        if self.eos_id is None:
            return Found(found, None)
        return Found(found, np.array(counts, dtype=np.int64), not ended and bool((found > 0).any()))

    def _rows(self, opened: Opened, samples: Int64s, url: str) -> list[Row | DataError]:
        """The tokens of some samples; an error in place of those that cannot be read."""
        try:
            return list(self._fitting(opened, samples, url))
        except DataError:
            pass  # one of them: which?
        out: list[Row | DataError] = []
        for i in samples.tolist():
            try:
                out += self._fitting(opened, np.array([i]), url)
            except DataError as e:
                out.append(e.with_traceback(None))
        return out

    def _fitting(self, opened: Opened, samples: Int64s, url: str) -> list[Row]:
        rows = self.read(opened, samples, url)
        if self.out is not None:
            check_fit(rows, self.out, url)
        return rows

    def why(self, opened: Opened, sample: int, url: str) -> Row:
        """The tokens of a sample that could not be read; raises what is wrong with it, with the way out."""
        try:
            return self._fitting(opened, np.array([sample]), url)[0]
        except DataError as e:
            raise self._hinted(e, opened, sample, url) from None

    def _hinted(self, error: DataError, opened: Opened, sample: int, url: str) -> DataError:
        """With the fields that are there, where it is one that is not: they are found for the one error alone."""
        if not isinstance(error, MissingField) or error.hint is not None:
            return error
        try:
            present = ", ".join(sorted(self.format.read(opened.source, opened.index, sample, url))) or "none"
        except DataError:
            return error  # other fields of it are damaged
        option = "mask" if self.mask else "field"
        return MissingField(error.what, url=url, hint=f"Packing({option}=...) names it; fields present: {present}")

    def read(self, opened: Opened, samples: Int64s, url: str) -> list[Row]:
        """The tokens of some samples. Raises ``DataError`` for the first that has none."""
        numbers = samples.tolist()
        values: Any = None
        if self.format.columnar and len(numbers) > 1:
            values = self.format.columns(opened.source, opened.index, samples, url, self.wanted).get(self.field)
        if values is None:
            values = [self._value(opened, i, url) for i in numbers]
        kind = self.format.kind(opened.index, self.field)
        out = []
        for i, value in zip(numbers, values, strict=True):
            try:
                out.append(_as_row(value, kind, self.dtype, MASKS if self.mask else TOKENS))
            except ValueError as e:
                raise FormatError(f"field {self.field!r} of sample {i} {e}", url=url) from None
        return out

    def _value(self, opened: Opened, i: int, url: str) -> Any:
        sample = self.format.read(opened.source, opened.index, i, url, self.wanted)
        if self.field not in sample:
            raise MissingField(f"sample {i} has no field {self.field!r} to be packed", url=url)
        return sample[self.field]

    def _split(self, row: Row, lengths: array[int], url: str) -> int:
        """Append the lengths of the documents in one sample; returns how many of them end with their token."""
        if self.eos_id is None:
            lengths.append(len(row))
            return 0
        if len(row) and not np.iinfo(row.dtype).min <= self.eos_id <= np.iinfo(row.dtype).max:
            raise ConfigError(f"Packing(eos_id={self.eos_id}): tokens of dtype {row.dtype} are never that", url=url)
        before = len(lengths)
        last = 0
        for at in range(0, len(row), _RUN):
            ends = np.flatnonzero(row[at : at + _RUN] == self.eos_id) + (at + 1)
            lengths.frombytes(np.diff(ends, prepend=last).tobytes())
            last = int(ends[-1]) if len(ends) else last
        ended = len(lengths) - before
        if last < len(row) or not ended:
            lengths.append(len(row) - last)
        return ended


def _as_row(value: Any, kind: str, dtype: str | None, kinds: str) -> Row:
    """A field's value as a 1-D array of numpy's ``kinds``; a null as an empty one. ``ValueError`` says what else it
    is."""
    if value is None:
        return np.empty(0, np.int64)
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
        if kind == "npy":
            from ..decoders import to_array  # which loads nothing else

            value = to_array(value)
        elif dtype is not None:
            if len(value) % np.dtype(dtype).itemsize:
                raise ValueError(f"has {len(value)} bytes, no whole number of {dtype} tokens")
            value = value.view(np.dtype(dtype).newbyteorder("<"))
        elif kind:
            raise ValueError(f"holds {kind!r} data, no tokens")
        elif kinds == TOKENS:
            raise ValueError("holds bytes: Packing(dtype=...) says of what, such as 'uint16', or 'uint8' for these")
    elif isinstance(value, list):
        value = np.array(value) if value else np.empty(0, np.int64)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
        what = f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
        raise ValueError(f"is no row of integers but {what}")
    return value


def check_fit(rows: Sequence[Row], out: str, url: str) -> None:
    """Raise ``FormatError`` for tokens that ``out`` cannot hold.

    What is stored in 64 bits (JSON's numbers, Python's lists) says nothing of the vocabulary, so there the tokens
    themselves count; elsewhere the dtype does."""
    hint = "choose another dtype in Packing(out=...)"
    info = np.iinfo(out)
    for kind in {row.dtype for row in rows}:
        if np.can_cast(kind, out, "safe"):
            continue
        if kind.kind not in TOKENS or kind.itemsize < 8:
            what = f"holds tokens of dtype {kind}, not all of which out={out!r} can hold"
            raise FormatError(what, url=url, hint=hint)
        values = np.concatenate([row for row in rows if row.dtype == kind]) if len(rows) > 1 else rows[0]
        if not len(values):
            continue
        for value in (int(values.min()), int(values.max())):
            if not info.min <= value <= info.max:
                raise FormatError(f"holds the token {value}, which out={out!r} cannot hold", url=url, hint=hint)
