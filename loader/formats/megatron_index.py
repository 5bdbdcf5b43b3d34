"""The ``.idx`` file of a Megatron data set: parsed into views of its bytes, checked against the ``.bin`` file.

An index may be gigabytes. Nothing of it is copied as a whole: all checks go through it in runs of :data:`_RUN` entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Bytes

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = 34
_RUN = 1 << 20
_DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}


@dataclass(frozen=True, slots=True, eq=False)
class Idx:
    """One index. ``lengths`` are in tokens, ``pointers`` in bytes of the ``.bin``; document ``d`` is the sequences
    ``documents[d] .. documents[d + 1]``; ``modes`` are there in multimodal data sets only."""

    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8] | None

    @property
    def sequences(self) -> int:
        return len(self.lengths)


def parse_idx(data: Bytes, url: str) -> Idx:
    """The parts of an index, each a view of ``data``. Raises ``FormatError`` where its size is not what it declares."""
    size = len(data)
    if data[: len(MAGIC)].tobytes() != MAGIC:
        raise FormatError("no Megatron index: it does not begin with MMIDIDX", url=url, offset=0)
    if size < _HEADER:
        raise FormatError(f"{size} bytes are too few for the header of a Megatron index", url=url, offset=0)
    version = int(data[9:17].view("<u8")[0])
    if version != 1:
        raise FormatError(f"version {version} of a Megatron index is not known", url=url, offset=9)
    code = int(data[17])
    if code not in _DTYPES:
        raise FormatError(f"dtype code {code} is not known", url=url, offset=17, hint="1 to 8 are")
    sequences, documents = data[18:_HEADER].view("<u8").tolist()
    bare = _HEADER + 12 * sequences + 8 * documents
    if size not in (bare, bare + sequences):
        raise FormatError(
            f"declares {sequences} sequences and {documents} document bounds, which take {bare} bytes "
            f"({bare + sequences} with modes), but it has {size}: cut off or damaged",
            url=url,
            offset=18,
        )
    at = _HEADER
    lengths = data[at : (at := at + 4 * sequences)].view("<i4")
    pointers = data[at : (at := at + 8 * sequences)].view("<i8")
    bounds = data[at : (at := at + 8 * documents)].view("<i8")
    modes = data[at:].view(np.int8) if size > bare else None
    return Idx(np.dtype(_DTYPES[code]), lengths, pointers, bounds, modes)


def check_sequences(idx: Idx, idx_url: str, idx_size: int, bin_url: str, bin_size: int) -> int:
    """Check every sequence against the ``.bin``; returns the byte at which the last one in it ends."""
    item = idx.dtype.itemsize
    sizes = f"{bin_url} has {bin_size} bytes, its index {idx_url} has {idx_size}"
    if bin_size % item:
        raise FormatError(f"no whole number of {idx.dtype.name} tokens: {sizes}", url=bin_url, offset=bin_size)
    end = 0
    for first, last in _runs(idx.sequences):
        lengths = idx.lengths[first:last].astype(np.int64)
        pointers = idx.pointers[first:last]
        stops = np.minimum(pointers, bin_size) + lengths * item
        bad = (lengths < 0) | (pointers < 0) | (pointers > bin_size) | (stops > bin_size) | (pointers % item != 0)
        if bad.any():
            i = first + int(bad.argmax())
            raise FormatError(
                f"sequence {i} of the index lies outside the data: {idx.lengths[i]} {idx.dtype.name} tokens at byte "
                f"{idx.pointers[i]}, but {sizes}",
                url=idx_url,
                offset=_HEADER + 4 * i,
                hint="one of the two is cut off, or they belong to different data",
            )
        end = max(end, int(stops.max(initial=0)))
    return end


def check_documents(idx: Idx, url: str) -> None:
    """Check that the documents' bounds rise and are sequences of the index."""
    start = _HEADER + 12 * idx.sequences
    before = 0
    for first, last in _runs(len(idx.documents)):
        bounds = idx.documents[first:last]
        bad = (np.diff(bounds, prepend=before) < 0) | (bounds < 0) | (bounds > idx.sequences)
        if bad.any():
            i = first + int(bad.argmax())
            raise FormatError(
                f"document bound {i} is {idx.documents[i]}: not between the one before and the {idx.sequences} "
                "sequences",
                url=url,
                offset=start + 8 * i,
            )
        before = int(bounds[-1])


def first_gap(idx: Idx) -> int | None:
    """The first sequence that does not start where the one before it ends; ``None`` in all that Megatron writes."""
    item = idx.dtype.itemsize
    for first, last in _runs(idx.sequences - 1):
        stops = idx.pointers[first:last] + idx.lengths[first:last].astype(np.int64) * item
        bad = stops != idx.pointers[first + 1 : last + 1]
        if bad.any():
            return first + int(bad.argmax()) + 1
    return None


def gap_error(idx: Idx, number: int, url: str) -> FormatError:
    return FormatError(
        f"sequence {number} does not start where sequence {number - 1} ends",
        url=url,
        offset=_HEADER + 4 * idx.sequences + 8 * number,
        hint='read it with formats.Megatron(sample="sequence")',
    )


def _runs(count: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, _RUN):
        yield first, min(first + _RUN, count)
