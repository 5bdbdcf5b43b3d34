"""Length packing: documents of any number of tokens as samples of one length (:class:`Packing`).

A sample is one bin (:mod:`.bins`). The bins of a shard, or of a part of it, hold its own documents only, so their
number follows from the shard and the options, and the order deals with bins as with any samples. In each shuffled epoch
documents are packed anew: with ``"sequential"`` in an order of its own, with ``"best_fit"`` those of one length change
places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError

from ..permute import derive, seed_key
from ..sample import Sample
from .abc import Format, Objects, Opened, SampleIndex
from .binread import BinReader, Outline
from .bins import Bins, Method
from .derived import Derived, DerivedIndex, View
from .documentfield import DocumentField, Found
from .documents import KEPT, Documents, Places
from .dtypes import integer_name
from .kept import seal, unseal
from .pending import Pending

if TYPE_CHECKING:
    from cachefs.client import Client

_VERSION = 1
_KEPT_VERSION = 2
_PACKING = 0x7061636B696E67
_LONGEST = 1 << 24
_ADDED = ("labels", "position_ids", "document_ids", "cu_seqlens", "max_seqlen", "__id__", "__repeat__")


@dataclass(frozen=True)
class Packing(View):
    """Documents packed into samples of ``length`` tokens, for ``ShardDataset(packing=...)``.

    A *document* is the 1-D array of integers in ``field`` of a stored sample, or, with ``eos_id``, a part of it that
    ends with this token. ``method``: ``"best_fit"`` keeps documents whole (those longer than ``length`` are cut into
    pieces of it, and what is left of them is packed like others) and leaves little padding; ``"sequential"`` lays them
    end to end and cuts where a sample is full, which leaves padding in a shard's last sample alone. Every token of
    every document is in exactly one sample of an epoch; the samples that fill no last batch are left out with the data
    set's ``drop_last=True``, its default. Where documents of a shard differ in length, best fit gives the same
    neighbours in each epoch; sequential mixes all of them.

    A sample has these fields, each of shape ``(length,)`` but the last:

    * the tokens, under the name ``field``, as ``out``; behind the last document ``pad_id``;
    * ``labels`` (int64): for each token the next one of its document, also where that lies in another sample;
      ``ignore_index`` for the last token of a document, and for padding. With ``labels="same"`` the token itself, as
      models want it that move labels by themselves (Hugging Face's); ``ignore_index`` for the first token of each
      segment, which has nothing before it to be told from, and for padding. ``mask`` names a field with a number or
      boolean for each token: where that is 0, the token is nobody's label. ``labels=False``: no such field;
    * ``position_ids`` (int32): 0, 1, 2 ... in each segment, unless they are ``False``;
    * with ``document_ids=True`` ``document_ids`` (int32): the number of the token's segment in the sample, -1 for
      padding;
    * ``cu_seqlens`` (int32, shape ``(segments + 1,)``): where segments begin, and at last ``length``, as the functions
      for variable lengths of flash-attention take it (:func:`loader.pack_batch` joins those of a batch).

    A *segment* is a document, or the piece of one that lies in the sample; padding is a last segment of its own.
    ``dtype``: what a field of bytes holds (``"uint16"``), where the format does not say that it is an array. ``out``:
    has to hold every token of the stored dtype; of stored 64 bits, which say nothing of the vocabulary, the tokens
    themselves. While a shard is open it takes 10 to 25 bytes of memory for each document, and 45 more while its
    bins are made.
    Raises ``ConfigError`` for options that make no sense.
    """

    length: int
    field: str = "tokens"
    method: Method = "best_fit"
    eos_id: int | None = None
    pad_id: int = 0
    labels: bool | Literal["same"] = True
    mask: str | None = None
    position_ids: bool = True
    document_ids: bool = False
    ignore_index: int = -100
    out: str = "int64"
    dtype: str | None = None

    def __post_init__(self) -> None:
        for option in ("length", "pad_id", "eos_id", "ignore_index"):
            object.__setattr__(self, option, _plain(getattr(self, option)))
        if isinstance(self.length, bool) or not isinstance(self.length, int) or not 0 < self.length <= _LONGEST:
            raise ConfigError(f"Packing(length={self.length!r}) is not a number of tokens from 1 to {_LONGEST}")
        if self.method not in ("best_fit", "sequential"):
            raise ConfigError(f"Packing(method={self.method!r}) is neither 'best_fit' nor 'sequential'")
        if self.labels is not True and self.labels is not False and self.labels != "same":
            raise ConfigError(f"Packing(labels={self.labels!r}) is neither True, False nor 'same'")
        object.__setattr__(self, "out", integer_name("Packing", "out", self.out))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", integer_name("Packing", "dtype", self.dtype))
        if not isinstance(self.field, str) or not self.field or self.field in _ADDED:
            raise ConfigError(f"Packing(field={self.field!r}) is the name of a field that packing adds, or none")
        if self.mask is not None and (not isinstance(self.mask, str) or not self.mask):
            raise ConfigError(f"Packing(mask={self.mask!r}) is no name of a field")
        if self.mask is not None and not self.labels:
            raise ConfigError(f"Packing(mask={self.mask!r}, labels=False): a mask is for labels alone")
        if self.labels and self.out == "uint64":
            raise ConfigError(
                "Packing(out='uint64') holds tokens that labels (int64) cannot", hint="out='int64', or labels=False"
            )
        for option, kind in (("pad_id", self.out), ("ignore_index", "int64")):
            value, info = getattr(self, option), np.iinfo(kind)
            if isinstance(value, bool) or not isinstance(value, int) or not info.min <= value <= info.max:
                raise ConfigError(f"Packing({option}={value!r}) is no {kind} token")
        if self.eos_id is not None and (isinstance(self.eos_id, bool) or not isinstance(self.eos_id, int)):
            raise ConfigError(f"Packing(eos_id={self.eos_id!r}) is no token")
        if self.eos_id is not None and self.dtype is not None and not _holds(self.dtype, self.eos_id):
            raise ConfigError(f"Packing(eos_id={self.eos_id}, dtype={self.dtype!r}): no {self.dtype} token is that")

    def over(self, format: Format) -> Packed:
        return Packed(format, self)

    def padding(self, lengths: npt.ArrayLike) -> float:
        """The share of padding in the samples that documents of these numbers of tokens make, all in one shard."""
        bins = Bins(np.asarray(lengths, dtype=np.int64), self.length, self.method)
        return bins.padding / max(bins.count * self.length, 1)

    def padding_in(
        self, path_or_url: str, format: str | Format | None = None, *, client: Client | None = None
    ) -> float:
        """The share of padding in the samples that the documents of one shard make; finds their lengths for that.

        ``format`` as in :func:`loader.open_shard`. Raises what opening the shard raises."""
        from cachefs.client import connect

        from ..opening import while_filling
        from ..reader import open_shard

        client = client if client is not None else connect()
        with open_shard(path_or_url, format, client=client) as shard:
            packed, url = self.over(shard.format), shard.url
        found, objects = while_filling(client, {}, lambda objects: packed.bins_of(objects, url))
        objects.close()
        return sum(bins.padding for bins in found) / max(sum(bins.count for bins in found) * self.length, 1)


@dataclass(slots=True)
class PackedIndex(DerivedIndex):
    """The number of bins, and what they are made of. ``documents``: how many each stored sample has, where that may be
    several; ``endless``: the token that ends them is nowhere; ``remark``: what the user should hear of that."""

    inner: SampleIndex
    bins: Bins
    documents: npt.NDArray[Any] | None = None
    endless: bool = False
    remark: str = ""

    def __len__(self) -> int:
        return self.bins.count

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.bins.lengths.nbytes + (0 if self.documents is None else self.documents.nbytes)

    @property
    def notes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the stored samples, and how many of them could not be read."""
        notes: tuple[str, ...] = tuple(self.inner.notes)
        bad = len(self.bins.unreadable)
        if bad:
            notes = (*notes, f"{bad} document(s) cannot be read, each counts as a damaged sample")
        return (*notes, self.remark) if self.remark else notes

    @property
    def skipped(self) -> int:  # type: ignore[override]
        """Entries of the shard that belong to no sample."""
        return self.inner.skipped

    def to_bytes(self) -> bytes:
        lengths = self.bins.lengths
        counts = b"" if self.documents is None else self.documents.astype("<i8").tobytes()
        return seal(_Kept(_KEPT_VERSION, lengths.itemsize == 8, lengths.tobytes(), counts, self.endless))


class _Kept(msgspec.Struct, array_like=True):
    version: int
    wide: bool
    lengths: bytes
    documents: bytes
    endless: bool


@dataclass(frozen=True)
class Packed(Derived):
    """A format under :class:`Packing`. ``key``: of the epoch; ``None``: documents stay in their own order."""

    packing: Packing
    key: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columnar", True)

    @cached_property
    def documents(self) -> DocumentField:
        """Where the documents are."""
        it = self.packing
        return DocumentField(self.inner, self.inner.canonical(it.field), it.dtype, it.eos_id, out=it.out)

    @cached_property
    def _mask(self) -> DocumentField | None:
        name = self.packing.mask
        return None if name is None else DocumentField(self.inner, self.inner.canonical(name), mask=True)

    @cached_property
    def _outline(self) -> Outline:
        it = self.packing
        labels: Literal["next", "same"] | None = "same" if it.labels == "same" else "next" if it.labels else None
        return Outline(
            it.field, it.length, np.dtype(it.out), it.pad_id, labels, it.position_ids, it.document_ids, it.ignore_index
        )

    def identity(self) -> str:
        it = self.packing  # the other options change no sample's place
        packed = f"{it.length} {it.field} {it.method} {it.eos_id} {it.dtype}"
        if it.mask is not None:  # documents whose masks are damaged have samples of their own
            packed += f" {it.mask}"
        return f"{self.inner.name} {self.inner.identity()} packed {_VERSION} {packed}"

    @property
    def kept_as(self) -> str:
        it = self.packing  # lengths are kept, whatever bins they make
        inner = self.inner.kept_as if isinstance(self.inner, Derived) else self.inner.identity()
        return f"documents {it.field} {it.eos_id} {it.dtype} {it.mask} {it.out} of {self.inner.name} {inner}"

    def in_epoch(self, seed: int, epoch: int) -> Packed:
        return replace(self, inner=self.inner.in_epoch(seed, epoch), key=derive(seed_key(seed), epoch, _PACKING))

    def open(
        self, objects: Objects, url: str, *, index: Any = None, unpacked: int | None = None, part: int | None = None
    ) -> Opened:
        opened = Derived.open(self, objects, url, index=index, unpacked=unpacked, part=part)
        index = opened.index
        stored, lengths = Opened(opened.source, index.inner), index.bins.lengths
        places = Places.of(Found(lengths, index.documents))
        mask = None if self._mask is None else Documents(self._mask, stored, lengths, places)
        documents = Documents(self.documents, stored, lengths, places)
        reader = BinReader(documents, mask, index.bins, self._outline, self.key)
        kept = min(KEPT, int(np.maximum(lengths, 0).max(initial=0)) * 8) * (1 if mask is None else 2)
        private = opened.private_bytes + index.bins.layout_bytes + places.nbytes + kept
        return Opened(_Source(opened.source, reader), index, private)

    def bins_of(self, objects: Objects, url: str) -> list[Bins]:
        """The bins of a shard, or of each of its parts."""
        counts = self.parts(objects, url)
        parts = [None] if counts is None else [part for part, count in enumerate(counts) if count]
        return [self.open(objects, url, part=part).index.bins for part in parts]

    def derive(self, opened: Opened, url: str) -> PackedIndex:
        found = self.documents.find(opened, url)
        if self._mask is not None:
            sizes, masked = found.samples(), self._mask.find(opened, url).lengths
            found = found.without((sizes > 0) & (masked != sizes))
        return self._packed(opened.index, found)

    def recall(self, raw: bytes, inner: Any) -> PackedIndex:
        kept = unseal(raw, _Kept, "kept lengths")
        if kept.version != _KEPT_VERSION:
            raise ValueError(f"kept lengths of version {kept.version}")
        lengths = np.frombuffer(kept.lengths, "<i8" if kept.wide else "<i4")
        counts = np.frombuffer(kept.documents, "<i8") if self.packing.eos_id is not None else None
        samples = len(lengths) if counts is None else len(counts)
        if samples != len(inner) or (lengths < -1).any():
            raise ValueError("kept lengths of another shard")
        if counts is not None and ((counts < 1).any() or counts.sum() != len(lengths)):
            raise ValueError("kept lengths whose counts do not agree")
        return self._packed(inner, Found(lengths, counts, kept.endless))

    def _packed(self, inner: Any, found: Found) -> PackedIndex:
        lengths = found.lengths
        narrow = np.dtype("<i4") if int(lengths.max(initial=0)) < 1 << 31 else np.dtype("<i8")
        bins = Bins(lengths.astype(narrow), self.packing.length, self.packing.method)
        return PackedIndex(inner, bins, found.counts, found.endless, self._remark(found))

    def _remark(self, found: Found) -> str:
        it = self.packing
        if found.endless:
            return f"no token is {it.eos_id}, the one that ends documents (Packing(eos_id=...))"
        if it.eos_id is None and len(found.lengths) == 1 and found.lengths[0] > it.length:
            tokens = int(found.lengths[0])
            return f"it is one document of {tokens} tokens; if it is several, Packing(eos_id=...) tells where they end"
        return ""

    def keeps_state(self, source: _Source) -> bool:
        return self.inner.keeps_state(source.stored)

    def read(
        self, source: _Source, index: PackedIndex, i: int, url: str, fields: frozenset[str] | None = None
    ) -> Sample:
        columns = source.bins.columns(np.array([i]), url, fields)
        made = {name: values.made() if isinstance(values, Pending) else values for name, values in columns.items()}
        return Sample((name, values[0]) for name, values in made.items())

    def columns(
        self,
        source: _Source,
        index: PackedIndex,
        rows: npt.NDArray[np.int64],
        url: str,
        fields: frozenset[str] | None = None,
    ) -> dict[str, Any]:
        return source.bins.columns(rows, url, fields)

    def kind(self, index: PackedIndex, name: str) -> str:
        return ""  # all are arrays

    def canonical(self, name: str) -> str:
        return name


class _Source(NamedTuple):
    stored: Any
    bins: BinReader


def _plain(value: Any) -> Any:
    """Numpy's integers as Python's."""
    return int(value) if isinstance(value, np.integer) else value


def _holds(dtype: str, token: int) -> bool:
    info = np.iinfo(dtype)
    return bool(info.min <= token <= info.max)
