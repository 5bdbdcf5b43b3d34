"""Bins as samples: the fields of many of them at once, with numpy work for each piece and none for each token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .bins import Bins, Int64s, Layout, within
from .documents import Documents, Row

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


@dataclass(frozen=True)
class _Cut:
    """The pieces of some bins, laid end to end: where each begins, and the segments, padding included."""

    docs: Int64s
    firsts: Int64s
    sizes: Int64s
    begins: Int64s
    used: Int64s
    """Tokens in each bin."""
    pieces: Int64s
    """Pieces in each bin."""

    def segments(self, length: int) -> Int64s:
        """Where segments begin, padding at the end of a bin as one of its own."""
        ends = np.arange(len(self.used)) * length + self.used
        return np.sort(np.concatenate([self.begins, ends[self.used < length]]))


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

    @cached_property
    def _layout(self) -> Layout:
        return self._bins.layout(self._key)  # not before a bin is read: a shard is opened to be counted as well

    def columns(self, rows: Int64s, url: str, fields: frozenset[str] | None) -> dict[str, Any]:
        """The fields of the bins ``rows``, as new arrays."""
        outline, length = self._outline, self._outline.length
        wanted = _Choice(fields)
        cut = self._cut(rows, url)
        out: dict[str, Any] = {}
        labelled = outline.labels is not None and wanted("labels")
        if wanted(outline.field) or labelled:
            runs, following = self._runs(self._documents, cut, url)
            tokens = np.empty(len(rows) * length, outline.out)
            self._join(runs, cut, tokens, url)
            if wanted(outline.field):
                out[outline.field] = tokens.reshape(-1, length)
            if labelled:
                out["labels"] = self._labels(cut, tokens, following, url).reshape(-1, length)
        segments = cut.segments(length)
        sizes = np.append(segments[1:], len(rows) * length) - segments
        if outline.position_ids and wanted("position_ids"):
            positions = np.arange(len(rows) * length, dtype=np.int32)
            positions -= np.repeat(segments.astype(np.int32), sizes)
            out["position_ids"] = positions.reshape(-1, length)
        firsts = np.searchsorted(segments, np.arange(len(rows) + 1) * length)
        if outline.document_ids and wanted("document_ids"):
            numbers = within(firsts[1:] - firsts[:-1])
            numbers[firsts[1:][cut.used < length] - 1] = IGNORED
            out["document_ids"] = np.repeat(numbers.astype(np.int32), sizes).reshape(-1, length)
        if wanted("cu_seqlens"):
            out["cu_seqlens"] = _bounds(segments, firsts, length)
        return out

    def _cut(self, rows: Int64s, url: str) -> _Cut:
        layout, length = self._layout, self._outline.length
        starts = layout.starts[rows]
        counts = layout.starts[rows + 1] - starts
        pieces = np.repeat(starts, counts) + within(counts)
        docs = layout.docs[pieces].astype(np.int64)
        sizes = layout.sizes[pieces].astype(np.int64)
        if not sizes.all():
            self._documents.refuse(int(docs[int(np.argmin(sizes))]), url)
        ends = np.cumsum(sizes)
        last = np.cumsum(counts) - 1
        used = np.add.reduceat(sizes, last + 1 - counts)
        # each bin's pieces begin where it does: its padding lies between them and those of the next one
        begins = ends - sizes + np.repeat(np.arange(len(rows)) * length - (ends[last] - used), counts)
        return _Cut(docs, layout.firsts[pieces].astype(np.int64), sizes, begins, used, counts)

    def _runs(self, documents: Documents, cut: _Cut, url: str) -> tuple[list[Row], dict[int, int]]:
        """The values of each piece; and, by piece, the one that follows where labels need it: its document goes on."""
        sizes = cut.sizes
        if self._outline.labels != "next":
            return documents.pieces(cut.docs, cut.firsts, sizes, url), {}
        goes_on = cut.firsts + sizes < documents.lengths[cut.docs]
        runs = documents.pieces(cut.docs, cut.firsts, sizes + goes_on, url)
        following = {}
        for k in np.flatnonzero(goes_on).tolist():
            following[k] = int(runs[k][-1])
            runs[k] = runs[k][:-1]
        return runs, following

    def _join(self, runs: list[Row], cut: _Cut, out: npt.NDArray[Any], url: str) -> None:
        outline = self._outline
        parts: list[Row] = []
        at = 0
        padding = np.full(outline.length - int(cut.used.min()), outline.pad_id, outline.out)
        for used, count in zip(cut.used.tolist(), cut.pieces.tolist(), strict=True):
            parts += runs[at : at + count]
            at += count
            if used < outline.length:
                parts.append(padding[: outline.length - used])
        try:
            np.concatenate(parts, out=out, casting="safe")
        except TypeError:
            kinds = {run.dtype for run in runs if not np.can_cast(run.dtype, outline.out, "safe")}
            raise FormatError(
                f"holds tokens of dtype {kinds.pop()}, not all of which out={outline.out.name!r} can hold",
                url=url,
                hint="choose another dtype in Packing(out=...)",
            ) from None

    def _labels(self, cut: _Cut, tokens: npt.NDArray[Any], following: dict[int, int], url: str) -> Int64s:
        outline = self._outline
        labels = np.empty(len(tokens), np.int64)
        self._aim(labels, tokens, cut, following, outline.ignore_index)
        if self._mask is not None:
            runs, following = self._runs(self._mask, cut, url)
            learned, aimed = np.zeros(len(tokens), np.bool_), np.empty(len(tokens), np.bool_)
            for begin, run in zip(cut.begins.tolist(), runs, strict=True):
                learned[begin : begin + len(run)] = run
            self._aim(aimed, learned, cut, following, False)
            labels[~aimed] = outline.ignore_index
        for row, used in zip(labels.reshape(-1, outline.length), cut.used.tolist(), strict=True):
            row[used:] = outline.ignore_index
        return labels

    def _aim(
        self, out: npt.NDArray[Any], values: npt.NDArray[Any], cut: _Cut, following: dict[int, int], nothing: int
    ) -> None:
        """What each token is told to be followed by; what stands under padding does not count."""
        if self._outline.labels == "next":
            out[:-1] = values[1:]
            out[cut.begins + cut.sizes - 1] = nothing
            if following:
                pieces = list(following)
                out[cut.begins[pieces] + cut.sizes[pieces] - 1] = list(following.values())
        else:
            out[:] = values
            out[cut.begins] = nothing


class _Choice:
    """Whether a field is wanted."""

    def __init__(self, fields: frozenset[str] | None) -> None:
        self._fields = fields

    def __call__(self, name: str) -> bool:
        return self._fields is None or name in self._fields


def _bounds(segments: Int64s, firsts: Int64s, length: int) -> list[npt.NDArray[np.int32]]:
    """Each bin's segments, where they begin in it, and its end."""
    rows = len(firsts) - 1
    # one array for all: a bin's end lies where the next one's zero would, so each has a place more
    out = np.empty(len(segments) + rows, np.int32)
    shifted = firsts + np.arange(rows + 1)
    out[np.arange(len(segments)) + np.repeat(np.arange(rows), firsts[1:] - firsts[:-1])] = segments % length
    out[shifted[1:] - 1] = length
    edges = shifted.tolist()
    return [out[a:b] for a, b in itertools.pairwise(edges)]
