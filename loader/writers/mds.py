"""MDS shards and their ``index.json``, version 2, as mosaicml-streaming's ``MDSWriter`` lays them out.

Columns stand in the order of their names, the size limit counts bytes before compression, and each shard's SHA-1 is in
the index. See :mod:`.mds_columns` for what a value becomes.

On purpose different: columns are found from the first samples instead of being declared (``columns`` declares some),
arrays may have axes of length 0, and nothing is ever pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from cachefs.errors import ConfigError

from ..formats.mds_columns import make_column
from ..layouts.mds_index import INDEX
from .abc import Placed, Writer, column_names
from .mds_columns import Encode, choose, encoder

_MOST = (1 << 32) - 1
"""Offsets are 32 bits wide."""


class MdsWriter(Writer):
    """One shard is put together in memory, so it takes about as much as a shard is large."""

    name = "mds"
    shards = r"shard\.\d{5,}\.mds(\.zstd)?|index\.json"
    compressions = ("zstd",)

    def begin(self, first: Sequence[Placed]) -> None:
        names = column_names(first, self.options.columns)
        self._encodings = {name: self._choose(name, first) for name in sorted(names)}
        self._encode: dict[str, Encode] = {name: encoder(e) for name, e in self._encodings.items()}
        self._sizes = [make_column(name, e).size for name, e in self._encodings.items()]
        self._head = json.dumps({**self._described(), "size_limit": self.options.shard_size, "version": 2}).encode()
        self._bodies: list[bytes] = []
        self._size = 8 + len(self._head)
        self._index: list[dict[str, Any]] = []
        self.written.columns = dict(self._encodings)

    def _choose(self, name: str, first: Sequence[Placed]) -> str:
        wanted = self.options.columns.get(name)
        if wanted is not None:
            try:
                encoder(wanted)
            except ValueError as e:
                raise ConfigError(f"column {name!r}: {e}") from e
            return wanted
        for placed in first:
            if name not in placed.sample:
                raise _lacking(placed, name)
        try:
            return choose([placed.sample[name] for placed in first])
        except ValueError as e:
            at = next((p for p in first if _unfit(p.sample[name])), first[0])
            raise at.refuse(name, e, hint="leave it out with --fields, or name an encoding with --column") from e

    def _described(self) -> dict[str, Any]:
        return {
            "column_encodings": list(self._encodings.values()),
            "column_names": list(self._encodings),
            "column_sizes": self._sizes,
            "compression": self.options.compression,
            "format": "mds",
            "hashes": ["sha1"],
        }

    def add(self, placed: Placed) -> None:
        sample = placed.sample
        if len(sample) > len(self._encode):
            name = next(name for name in sample if name not in self._encode)
            raise placed.refuse(name, "the first samples have no such field", hint="choose fields with --fields")
        values = []
        for name, encode in self._encode.items():
            if name not in sample:
                raise _lacking(placed, name)
            try:
                values.append(encode(sample[name]))
            except ValueError as e:
                hint = f"the first samples made it {self._encodings[name]}; --column {name}=ENCODING names another"
                raise placed.refuse(name, e, hint=hint) from e
        lengths = [len(value) for value, size in zip(values, self._sizes, strict=True) if size is None]
        if max(lengths, default=0) > _MOST:
            longest = max(zip(values, self._encode, strict=True), key=lambda pair: len(pair[0]))[1]
            raise placed.refuse(longest, "more than 4 GiB", hint="sizes of MDS have 32 bits")
        body = b"".join((np.array(lengths, "<u4").tobytes(), *values))
        size = 4 + len(body)
        if self._bodies and self._size + size > min(self.options.shard_size, _MOST):
            self._flush()
        if self._size + size > _MOST:
            raise placed.refuse(next(iter(self._encode)), "the sample is larger than 4 GiB, the most that MDS holds")
        self._bodies.append(body)
        self._size += size

    def _flush(self) -> None:
        table = 4 + 4 * (len(self._bodies) + 1)
        offsets = np.cumsum([table + len(self._head), *map(len, self._bodies)], dtype=np.int64)
        head = np.array([len(self._bodies)], "<u4").tobytes() + offsets.astype("<u4").tobytes() + self._head
        raw = b"".join((head, *self._bodies))
        name = f"shard.{len(self._index):05d}.mds"
        entry = {**self._described(), "samples": len(self._bodies), "size_limit": self.options.shard_size, "version": 2}
        entry["raw_data"] = _data(name, raw)
        entry["zip_data"] = None
        if self.options.compression:
            name, raw = name + ".zstd", _zstd(raw, self.level(3, 22))
            entry["zip_data"] = _data(name, raw)
        self.published(self.output.put(name, raw))
        self._index.append(entry)
        self._bodies = []
        self._size = 8 + len(self._head)

    def end(self) -> None:
        self._flush()
        self.output.put(INDEX, json.dumps({"shards": self._index, "version": 2}).encode())


def _lacking(placed: Placed, name: str) -> Exception:
    return placed.refuse(name, "the sample lacks it, and an MDS sample has all columns", hint="choose with --fields")


def _unfit(value: Any) -> bool:
    try:
        choose([value])
    except ValueError:
        return True
    return False


def _data(name: str, raw: bytes) -> dict[str, Any]:
    return {
        "basename": name,
        "bytes": len(raw),
        "hashes": {"sha1": hashlib.sha1(raw, usedforsecurity=False).hexdigest()},
    }


def _zstd(raw: bytes, level: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(raw)
