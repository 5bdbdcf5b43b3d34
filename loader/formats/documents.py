"""Documents: 1-D arrays of integers in one field of the samples of a shard, found and read many at once."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import DataError, FormatError, MissingField

from .abc import Format, Joined, Opened
from .bins import Int64s

Row = npt.NDArray[Any]
TOKENS = "iu"
MASKS = "iub"
"""Kinds of dtypes."""

_RUN = 1 << 22
"""Tokens that are compared at a time: a file may have billions."""
_AT_ONCE = 1024
"""Samples whose lengths are found in one call, where they have to be read for that."""


class Found(NamedTuple):
    """``lengths`` of all documents, -1 for a sample that cannot be read; ``counts``: how many documents each sample
    has, ``None`` where each has one."""

    lengths: npt.NDArray[Any]
    counts: Int64s | None


@dataclass(frozen=True)
class DocumentField:
    """Where documents are: in ``field`` of a sample of ``format``. ``dtype``: of the tokens, where the field is bytes;
    ``eos_id``: the token that ends a document, where a field holds several. ``mask``: whether it says something of the
    tokens in another field, one for one, and may hold booleans."""

    format: Format
    field: str
    dtype: str | None = None
    eos_id: int | None = None
    mask: bool = False

    @cached_property
    def wanted(self) -> frozenset[str]:
        """The field as a set: one object, which formats look up by identity."""
        return frozenset({self.field})

    def find(self, opened: Opened, url: str) -> Found:
        """All documents of a shard. Raises ``DataError`` where not one of them can be read."""
        told = None
        if self.eos_id is None:
            joined = self.joined(opened, url)
            if joined is not None:
                told = joined.lengths
            elif self.dtype is None:
                told = self.format.lengths(opened.source, opened.index, self.field, url)
        return Found(told, None) if told is not None else self._find(opened, url)

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
        readable = 0
        n = len(opened.index)
        for first in range(0, n, _AT_ONCE):
            for row in self._rows(opened, np.arange(first, min(first + _AT_ONCE, n)), url):
                before = len(lengths)
                if isinstance(row, DataError):
                    lengths.append(-1)
                    wrong = wrong or row
                else:
                    lengths.frombytes(self._split(row).tobytes())
                    readable += 1
                counts.append(len(lengths) - before)
        if wrong is not None and not readable:
            raise wrong
        found = np.array(lengths, dtype=np.int64)
        return Found(found, None if self.eos_id is None else np.array(counts, dtype=np.int64))

    def _rows(self, opened: Opened, samples: Int64s, url: str) -> list[Row | DataError]:
        """The tokens of some samples; an error in place of those that cannot be read."""
        try:
            return list(self.read(opened, samples, url))
        except DataError:
            pass  # one of them: which?
        out: list[Row | DataError] = []
        for i in samples.tolist():
            try:
                out += self.read(opened, np.array([i]), url)
            except DataError as e:
                out.append(e.with_traceback(None))
        return out

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
            present = ", ".join(sorted(self.format.read(opened.source, opened.index, i, url))) or "none"
            raise MissingField(
                f"sample {i} has no field {self.field!r} to be packed",
                url=url,
                hint=f"Packing(field=...) names it; fields present: {present}",
            )
        return sample[self.field]

    def _split(self, row: Row) -> Int64s:
        """The lengths of the documents in one sample."""
        if self.eos_id is None:
            return np.array([len(row)], dtype=np.int64)
        runs = [np.flatnonzero(row[at : at + _RUN] == self.eos_id) + (at + 1) for at in range(0, len(row), _RUN)]
        ends = np.concatenate([[0], *runs])
        if ends[-1] < len(row):
            ends = np.append(ends, len(row))
        return np.diff(ends) if len(ends) > 1 else np.zeros(1, np.int64)


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


class Documents:
    """The documents of one open shard, by number."""

    def __init__(self, field: DocumentField, opened: Opened, found: Found) -> None:
        self._field = field
        self._opened = opened
        self.lengths = found.lengths
        counts = found.counts
        self._sample: Int64s | None = None
        self._base: Int64s | None = None
        self._sizes: npt.NDArray[Any] = found.lengths
        if counts is not None:
            self._sample = np.repeat(np.arange(len(counts)), counts)
            ends = np.cumsum(np.maximum(found.lengths, 0), dtype=np.int64)
            firsts = np.cumsum(counts) - counts
            before = np.concatenate([[0], ends])
            self._base = before[:-1] - np.repeat(before[firsts], counts)
            self._sizes = before[firsts + counts] - before[firsts]
        self._joined: Joined | None = None
        self._asked = False

    def pieces(self, docs: Int64s, firsts: Int64s, sizes: Int64s, url: str) -> list[Row]:
        """``sizes[k]`` tokens of document ``docs[k]`` from its token ``firsts[k]`` on; views where the format allows.

        Raises ``DataError`` for one that cannot be read, or has another length than when the shard was indexed."""
        samples = docs if self._sample is None else self._sample[docs]
        at = firsts if self._base is None else self._base[docs] + firsts
        joined = self._at_once(url)
        if joined is None:
            return self._read(samples, at, sizes, url)
        if joined.dtype is None:
            begins = joined.starts[samples].astype(np.int64) + at
            ends = begins + sizes
        else:
            begins = joined.starts[samples].astype(np.int64) + at * joined.dtype.itemsize
            ends = begins + sizes * joined.dtype.itemsize
        if int(begins.min()) < 0 or int(ends.max()) > len(joined.values):
            bad = int(samples[int(np.argmax((begins < 0) | (ends > len(joined.values))))])
            raise FormatError(f"sample {bad} lies outside of the shard: the index has changed", url=url)
        values, dtype = joined.values, joined.dtype
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        if dtype is None:
            return [values[a:b] for a, b in spans]
        return [values[a:b].view(dtype) for a, b in spans]

    def _at_once(self, url: str) -> Joined | None:
        if not self._asked:
            joined = self._field.joined(self._opened, url)
            if joined is not None and np.array_equal(joined.lengths, self._sizes):
                self._joined = joined  # else some are not what was indexed: reading them says which
            self._asked = True
        return self._joined

    def refuse(self, doc: int, url: str) -> None:
        """Raise why a document could not be read when the shard was indexed."""
        none = np.zeros(1, np.int64)
        self._read(np.array([doc]) if self._sample is None else self._sample[[doc]], none, none, url)
        raise FormatError(f"document {doc} is empty", url=url)

    def _read(self, samples: Int64s, at: Int64s, sizes: Int64s, url: str) -> list[Row]:
        rows = self._field.read(self._opened, samples, url)
        out = []
        known = self._sizes[samples].tolist()
        for i, row, size, a, n in zip(samples.tolist(), rows, known, at.tolist(), sizes.tolist(), strict=True):
            if len(row) != size:
                raise FormatError(self._other(i, len(row), size), url=url)
            out.append(row[a : a + n])
        return out

    def _other(self, i: int, there: int, known: int) -> str:
        if known < 0:
            return f"sample {i} could not be read when the shard was indexed"
        if self._field.mask:
            return f"field {self._field.field!r} of sample {i} has {there} values for {known} tokens"
        return f"sample {i} has {there} tokens, it had {known} when the shard was indexed"
