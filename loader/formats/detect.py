"""Which format a shard is in, told from its first bytes and never from its name."""

from __future__ import annotations

from cachefs.errors import ConfigError, FormatError, NotFound, UnknownFormat

from .abc import Bytes, Format, Objects
from .magic import codec_of
from .packed_head import begins
from .registry import BY_NAME, ORDER
from .tar_header import BLOCK, is_blank

HEAD = 4096
_ENOUGH = 1 << 20
"""Bytes that hold the first block of any compressed file."""
_PACKED = {"gz": "a gzip", "zstd": "a Zstandard", "bz2": "a bzip2", "xz": "an xz"}
_OTHERS = {
    b"\xde\xc0\xef\xbe": "LMDB's lock file; open the data.mdb beside it",
    b"\x89HDF\r\n": "HDF5, which is not read",
    b"SQLite format 3": "SQLite, which is not read",
    b"PK\x03\x04": "a zip archive that is no npz, which is not read",
}
_TOKENS_HINT = 'headerless token files need format=formats.Tokens(length=2048, dtype="uint16")'


def resolve(format: str | Format | None) -> Format | None:
    """The format that the user named; ``None`` where the bytes shall decide."""
    if format is None or isinstance(format, Format):
        return format
    if format == "tokens":
        raise ConfigError("format='tokens' does not say length and dtype", hint=_TOKENS_HINT)
    if not isinstance(format, str) or format not in BY_NAME:
        raise ConfigError(f"format={format!r} is not known", hint=f"known: {', '.join(BY_NAME)}, formats.Tokens(...)")
    return BY_NAME[format]()


def detect(objects: Objects, url: str) -> Format | None:
    """The format of a shard. ``None``: nothing but zeros, as an empty tar is; other shards have to tell.

    Raises ``UnknownFormat`` that says what the bytes look like, or what to write for a headerless file; an empty file
    is a ``FormatError``.
    """
    try:
        data, ready = objects.map(url)
        ready(0, len(data))
    except NotFound:
        found = _beside(objects, url)
        if found is None:
            raise
        return found
    if len(data) == 0 or is_blank(data[:BLOCK].data):  # padding tokens look like that too, if an index says so
        return _beside(objects, url) or detect_bytes(data, url)
    known = detect_bytes(data, url, lost=False)
    if known is not None:
        return known
    found = _beside(objects, url)
    if found is None:
        raise _unknown(data, url)
    return found


def _beside(objects: Objects, url: str) -> Format | None:
    return next((found for kind in ORDER if (found := kind.beside(objects, url)) is not None), None)


def detect_bytes(data: Bytes, url: str, *, lost: bool = True) -> Format | None:
    """As :func:`detect`, from one object's bytes alone. ``lost=False``: ``None`` also for what is not known."""
    if len(data) == 0:
        raise FormatError("an empty file holds no shard", url=url, offset=0)
    head = peek(data)
    if is_blank(memoryview(head)[:BLOCK]):
        return None
    for kind in ORDER:
        if kind.matches(head, data):
            return kind()
    if lost:
        raise _unknown(data, url)
    return None


def _unknown(data: Bytes, url: str) -> UnknownFormat:
    head = data[:16].tobytes()
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            return UnknownFormat(f"looks like {what}", url=url)
    codec = codec_of(data)
    if codec is not None:
        return UnknownFormat(f"{_PACKED[codec]} file that holds no known format", url=url)
    return UnknownFormat("no known format fits the bytes", url=url, hint=_TOKENS_HINT)


def peek(data: Bytes) -> bytes:
    """The first :data:`HEAD` bytes of what the shard decompresses to, or of itself; less where it is damaged."""
    head = data[:HEAD].tobytes()
    if codec_of(data) is None or any(kind.is_plain(head) for kind in ORDER):
        return head
    return begins(data[:_ENOUGH], HEAD)
