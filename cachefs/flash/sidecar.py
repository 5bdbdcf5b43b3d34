"""The sidecar: what an entry's data file is, and a digest of each chunk that is on disk.

Layout (little-endian)::

    0   8  magic b"NFSIDECR"
    8   4  u32 format version (1)
    12  4  u32 offset of the digest table, a multiple of 64
    16  4  u32 length of the description
    20  4  zero
    24  8  u64 xxh3 of bytes 0-23 and the description
    32  -  description: msgpack map of endpoint, url, version (bytes), size, chunk_size (integers)
    -   8n u64 xxh3 of each chunk, written after the chunk's bytes; 0 while the chunk is not on disk

A file of a later format version is somebody else's: it is reported as :class:`Foreign` and left alone. A file of
this version whose own digest does not fit is :class:`Damaged`.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass

import msgspec

from ..hashing import chunk_digest, name_digest

MAGIC = b"NFSIDECR"
VERSION = 1
_HEADER = struct.Struct("<8sIIIIQ")
_ALIGN = 64
FIRST_READ = 4096
"""Reading this much gets the whole description of any but an absurdly long URL."""
_MAX_DESCRIPTION = 1 << 20


class Foreign(Exception):
    """Not a sidecar of this format version; never touched."""


class Damaged(Exception):
    """A sidecar of ours that cannot be trusted any more."""


@dataclass(frozen=True)
class EntryKey:
    """One object at one version: which store, which URL, which ETag or version id."""

    endpoint: str
    url: str
    version: str

    @property
    def name(self) -> str:
        """40 hexadecimal digits: the stem of the entry's files."""
        return name_digest(self.endpoint, self.url, self.version)


class _Description(msgspec.Struct, frozen=True):
    endpoint: bytes
    url: bytes
    version: bytes
    size: int
    chunk_size: int


@dataclass(frozen=True)
class Header:
    """A decoded sidecar header. ``size`` and ``chunk_size`` in bytes, ``table_offset`` where the digests begin."""

    key: EntryKey
    size: int
    chunk_size: int
    table_offset: int

    @property
    def n_chunks(self) -> int:
        return -(-self.size // self.chunk_size)

    @property
    def file_bytes(self) -> int:
        return self.table_offset + 8 * self.n_chunks

    def chunk_bytes(self, chunk: int) -> int:
        """The length of one chunk: ``chunk_size``, less for the last."""
        return min(self.chunk_size, self.size - chunk * self.chunk_size)

    def digest_offset(self, chunk: int) -> int:
        return self.table_offset + 8 * chunk


def make_header(key: EntryKey, size: int, chunk_size: int) -> tuple[Header, bytes]:
    """A header and its bytes up to the digest table."""
    text = msgspec.msgpack.encode(
        _Description(_encode(key.endpoint), _encode(key.url), _encode(key.version), size, chunk_size)
    )
    offset = -(-(_HEADER.size + len(text)) // _ALIGN) * _ALIGN
    raw = _pack(offset, text) + text
    return Header(key, size, chunk_size, offset), raw.ljust(offset, b"\0")


def parse_header(raw: bytes) -> Header | int:
    """The header in the first bytes of a sidecar, or how many bytes are needed to tell.

    Raises :class:`Foreign` or :class:`Damaged`. A file that is empty or all zero is damaged, not foreign: a power cut
    leaves such files.
    """
    if len(raw) < _HEADER.size or not raw.strip(b"\0"):
        raise Damaged("the sidecar is cut short")
    magic, version, offset, length, _, digest = _HEADER.unpack_from(raw)
    if magic != MAGIC or version != VERSION:
        raise Foreign(f"not a sidecar of format version {VERSION}")
    if length > _MAX_DESCRIPTION or offset < _HEADER.size + length or offset % _ALIGN:
        raise Damaged("the sidecar's header makes no sense")
    text = raw[_HEADER.size : _HEADER.size + length]
    if len(text) < length:
        return _HEADER.size + int(length)
    if _pack(offset, text)[-8:] != raw[_HEADER.size - 8 : _HEADER.size]:
        raise Damaged(f"the sidecar's header does not fit its digest {digest:016x}")
    try:
        d = msgspec.msgpack.decode(text, type=_Description)
    except msgspec.MsgspecError as e:
        raise Damaged(f"the sidecar's description cannot be read: {e}") from e
    if d.size < 0 or d.chunk_size <= 0:
        raise Damaged("the sidecar's sizes make no sense")
    return Header(EntryKey(_decode(d.endpoint), _decode(d.url), _decode(d.version)), d.size, d.chunk_size, offset)


def parse_digests(raw: bytes, n_chunks: int) -> array[int]:
    """The digest table as native integers; raises :class:`Damaged` if it is cut short."""
    if len(raw) != 8 * n_chunks:
        raise Damaged("the sidecar's digest table is cut short")
    table = array("Q", raw)
    if sys.byteorder == "big":
        table.byteswap()
    return table


def pack_digest(digest: int) -> bytes:
    return digest.to_bytes(8, "little")


def stored_digest(data: memoryview | bytes) -> int:
    """The chunk digest as it is stored: never 0, which stands for "not on disk"."""
    return chunk_digest(data) or 1


def _pack(offset: int, text: bytes) -> bytes:
    head = _HEADER.pack(MAGIC, VERSION, offset, len(text), 0, 0)[:-8]
    return head + chunk_digest(head + text).to_bytes(8, "little")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
