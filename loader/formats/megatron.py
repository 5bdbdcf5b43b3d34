"""Megatron token data: ``X.bin`` holds the tokens of all sequences, ``X.idx`` where each of them lies.

Follows ``IndexedDataset`` of Megatron-LM core (``megatron/core/datasets/indexed_dataset.py``), version 1 of the index:
header, sequence lengths, byte pointers, document bounds and, for multimodal data, a mode for each sequence. Energon's
and the older fairseq-like ``TNTIDX`` indexes are others.

On purpose different from Megatron-LM:

* The index is checked against the data when it is opened, and the error names both files and both lengths.
* Modes are seen from the index's size; no option tells of them.
* Values are writable views of the mapped data (private memory), so training code may change them in place.
* A ``.bin`` that is longer than its index says is read, with a note; Megatron says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, Denied, FormatError, NotFound

from ..sample import Sample
from .abc import Bytes, Format, Joined, Objects, Opened, Ready, SampleIndex, all_there
from .megatron_index import MAGIC, Idx, check_documents, check_sequences, first_gap, gap_error, parse_idx
from .windows import WindowOptions, Windows, delivered


@dataclass(frozen=True, slots=True)
class MegatronIndex(SampleIndex):
    """How many samples there are. Where they lie stays in the ``.idx``, which is mapped with the ``.bin``."""

    count: int
    skipped: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return self.count

    @property
    def nbytes(self) -> int:
        return 100


class MegatronSource(NamedTuple):
    data: Bytes
    idx: Idx
    windows: Windows | None


@dataclass(frozen=True)
class Megatron(WindowOptions, Format):
    """Pairs of ``.bin`` and ``.idx``; either of them, or the name without suffix, may be given.

    ``sample="sequence"``: a sample is a sequence of the index: ``tokens``, and ``mode`` where the index has modes.
    ``sample="document"``: all sequences of a document as one run of tokens; an empty document is an empty sample. Where
    the index has modes, ``mode`` and ``lengths`` are arrays with an entry for each of its sequences.

    With ``length`` samples are windows over the tokens of all documents joined, and ``length``, ``stride``, ``labels``
    and ``out`` are those of :class:`loader.formats.Tokens`. ``out`` may be given alone.
    """

    name: ClassVar[str] = "megatron"
    columnar: ClassVar[bool] = True
    sample: Literal["sequence", "document"] = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample not in ("sequence", "document"):
            raise ConfigError(f"sample={self.sample!r} is neither 'sequence' nor 'document'")
        if self.sample == "document" and self.length is not None:
            raise ConfigError("Megatron: windows of a length run over all documents; leave sample out")

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        return data[: len(MAGIC)].tobytes() == MAGIC

    @classmethod
    def beside(cls, objects: Objects, url: str) -> Self | None:
        try:
            data, ready = objects.map(_pair(url)[1])
            ready(0, min(len(MAGIC), len(data)))
        except (NotFound, Denied):  # without the right to list, a store answers so for a missing key as well
            return None
        return cls() if data[: len(MAGIC)].tobytes() == MAGIC else None

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        bin_url, idx_url = _pair(url)
        table, ready = objects.map(idx_url)
        data, data_ready = objects.map(bin_url)
        ready(0, len(table))
        idx = parse_idx(table, idx_url)
        known = index is not None  # it was checked then; every read checks its own sequence again
        notes = () if known else self._check(idx, idx_url, len(table), bin_url, len(data))
        data_ready(0, len(data))
        windows = self._windows(idx, data, bin_url)
        count, skipped = self._count(idx, windows)
        if known and len(index) != count:
            raise FormatError(f"has {count} samples, it had {len(index)}: the index has changed", url=idx_url)
        return Opened(MegatronSource(data, idx, windows), index if known else MegatronIndex(count, skipped, notes))

    def _check(self, idx: Idx, idx_url: str, idx_size: int, bin_url: str, bin_size: int) -> tuple[str, ...]:
        """Raise ``FormatError`` for an index that cannot be right; what is odd about it otherwise."""
        notes = []
        end = check_sequences(idx, idx_url, idx_size, bin_url, bin_size)
        if end < bin_size:
            notes.append(f"its last {bin_size - end} bytes belong to no sequence of the index")
        check_documents(idx, idx_url)
        gap = first_gap(idx)
        if gap is not None:
            if self.sample == "document" or self.length is not None:
                raise gap_error(idx, gap, idx_url)
            notes.append(f"sequence {gap} of the index does not start where the one before it ends")
        return tuple(notes)

    def _windows(self, idx: Idx, data: Bytes, url: str) -> Windows | None:
        start, end = _span(idx, 0, idx.sequences, len(data), url) if self.length is not None else (0, 0)
        return self.windows(data[start:end].view(idx.dtype), url)

    def _count(self, idx: Idx, windows: Windows | None) -> tuple[int, int]:
        """Samples, and sequences that belong to none."""
        if windows is not None:
            return windows.rows, 0
        if self.sample == "sequence":
            return idx.sequences, 0
        if len(idx.documents) == 0:
            return 0, idx.sequences
        return len(idx.documents) - 1, idx.sequences - int(idx.documents[-1] - idx.documents[0])

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> SampleIndex:
        raise FormatError("half of a pair: a .bin is read with the .idx beside it", url=url)

    def read(
        self, source: MegatronSource, index: Any, i: int, url: str, fields: frozenset[str] | None = None
    ) -> Sample:
        if source.windows is not None:
            return source.windows.read(i, url, fields)
        data, idx, _ = source
        if self.sample == "sequence":
            first, last = i, i + 1
        else:
            first, last = idx.documents[i : i + 2].tolist()
            if not 0 <= first <= last <= idx.sequences:
                raise FormatError(f"document {i} is the sequences {first} to {last} of {idx.sequences}", url=url)
        sample = Sample()
        if fields is None or "tokens" in fields:
            start, end = _span(idx, first, last, len(data), url)
            sample["tokens"] = delivered(data[start:end].view(idx.dtype), self.out)
        if idx.modes is not None:
            self._add_modes(sample, idx, first, last, fields)
        return sample

    def _add_modes(self, sample: Sample, idx: Idx, first: int, last: int, fields: frozenset[str] | None) -> None:
        assert idx.modes is not None  # the caller saw them
        single = self.sample == "sequence"
        if fields is None or "mode" in fields:
            sample["mode"] = idx.modes[first] if single else idx.modes[first:last]
        if not single and (fields is None or "lengths" in fields):
            sample["lengths"] = idx.lengths[first:last].copy()  # aligned, which the index's own bytes are not

    def columns(
        self,
        source: MegatronSource,
        index: Any,
        rows: npt.NDArray[np.int64],
        url: str,
        fields: frozenset[str] | None = None,
    ) -> dict[str, Any]:
        if source.windows is not None:
            return source.windows.columns(rows, fields)
        samples = [self.read(source, index, i, url, fields) for i in rows.tolist()]
        return {name: [sample[name] for sample in samples] for name in samples[0]} if samples else {}

    def lengths(self, source: MegatronSource, index: Any, field: str, url: str) -> npt.NDArray[Any] | None:
        idx = source.idx
        if source.windows is not None or field != "tokens":
            return None
        if self.sample == "sequence":
            return idx.lengths
        ends = np.concatenate([[0], np.cumsum(idx.lengths, dtype=np.int64)])
        return np.diff(ends[idx.documents])

    def joined(self, source: MegatronSource, index: Any, field: str, url: str) -> Joined | None:
        idx, item = source.idx, source.idx.dtype.itemsize
        if source.windows is not None or field != "tokens" or not idx.sequences:
            return None
        starts = idx.pointers
        if self.sample == "document":
            starts = starts[np.minimum(idx.documents[:-1], idx.sequences - 1)]  # behind all lies an empty one
        if (starts % item).any():
            return None
        lengths = self.lengths(source, index, field, url)
        assert lengths is not None  # it is told in the same cases
        return Joined(source.data[: len(source.data) // item * item].view(idx.dtype), starts // item, lengths)


def _span(idx: Idx, first: int, last: int, size: int, url: str) -> tuple[int, int]:
    """The bytes of the sequences ``first`` to before ``last``, which follow each other; checked once more, since the
    index may have been checked when it was another file."""
    if first == last:
        return 0, 0
    start = int(idx.pointers[first])
    end = int(idx.pointers[last - 1]) + int(idx.lengths[last - 1]) * idx.dtype.itemsize
    if not 0 <= start <= end <= size or (end - start) % idx.dtype.itemsize:
        raise FormatError(f"the index puts sequence {first} at bytes {start} to {end} of {size}", url=url)
    return start, end


def _pair(url: str) -> tuple[str, str]:
    """The names of data and index, from that of either, or from what they have in common."""
    stem = url[:-4] if url.endswith((".bin", ".idx")) else url
    return stem + ".bin", stem + ".idx"
