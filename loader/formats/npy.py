"""NumPy's ``.npy`` files: one array, whose rows are the samples.

It follows ``numpy.lib.format`` (versions 1.0 to 3.0), and reads what ``numpy.load(mmap_mode="c")`` reads.

On purpose different from ``numpy.load``: arrays of Python objects are refused and never unpickled, and bytes behind the
array are an error, where numpy passes over a second array in the same file without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, FormatError

from ..sample import Sample
from .abc import Bytes, Format, Ready, SampleIndex, all_there
from .npy_header import MAGIC, MOST, NpyHeader, read_header, rows_of, value_at
from .windows import WindowOptions, Windows

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
Source: TypeAlias = Columns | Windows
_VALUE = "value"


@dataclass(slots=True)
class NpyIndex(SampleIndex):
    """The header; the places of samples follow from it. ``samples`` is 1 where the file is one sample."""

    header: NpyHeader
    samples: int

    def __len__(self) -> int:
        return self.samples

    @property
    def nbytes(self) -> int:
        return 300


@dataclass(frozen=True)
class Npy(WindowOptions, Format):
    """A ``.npy`` file with its header.

    Sample ``i`` is row ``i`` along the first axis, in the field ``value``: a view, or a numpy scalar where the array
    has one axis. The fields of a structured array are the sample's fields. ``rows=False`` makes the whole array one
    sample.

    With ``length`` the file is one row of token ids, and samples are windows of it in the field ``tokens``; ``length``,
    ``stride``, ``labels`` and ``out`` are those of :class:`loader.formats.Tokens`, and the header says the dtype.
    """

    name: ClassVar[str] = "npy"
    dense: ClassVar[bool] = True
    columnar: ClassVar[bool] = True
    rows: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None and not self.rows:
            raise ConfigError("Npy(length=...) makes windows, rows=False one sample: choose one")
        if self.out is not None and self.length is None:
            raise ConfigError("Npy: out needs a length")

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        return data[: len(MAGIC)].tobytes() == MAGIC

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> NpyIndex:
        header = read_header(data[:MOST], len(data), url)
        if header.dtype.hasobject:
            hint = "save numbers, or bytes in another format"
            raise FormatError("an array of Python objects, which only unpickling could read", url=url, hint=hint)
        if self.length is not None:
            return NpyIndex(header, self._windows(data, header, url).rows)
        if self.rows and not header.shape:
            raise FormatError("an array without axes has no rows", url=url, hint="formats.Npy(rows=False)")
        return NpyIndex(header, header.rows if self.rows else 1)

    def source(self, data: Bytes, index: NpyIndex) -> Source:
        """The windows, or per field an array whose first axis is the sample."""
        if self.length is not None:
            return self._windows(data, index.header, "")
        array = index.header.array(data)
        array = array if self.rows else array[np.newaxis]
        names = array.dtype.names
        return {_VALUE: array} if names is None else {name: array[name] for name in names}

    def read(self, source: Source, index: NpyIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        if isinstance(source, Windows):
            return source.read(i, url, fields)
        sample = Sample()
        for name, array in source.items():
            if fields is None or name in fields:
                try:
                    sample[name] = value_at(array, i)
                except ValueError as e:
                    raise FormatError(f"field {name!r} of sample {i}: {e}", url=url) from e
        return sample

    def columns(
        self, source: Source, index: Any, rows: npt.NDArray[np.int64], url: str, fields: frozenset[str] | None = None
    ) -> dict[str, Any]:
        if isinstance(source, Windows):
            return source.columns(rows, fields)
        try:
            return {name: rows_of(array, rows) for name, array in source.items() if fields is None or name in fields}
        except ValueError as e:
            raise FormatError(f"a value is no text: {e}", url=url) from e

    def _windows(self, data: Bytes, header: NpyHeader, url: str) -> Windows:
        if len(header.shape) != 1:
            hint = "formats.Npy() makes a sample of each row"
            raise FormatError(f"an array of shape {header.shape}, no row of tokens", url=url, offset=0, hint=hint)
        tokens = header.array(data)
        windows = self.windows(tokens if tokens.dtype.isnative else tokens.astype(tokens.dtype.newbyteorder("=")), url)
        assert windows is not None  # there is a length
        return windows
