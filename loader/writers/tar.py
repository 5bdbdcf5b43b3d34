"""WebDataset tar archives: a sample is neighbouring members ``<key>.<field>``, as webdataset 1.0 reads them.

What a field's value is read back as is told by the last part of its name, so a value whose field does not say it gets a
name that does (see :mod:`.members`). Members have fixed owners and times: the same samples give the same archives.
"""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Sequence
from typing import IO, cast

from cachefs.errors import DataError

from ..formats.tar_samples import META
from .abc import Placed, Writer
from .members import member

_BLOCK = 512
_END = bytes(20 * _BLOCK)
_NUMBER = "--keys number names samples by their number"


class TarWriter(Writer):
    """Members go straight to the file; only the one that is being written is held in memory."""

    name = "wds"
    shards = r"shard-\d{6,}\.tar(\.gz)?"
    compressions = ("gzip",)
    raw = True
    keyed = True

    def begin(self, first: Sequence[Placed]) -> None:
        if self.options.columns:
            raise DataError("a tar's members have no declared types", hint="--column is for MDS, Parquet and tokens")
        self._file: IO[bytes] | None = None
        self._packed: IO[bytes] | None = None
        self._size = 0
        self._key = ""

    def add(self, placed: Placed) -> None:
        key = self._named(placed)
        members: dict[str, tuple[str, bytes | memoryview]] = {}
        for name, value in placed.sample.items():
            if name == "__key__":
                continue
            try:
                suffix, data = member(name, value)
            except ValueError as e:
                raise placed.refuse(name, e, hint="leave it out with --fields") from e
            if META.match(f"{key}.{suffix}"):
                raise placed.refuse(name, f"readers pass over members like {f'{key}.{suffix}'!r}", hint=_NUMBER)
            if suffix.lower() in members:
                raise placed.refuse(name, f"two members of one sample would be {suffix.lower()!r}")
            members[suffix.lower()] = (suffix, data)
            self.written.columns.setdefault(name, f"member {suffix!r}")
        if not members:
            raise placed.refuse("__key__", "the sample has no other field, and a tar keeps no sample without members")
        size = sum(_BLOCK - (-len(data) // _BLOCK) * _BLOCK for _, data in members.values())
        if self._file is not None and self._size + size > self.options.shard_size:
            self._close()
        out = self._packed or self._file or self._open()
        for suffix, data in members.values():
            info = tarfile.TarInfo(f"{key}.{suffix}")
            info.size, info.mode = len(data), 0o444
            try:
                out.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
            except UnicodeError as e:
                raise placed.refuse(suffix, f"a name that no tar can hold: {e}") from e
            out.write(data)
            out.write(bytes(-len(data) % _BLOCK))
        self._size += size
        self._key = key

    def _named(self, placed: Placed) -> str:
        key = placed.sample.get("__key__") if self.options.keys == "keep" else None
        if key is None:
            return f"{placed.number:09d}"
        if not isinstance(key, str):
            raise placed.refuse("__key__", f"a {type(key).__name__} can be no tar member's key", hint=_NUMBER)
        base = key.rpartition("/")[2]
        if not key or "." in base or "\0" in key or "\n" in key or key.startswith("/"):
            raise placed.refuse("__key__", f"{key!r} can be no tar member's key", hint=_NUMBER)
        if self._file is not None and key == self._key:
            raise placed.refuse("__key__", f"{key!r} is the key of the sample before, too", hint=_NUMBER)
        return key

    def _open(self) -> IO[bytes]:
        self._shard = f"shard-{self.written.shards:06d}.tar" + (".gz" if self.options.compression else "")
        self._file = self.output.create(self._shard)
        if not self.options.compression:
            return self._file
        packed = gzip.GzipFile("", "wb", self.level(6, 9), self._file, mtime=0)
        self._packed = cast("IO[bytes]", packed)
        return self._packed

    def _close(self) -> None:
        assert self._file is not None
        (self._packed or self._file).write(_END)
        if self._packed is not None:
            self._packed.close()
        self._file.close()
        self._file = self._packed = None
        self._size = 0
        self.published(self.output.publish(self._shard))

    def end(self) -> None:
        self._close()
