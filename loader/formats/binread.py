"""Bins as samples: the fields of many of them at once, with numpy work for each piece and none for each token."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .bestfit import Int64s
from .bins import Bins, Layout, within
from .documentfield import Row, check_fit
from .documents import Documents, disagree, unreadable
from .pending import Pending

IGNORED = -1
"""The document number of padding."""


@dataclass(frozen=True)
class Outline:
    """What bins are made into. See :class:`loader.Packing` for the fields."""

    field: str
    length: int
    out: np.dtype[Any]
    pad_id: int
    labels: Literal["next", "same"] | None
    position_ids: bool
    document_ids: bool
    ignore_index: int

    @cached_property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """The fields of shape ``(length,)``."""
        dtypes = {self.field: self.out}
        if self.labels is not None:
            dtypes["labels"] = np.dtype(np.int64)
        if self.position_ids:
            dtypes["position_ids"] = np.dtype(np.int32)
        if self.document_ids:
            dtypes["document_ids"] = np.dtype(np.int32)
        return dtypes


@dataclass(frozen=True, eq=False)
class Values:
    """What the pieces of some bins hold: ``runs[p]`` of piece ``p``, and where its document goes on and labels need it
    (``goes_on[p]``), the value behind them."""

    runs: list[Row]
    goes_on: npt.NDArray[np.bool_]
    following: Int64s


class BinReader:
    """The bins of one open shard, in one epoch (``key``). ``mask``: which tokens are to be learned."""

    def __init__(
        self, documents: Documents, mask: Documents | None, bins: Bins, outline: Outline, key: int | None
    ) -> None:
        self._documents = documents
        self._mask = mask
        self._bins = bins
        self._outline = outline
        self._key = key
        self._lock = threading.Lock()
        self._made: Layout | None = None

    def _layout(self) -> Layout:
        with self._lock:  # threads that read the same shard would each make it
            if self._made is None:
                self._made = self._bins.layout(self._key)  # not sooner: a shard is opened to be counted as well
            return self._made

    def columns(self, rows: Int64s, url: str, fields: frozenset[str] | None) -> dict[str, Any]:
        """The fields of the bins ``rows``; all but the bounds are pending."""
        outline = self._outline
        layout = self._layout()
        starts = layout.starts[rows]
        counts = layout.starts[rows + 1] - starts
        pieces = np.repeat(starts, counts) + within(counts)
        docs, firsts, sizes = (part[pieces].astype(np.int64) for part in (layout.docs, layout.firsts, layout.sizes))
        if not sizes.all():
            self._refuse(int(docs[int(np.argmin(sizes))]), url)
        wanted = [name for name in outline.dtypes if fields is None or name in fields]
        tokens = mask = None
        if outline.field in wanted or "labels" in wanted:
            tokens = self._values(self._documents, docs, firsts, sizes, url)
        if self._mask is not None and "labels" in wanted:
            mask = self._values(self._mask, docs, firsts, sizes, url)
            self._check_mask(mask.runs, url)
        part = Pieces(outline, sizes, counts, tokens, mask)
        out: dict[str, Any] = {name: PackedField(part, name) for name in wanted}
        if fields is None or "cu_seqlens" in fields:
            out["cu_seqlens"] = part.bounds()
        return out

    def _values(self, documents: Documents, docs: Int64s, firsts: Int64s, sizes: Int64s, url: str) -> Values:
        following = np.zeros(len(docs), np.int64)
        if self._outline.labels != "next":
            runs = documents.pieces(docs, firsts, sizes, url)
            if documents is self._documents:
                check_fit(runs, self._outline.out.name, url)
            return Values(runs, np.zeros(len(docs), np.bool_), following)
        goes_on = firsts + sizes < documents.lengths[docs]
        runs = documents.pieces(docs, firsts, sizes + goes_on, url)
        if documents is self._documents:
            check_fit(runs, self._outline.out.name, url)
        for k in np.flatnonzero(goes_on).tolist():
            following[k] = runs[k][-1]
            runs[k] = runs[k][:-1]
        return Values(runs, goes_on, following)

    def _refuse(self, doc: int, url: str) -> None:
        """Raise why a document could not be read when the shard was indexed."""
        sample, tokens = self._documents.why(doc, url)
        if self._mask is not None:
            _, mask = self._mask.why(doc, url)
            if len(mask) != len(tokens):
                raise disagree(self._mask.name, sample, len(mask), len(tokens), url)
        raise unreadable(sample, url)

    def _check_mask(self, runs: list[Row], url: str) -> None:
        if any(run.dtype.kind in "if" and len(run) and run.min() < 0 for run in runs):
            assert self._mask is not None  # its values these are
            raise FormatError(
                f"field {self._mask.name!r} has values below 0: it is no mask",
                url=url,
                hint="Packing(mask=...) names a field of 0 and 1, one for each token; stored labels are none",
            )


class Pieces:
    """The pieces of some bins, bin after bin: ``sizes`` of all, ``counts`` of them in each bin, and their values."""

    def __init__(
        self, outline: Outline, sizes: Int64s, counts: Int64s, tokens: Values | None, mask: Values | None
    ) -> None:
        self.outline = outline
        self.sizes = sizes
        self.counts = counts
        self.tokens = tokens
        self.mask = mask
        self.laid: npt.NDArray[Any] | None = None
        """All tokens, bin after bin, once they were asked for."""
        self._merged: tuple[list[Pieces], Int64s | None, Pieces] | None = None

    @cached_property
    def used(self) -> Int64s:
        """Tokens in each bin."""
        used: Int64s = np.add.reduceat(self.sizes, np.cumsum(self.counts) - self.counts)
        return used

    @cached_property
    def begins(self) -> Int64s:
        """Where each piece begins, the bins end to end: their padding lies between the pieces of two."""
        bins = np.arange(len(self.counts)) * self.outline.length - (np.cumsum(self.used) - self.used)
        begins: Int64s = np.cumsum(self.sizes) - self.sizes + np.repeat(bins, self.counts)
        return begins

    @cached_property
    def segments(self) -> Int64s:
        """Where segments begin, padding at the end of a bin as one of its own."""
        length = self.outline.length
        ends = np.arange(len(self.used)) * length + self.used
        return np.sort(np.concatenate([self.begins, ends[self.used < length]]))

    @cached_property
    def _spans(self) -> Int64s:
        """The segments' lengths."""
        return np.append(self.segments[1:], len(self.counts) * self.outline.length) - self.segments

    @cached_property
    def _firsts(self) -> Int64s:
        """The number of each bin's first segment, and of all."""
        edges = np.arange(len(self.counts) + 1) * self.outline.length
        firsts: Int64s = np.searchsorted(self.segments, edges)
        return firsts

    def together(self, parts: list[Pieces], order: Int64s | None) -> Pieces:
        """The bins of ``parts``, of which this is the first, in the order wanted; made once for all fields."""
        if order is None and len(parts) == 1:
            return self
        if self._merged is None or self._merged[0] != parts or self._merged[1] is not order:
            self._merged = parts, order, _merged(parts, order)
        return self._merged[2]

    def bounds(self) -> list[npt.NDArray[np.int32]]:
        """Each bin's segments, where they begin in it, and its end."""
        rows, firsts, segments = len(self.counts), self._firsts, self.segments
        # one array for all: a bin's end lies where the next one's zero would, so each has a place more
        out = np.empty(len(segments) + rows, np.int32)
        shifted = firsts + np.arange(rows + 1)
        out[np.arange(len(segments)) + np.repeat(np.arange(rows), firsts[1:] - firsts[:-1])] = (
            segments % self.outline.length
        )
        out[shifted[1:] - 1] = self.outline.length
        return [out[a:b] for a, b in itertools.pairwise(shifted.tolist())]

    def fill(self, name: str, out: npt.NDArray[Any]) -> None:
        """Write a field into ``out``: contiguous, shape ``(bins * length,)``."""
        if name == self.outline.field:
            self._fill_tokens(out)
        elif name == "labels":
            self._fill_labels(out)
        elif name == "position_ids":
            out[:] = np.arange(len(out), dtype=np.int32)
            out -= np.repeat(self.segments.astype(np.int32), self._spans)
        else:
            numbers = within(self._firsts[1:] - self._firsts[:-1])
            numbers[self._firsts[1:][self.used < self.outline.length] - 1] = IGNORED
            out[:] = np.repeat(numbers.astype(np.int32), self._spans)

    def _fill_tokens(self, out: npt.NDArray[Any]) -> None:
        assert self.tokens is not None  # they were asked for
        length = self.outline.length
        runs, parts = self.tokens.runs, []
        padding = np.full(length - int(self.used.min()), self.outline.pad_id, self.outline.out)
        at = 0
        for used, count in zip(self.used.tolist(), self.counts.tolist(), strict=True):
            parts += runs[at : at + count]
            at += count
            if used < length:
                parts.append(padding[: length - used])
        np.concatenate(parts, out=out, casting="unsafe")  # all fit: that was checked
        self.laid = out

    def _fill_labels(self, out: npt.NDArray[Any]) -> None:
        ignored = self.outline.ignore_index
        if self.laid is None:
            self._fill_tokens(np.empty(len(out), self.outline.out))
        assert self.laid is not None and self.tokens is not None  # the tokens were filled in
        self._aim(out, self.laid, self.tokens, ignored)
        if self.mask is not None:
            learned, aimed = np.zeros(len(out), np.bool_), np.empty(len(out), np.bool_)
            for begin, run in zip(self.begins.tolist(), self.mask.runs, strict=True):
                learned[begin : begin + len(run)] = run
            self._aim(aimed, learned, self.mask, 0)
            out[~aimed] = ignored
        for row, used in zip(out.reshape(-1, self.outline.length), self.used.tolist(), strict=True):
            row[used:] = ignored

    def _aim(self, out: npt.NDArray[Any], values: npt.NDArray[Any], of: Values, nothing: int) -> None:
        """What each token is told to be followed by; what stands under padding does not count."""
        if self.outline.labels == "next":
            out[:-1] = values[1:]
            out[self.begins + self.sizes - 1] = np.where(of.goes_on, of.following, nothing)
        else:
            out[:] = values
            out[self.begins] = nothing


