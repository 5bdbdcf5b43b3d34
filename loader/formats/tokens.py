"""Headerless token files: one array of token ids and nothing else (nanoGPT's ``train.bin``, OLMo's ``.npy``).

Such a file does not say what it holds, so dtype and length are always the user's to give; nothing is guessed from the
bytes or the name. Files that ``numpy.save`` wrote are read as well: their header must declare one axis and the dtype
that the user gave. How many samples a file has follows from its size alone, but for names that end in ``.npy``: these
may have a header or not, so the first bytes of each are read to know.

Sample ``i`` is ``tokens[i * stride : i * stride + length]``; with ``labels`` one token more is needed, and the labels
are the same run moved by one. Tokens after the last whole sample are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, FormatError

from ..sample import Sample
from .abc import Bytes, Format, Objects, Ready, SampleIndex, all_there
from .dtypes import integer_name
from .npy_header import MAGIC, MOST, read_header

Tokens2D: TypeAlias = npt.NDArray[Any]
_HEADERS = {
    b"\x88\xd8\x34\x01\x01\x00\x00\x00": "the header of an llm.c token file",
    b"MMIDIDX\x00\x00": "the header of a Megatron index",
}


@dataclass(frozen=True, slots=True)
class RowIndex(SampleIndex):
    """How many samples fit; their places follow from the options."""

    rows: int

    def __len__(self) -> int:
        return self.rows

    @property
    def nbytes(self) -> int:
        return 64


@dataclass(frozen=True)
class Tokens(Format):
    """Files of token ids without a header, or with NumPy's.

    ``length``: tokens in a sample. ``stride``: tokens from one sample's start to the next (default ``length``: no
    overlap). ``dtype``: of the ids in the file, little-endian. ``labels``: add the field ``labels``, the tokens moved
    by one, as a next-token objective wants it. ``out``: ``"int64"`` (or another dtype that holds every id) makes each
    sample a new array of that type; with ``None`` ``tokens`` is a view into the mapped file, but where samples overlap
    (``labels``, a short ``stride``) they are copies, so writing into one changes no other.

    Raises ``ConfigError`` for options that make no sense, for example an ``out`` in which ids could wrap around.
    """

    name: ClassVar[str] = "tokens"
    dense: ClassVar[bool] = True
    length: int
    stride: int | None = None
    dtype: str = "uint16"
    labels: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        for option in ("length", "stride"):
            value = getattr(self, option)
            if value is None and option == "stride":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Tokens({option}={value!r}) is not a positive number of tokens")
        object.__setattr__(self, "dtype", integer_name("Tokens", "dtype", self.dtype))
        if self.out is not None:
            object.__setattr__(self, "out", integer_name("Tokens", "out", self.out))
        if self.out is not None and not np.can_cast(self.stored, self.out, "safe"):
            raise ConfigError(f"Tokens(out={self.out!r}) cannot hold every id of dtype {self.dtype!r}")

    @property
    def step(self) -> int:
        """Tokens from one sample's start to the next."""
        return self.length if self.stride is None else self.stride

    @property
    def window(self) -> int:
        """Tokens that one sample needs from the file."""
        return self.length + int(self.labels)

    @property
    def stored(self) -> np.dtype[Any]:
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def delivered(self) -> np.dtype[Any]:
        """The dtype of a sample's arrays."""
        return self.stored if self.out is None else np.dtype(self.out)

    def identity(self) -> str:
        return f"{self.length} {self.step} {self.dtype} {self.labels}"  # not `out`: it changes no sample's place

    def count(self, size: int, url: str) -> int | None:
        return None if url.endswith(".npy") else self.windows_in(size, url)

    def parts(self, objects: Objects, url: str) -> Sequence[int]:
        """One part, the whole file: so that its beginning alone is read to count its samples."""
        data, ready = objects.map(url)
        ready(0, min(len(data), MOST))
        return [len(self.index(data, url))]

    def windows_in(self, size: int, url: str) -> int:
        """The samples of ``size`` bytes of tokens."""
        item = self.stored.itemsize
        if size % item:
            raise FormatError(f"its {size} bytes are no whole number of {self.dtype} tokens", url=url)
        tokens = size // item
        return 0 if tokens < self.window else (tokens - self.window) // self.step + 1

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> RowIndex:
        for magic, what in _HEADERS.items():
            if data[: len(magic)].tobytes() == magic:
                raise FormatError(f"begins with {what}, which formats.Tokens does not read", url=url, offset=0)
        return RowIndex(self.windows_in(len(data) - self._start(data, url), url))

    def source(self, data: Bytes, index: RowIndex) -> Tokens2D:
        """All samples as one view of shape ``(samples, window)``; its rows overlap where the stride is short."""
        data = data[self._start(data, "") :]
        whole = len(data) // self.stored.itemsize * self.stored.itemsize
        tokens = data[:whole].view(self.stored)
        strides = (self.step * tokens.itemsize, tokens.itemsize)
        return np.lib.stride_tricks.as_strided(tokens, shape=(index.rows, self.window), strides=strides)

    def read(self, source: Tokens2D, index: RowIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        row = source[i]
        sample = Sample()
        if fields is None or "tokens" in fields:
            sample["tokens"] = self._deliver(row[: self.length])
        if self.labels and (fields is None or "labels" in fields):
            sample["labels"] = self._deliver(row[1:])
        return sample

    def gather(self, source: Tokens2D, which: npt.NDArray[np.int64], out: Tokens2D) -> None:
        """Copy the samples ``which`` into the rows of ``out``: shape ``(len(which), window)``, dtype as stored."""
        if source.flags.c_contiguous:
            # "wrap" copies straight into `out` (the default works in a buffer first); `which` is in range already.
            source.take(which, axis=0, out=out, mode="wrap")
        else:
            out[...] = source[which]  # take() would first copy a whole file of overlapping windows

    def _start(self, data: Bytes, url: str) -> int:
        """The bytes in front of the tokens: the length of NumPy's header, if there is one."""
        if data[: len(MAGIC)].tobytes() != MAGIC:
            return 0
        header = read_header(data[:MOST], len(data), url)
        if len(header.shape) != 1:
            hint = "formats.Npy() makes a sample of each row"
            raise FormatError(f"an array of shape {header.shape}, no row of tokens", url=url, offset=0, hint=hint)
        if header.dtype != self.stored:
            raise FormatError(
                f"its header says that it holds {header.dtype}, not {self.dtype}",
                url=url,
                offset=0,
                hint=f'give dtype="{header.dtype.name}", or formats.Npy(length={self.length}), which takes any',
            )
        return header.start

    @property
    def _shares(self) -> bool:
        """Whether the views of two arrays would have bytes in common: writing into one would show in the other."""
        return self.labels or self.step < self.window

    def _deliver(self, tokens: Tokens2D) -> Tokens2D:
        return tokens.astype(self.delivered) if self.out is not None or self._shares else tokens
