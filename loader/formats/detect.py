"""Which format a shard is in, told from its first bytes and never from its name."""

from __future__ import annotations

import zlib

import numpy as np

from cachefs.errors import ConfigError, FormatError, UnknownFormat

from .abc import Bytes, Format
from .mds import Mds
from .packed import GZIP, ZSTD, unzstd
from .tar import BLOCK, is_blank, is_tar
from .webdataset import WebDataset

_NAMED: dict[str, type[Format]] = {"webdataset": WebDataset, "wds": WebDataset, "tar": WebDataset, "mds": Mds}
_OTHERS = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow IPC",
    b"\x93NUMPY": "NumPy",
    b"PK\x03\x04": "zip (npz?)",
    b"MMIDIDX\x00": "a Megatron index",
    b"\x89HDF\r\n": "HDF5",
    b"SQLite format 3": "SQLite",
}
_TOKENS_HINT = 'headerless token files need format=formats.Tokens(length=2048, dtype="uint16")'


def resolve(format: str | Format | None) -> Format | None:
    """The format that the user named; ``None`` where the bytes shall decide."""
    if format is None or isinstance(format, Format):
        return format
    if format == "tokens":
        raise ConfigError("format='tokens' does not say length and dtype", hint=_TOKENS_HINT)
    if not isinstance(format, str) or format not in _NAMED:
        raise ConfigError(f"format={format!r} is not known", hint=f"known: {', '.join(_NAMED)}, formats.Tokens(...)")
    return _NAMED[format]()


def detect(data: Bytes, url: str) -> Format | None:
    """The format of a whole shard. ``None``: nothing but zeros, as an empty tar is; other shards have to tell.

    Raises ``UnknownFormat`` that says what the bytes look like, or what to write for a headerless file; an empty file
    is a ``FormatError``.
    """
    if len(data) == 0:
        raise FormatError("an empty file holds no shard", url=url, offset=0)
    head = data[:BLOCK].tobytes()
    if head.startswith(GZIP):
        head = _gzip_head(data)
        if len(head) == BLOCK and (is_tar(memoryview(head)) or is_blank(memoryview(head))):
            return WebDataset()
        raise UnknownFormat("a gzip file that holds no tar archive", url=url, hint="only .tar.gz is read by now")
    if head.startswith(ZSTD):
        inner = unzstd(data, url)
        if _is_mds(inner):
            return Mds()
        raise UnknownFormat("a Zstandard file that holds no MDS shard", url=url)
    if is_blank(memoryview(head)):
        return None
    if is_tar(memoryview(head)):
        return WebDataset()
    if _is_mds(data):
        return Mds()
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise UnknownFormat(f"looks like {what}, which is not read by now", url=url)
    raise UnknownFormat("no known format fits the bytes", url=url, hint=_TOKENS_HINT)


def _is_mds(data: Bytes) -> bool:
    try:
        Mds().index(data, "")
    except FormatError:
        # A shard whose offsets are damaged still begins with its table and the description of its columns.
        n = int(data[:4].view(np.uint32)[0]) if len(data) >= 4 else 0
        table = 4 + 4 * (n + 1)
        return b'"column_encodings"' in data[table : table + 64].tobytes()
    return True


def _gzip_head(data: Bytes) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(data[: 16 * BLOCK].tobytes(), BLOCK)
    except zlib.error:
        return b""
