"""The documents of an open shard, pieces of which are read many at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Joined, Opened
from .bestfit import Int64s
from .bins import least_dtype
from .documentfield import DocumentField, Found, Row

KEPT = 32 << 20
"""Bytes of samples that were read in part, kept for their other parts."""


class Places(NamedTuple):
    """Where documents lie: document ``d`` in sample ``sample[d]`` from its token ``base[d]`` on (``None``: each is a
    sample). ``sizes``: the tokens of samples, -1 for one that cannot be read."""

    sample: npt.NDArray[Any] | None
    base: npt.NDArray[Any] | None
    sizes: npt.NDArray[Any]

    @property
    def nbytes(self) -> int:
        """The memory that it takes beside what it was made of."""
        if self.sample is None or self.base is None:
            return 0
        return self.sample.nbytes + self.base.nbytes + self.sizes.nbytes

    @classmethod
    def of(cls, found: Found) -> Places:
        counts = found.counts
        if counts is None:
            return cls(None, None, found.lengths)
        sizes = found.samples()
        longest = int(sizes.max(initial=0))
        base = np.cumsum(found.lengths, dtype=np.int64)
        base -= found.lengths
        firsts = np.cumsum(counts) - counts
        base -= np.repeat(base[firsts], counts)
        base = base.astype(least_dtype(longest))
        return cls(np.repeat(np.arange(len(counts), dtype=least_dtype(len(counts))), counts), base, sizes)


class Documents:
    """The documents of one open shard, by number. For any number of threads, if the format's source is.

    ``places``: where they lie; of a mask, where the tokens do that it tells of."""

    def __init__(self, field: DocumentField, opened: Opened, lengths: npt.NDArray[Any], places: Places) -> None:
        self._field = field
        self._opened = opened
        self.lengths = lengths
        self._places = places
        self._joined: Joined | None = None
        self._asked = False
        self._kept = _Kept()

    @property
    def name(self) -> str:
        """The field that they are in."""
        return self._field.field

    def pieces(self, docs: Int64s, firsts: Int64s, sizes: Int64s, url: str) -> list[Row]:
        """``sizes[k]`` tokens of document ``docs[k]`` from its token ``firsts[k]`` on; views where the format allows.

        Raises ``DataError`` for one that cannot be read, or has another length than when the shard was indexed."""
        sample, base, _ = self._places
        samples = docs if sample is None else sample[docs].astype(np.int64)
        at = firsts if base is None else base[docs].astype(np.int64) + firsts
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
            sizes = self._places.sizes
            if (
                joined is not None
                and len(joined.lengths) == len(sizes)
                and (
                    (joined.lengths == sizes) | (sizes < 0)  # these are not read as samples, whatever is there
                ).all()
            ):
                self._joined = joined  # else some are not what was indexed: reading them says which
            self._asked = True
        return self._joined

    def why(self, doc: int, url: str) -> tuple[int, Row]:
        """The sample of a document that could not be read when the shard was indexed, and its tokens. Raises what is
        wrong with them."""
        sample = doc if self._places.sample is None else int(self._places.sample[doc])
        return sample, self._field.why(self._opened, sample, url)

    def _read(self, samples: Int64s, at: Int64s, sizes: Int64s, url: str) -> list[Row]:
        numbers, back = np.unique(samples, return_inverse=True)
        rows = self._whole(numbers, url)
        out = []
        for i, a, n in zip(back.tolist(), at.tolist(), sizes.tolist(), strict=True):
            row = rows[i]
            if n < len(row):
                self._kept.keep(int(numbers[i]), row)
            out.append(row[a : a + n])
        return out

    def _whole(self, numbers: Int64s, url: str) -> list[Row]:
        """All tokens of some different samples."""
        kept = [self._kept.get(i) for i in numbers.tolist()]
        missing = [k for k, row in enumerate(kept) if row is None]
        if missing:
            for k, row in zip(missing, self._field.read(self._opened, numbers[missing], url), strict=True):
                self._check(int(numbers[k]), len(row), url)
                kept[k] = row
        return [row for row in kept if row is not None]

    def _check(self, sample: int, there: int, url: str) -> None:
        known = int(self._places.sizes[sample])
        if there == known:
            return
        if known < 0:
            raise unreadable(sample, url)
        if self._field.mask:
            raise disagree(self._field.field, sample, there, known, url)
        raise FormatError(f"sample {sample} has {there} tokens, it had {known} when the shard was indexed", url=url)


def unreadable(sample: int, url: str) -> FormatError:
    return FormatError(f"sample {sample} could not be read when the shard was indexed", url=url)


def disagree(mask: str, sample: int, there: int, known: int, url: str) -> FormatError:
    return FormatError(f"field {mask!r} of sample {sample} has {there} values for {known} tokens", url=url)


class _Kept:
    """Samples of which a part was read, those of the last ones that together take no more than :data:`KEPT`; without
    it a document that makes many rows would be decoded as often. The last one is always kept, if its memory is its
    own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: OrderedDict[int, Row] = OrderedDict()
        self._nbytes = 0

    def get(self, sample: int) -> Row | None:
        with self._lock:
            row = self._rows.get(sample)
            if row is not None:
                self._rows.move_to_end(sample)
            return row

    def keep(self, sample: int, row: Row) -> None:
        if row.base is not None and row.nbytes > KEPT:
            return  # a view: it costs little to make it again, and a copy much memory
        with self._lock:
            if sample in self._rows:
                return
            # what a view is of may be many times as large
            self._rows[sample] = row if row.base is None else row.copy()
            self._nbytes += row.nbytes
            while self._nbytes > KEPT and len(self._rows) > 1:
                self._nbytes -= self._rows.popitem(last=False)[1].nbytes
