"""Headerless token files, as nanoGPT's ``train.bin``: the ids of all samples one after the other, little-endian.

The field ``tokens`` is written, or the only field there is. The ids' type is that of the first sample's array
(``uint32`` for a list of numbers), or ``--column tokens=uint16``; an id that does not fit is refused. Nothing marks
where a sample ends: samples of one length are read back with ``formats.Tokens(length=...)``, others run together, as
training on packed documents wants it. Files end between samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from cachefs.errors import ConfigError

from .abc import Placed, Writer, column_names


class TokensWriter(Writer):
    """Samples go straight to the file."""

    name = "tokens"
    shards = r"tokens-\d{5,}\.bin"

    def begin(self, first: Sequence[Placed]) -> None:
        names = [name for name in column_names(first, self.options.columns) if not name.startswith("__")]
        if "tokens" not in names and len(names) != 1:
            raise ConfigError(f"which field holds the tokens: {', '.join(names)}?", hint="--fields names it")
        self._name = "tokens" if "tokens" in names else names[0]
        self._dtype = self._type(first[0]).newbyteorder("<")
        self._file: IO[bytes] | None = None
        self._size = 0
        self._lengths: set[int] = set()
        self.written.columns = {self._name: self._dtype.name}

    def _type(self, first: Placed) -> np.dtype[Any]:
        wanted = self.options.columns.get(self._name)
        value = first.sample.get(self._name)
        try:
            dtype = np.dtype(wanted or (value.dtype if isinstance(value, np.ndarray) else "uint32"))
        except TypeError:
            raise ConfigError(f"{wanted!r} is no dtype", hint='for example "uint16"') from None
        if dtype.kind not in "iu":
            raise first.refuse(self._name, f"ids of type {dtype}: token files hold whole numbers")
        return dtype

    def add(self, placed: Placed) -> None:
        if self._name not in placed.sample:
            raise placed.refuse(self._name, "the sample lacks it")
        try:
            ids = np.asarray(placed.sample[self._name])
        except ValueError as e:
            raise placed.refuse(self._name, e) from e
        if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
            raise placed.refuse(self._name, f"{ids.dtype} of shape {ids.shape} is no run of token ids")
        limits = np.iinfo(self._dtype)
        if ids.size and not (limits.min <= int(ids.min()) and int(ids.max()) <= limits.max):
            where = int(np.flatnonzero((ids < limits.min) | (ids > limits.max))[0])
            hint = f"--column {self._name}=uint32 writes wider ids"
            raise placed.refuse(self._name, f"the id {ids[where]} does not fit into {self._dtype.name}", hint=hint)
        data = np.ascontiguousarray(ids, dtype=self._dtype)
        if self._file is not None and self._size + data.nbytes > self.options.shard_size:
            self._close()
        if self._file is None:
            self._shard = f"tokens-{self.written.shards:05d}.bin"
            self._file = self.output.create(self._shard)
        self._file.write(data.data)
        self._size += data.nbytes
        if len(self._lengths) < 2:
            self._lengths.add(len(ids))

    def _close(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        self._size = 0
        self.published(self.output.publish(self._shard))

    def end(self) -> None:
        self._close()
        if len(self._lengths) == 1:
            length = next(iter(self._lengths))
            self.written.notes.append(f"read it with --format tokens --length {length} --dtype {self._dtype.name}")
        else:
            self.written.notes.append("samples have several lengths: the files do not tell where one ends")
