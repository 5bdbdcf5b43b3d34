"""The meta pages of LMDB: what kind of file it is, and where its trees begin.

Learned from the structures that ``mdb.c`` documents. Pages 0 and 1 are meta pages, written in turn, and the one with
the higher transaction number holds. It names the roots of the trees of free pages (not needed for reading) and of the
main database.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cachefs.errors import FormatError, UnknownFormat

from .abc import Bytes

MAGIC = b"\xde\xc0\xef\xbe"
VERSION = 1
META = 0x08
"""The flag of a meta page."""
_META_SIZE = 152
_SMALLEST_PAGE, _LARGEST_PAGE = 256, 32768
_TREE = struct.Struct("<IHHQQQQQ")
TREE_SIZE = _TREE.size
_COPY = "mdb_dump there and mdb_load here copy it"


class Tree(NamedTuple):
    """The description of one B+ tree: a database, or the values of one key."""

    flags: int
    depth: int
    entries: int
    root: int

    @classmethod
    def parse(cls, raw: bytes) -> Tree:
        _, flags, depth, _, _, _, entries, root = _TREE.unpack(raw)
        return cls(flags, depth, entries, root)


class Meta(NamedTuple):
    """What a meta page says. ``pages``: how many the file has, pages that are free included."""

    main: Tree
    page_size: int
    pages: int
    transaction: int


def is_lmdb(data: Bytes) -> bool:
    """Whether the bytes begin with a meta page, of any version and word size."""
    head = data[:20].tobytes()
    return head[16:20] in (MAGIC, MAGIC[::-1]) or (head[12:16] == MAGIC and head[6] & META != 0)


def newest_meta(data: Bytes, url: str) -> Meta:
    """The meta page that holds. Raises ``UnknownFormat`` for a file of another version or machine."""
    size = _page_size(data, url)
    metas = [_meta(data, number * size, size, url) for number in (0, 1)]
    transactions = [found.transaction for found in metas]
    # transaction n writes meta page n % 2; a new file has two of transaction 0
    if any(transactions) and [number % 2 for number in transactions] != [0, 1]:
        raise FormatError(f"the meta pages tell of transactions {transactions}: damaged", url=url, offset=0)
    return max(metas, key=lambda found: found.transaction)


def _page_size(data: Bytes, url: str) -> int:
    head = data[:_META_SIZE].tobytes()
    if len(head) < _META_SIZE:
        raise FormatError(f"{len(head)} bytes are too few for a meta page of LMDB", url=url, offset=0)
    if head[16:20] != MAGIC:
        if head[12:16] == MAGIC:
            raise UnknownFormat("an LMDB file of a 32-bit machine, which is not read", url=url, hint=_COPY)
        if head[16:20] == MAGIC[::-1]:
            raise UnknownFormat("an LMDB file of a big-endian machine, which is not read", url=url, hint=_COPY)
        raise FormatError("no meta page of LMDB", url=url, offset=0)
    size = int.from_bytes(head[40:44], "little")
    if size & (size - 1) or not _SMALLEST_PAGE <= size <= _LARGEST_PAGE:
        raise FormatError(f"declares pages of {size} bytes", url=url, offset=40)
    if len(data) < 2 * size:
        raise FormatError(f"{len(data)} bytes do not hold two pages of {size}: cut off", url=url, offset=len(data))
    return size


def _meta(data: Bytes, at: int, page_size: int, url: str) -> Meta:
    raw = data[at : at + _META_SIZE].tobytes()
    magic, version = raw[16:20], int.from_bytes(raw[20:24], "little")
    if magic != MAGIC or not int.from_bytes(raw[10:12], "little") & META:
        raise FormatError("a meta page is damaged", url=url, offset=at)
    if version != VERSION:
        raise UnknownFormat(f"LMDB's data version {version}; version {VERSION} is read", url=url)
    if int.from_bytes(raw[40:44], "little") != page_size:
        raise FormatError("the meta pages name different page sizes", url=url, offset=at + 40)
    last, transaction = struct.unpack("<QQ", raw[136:152])
    if last < 1 or last >= 1 << 47:
        raise FormatError(f"declares {last + 1} pages", url=url, offset=at + 136)
    return Meta(Tree.parse(raw[88:136]), page_size, last + 1, transaction)