def _merged(parts: list[Pieces], order: Int64s | None) -> Pieces:
    counts = np.concatenate([part.counts for part in parts])
    sizes = np.concatenate([part.sizes for part in parts])
    which = None
    if order is not None:
        firsts = np.cumsum(counts) - counts
        counts = counts[order]
        which = np.repeat(firsts[order], counts) + within(counts)
        sizes = sizes[which]
    tokens = _values([part.tokens for part in parts], which)
    return Pieces(parts[0].outline, sizes, counts, tokens, _values([part.mask for part in parts], which))


def _values(parts: list[Values | None], which: Int64s | None) -> Values | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    runs = [run for part in known for run in part.runs]
    goes_on, following = (np.concatenate(both) for both in zip(*((p.goes_on, p.following) for p in known), strict=True))
    if which is None:
        return Values(runs, goes_on, following)
    return Values([runs[at] for at in which.tolist()], goes_on[which], following[which])


class PackedField(Pending):
    """One field of some bins."""

    def __init__(self, part: Pieces, name: str) -> None:
        self._part = part
        self._name = name
        self.dtype = part.outline.dtypes[name]
        self.shape = (len(part.counts), part.outline.length)

    def __iter__(self) -> Iterator[Any]:
        rows = self.made()
        self._part.laid = None  # whoever gets these rows may write into them, and labels are made of what was stored
        return iter(rows)

    def fill(self, out: npt.NDArray[Any], parts: Sequence[PackedField], order: Int64s | None) -> None:
        assert out.flags.c_contiguous  # else its flat form would be a copy
        self._part.together([part._part for part in parts], order).fill(self._name, out.reshape(-1))
