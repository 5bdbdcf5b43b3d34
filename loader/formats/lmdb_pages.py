"""The page format of LMDB: the walk of one B+ tree to the places of all its records.

Learned from the structures that ``mdb.c`` documents. A file is an array of pages. The first two are meta pages
(:mod:`.lmdb_meta`), which name the root of the main database. A page begins with its number, a word of padding, flags,
and the bounds of its free space; then the offsets of its nodes follow. A node is the low and high half of a size, flags
and the size of its key (2 bytes each), then the key and the data. In a branch the first three are a page number
instead. Data that is too long for a leaf lies in overflow pages, and the node holds the number of the first. All
numbers are little-endian.

A whole level of the tree is decoded at once, in numpy: indexing a million records takes no million steps of Python.
Every number is checked against the file before it is followed, and no page is visited twice, so a damaged tree ends in
an error and never in a loop.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from .abc import Bytes
from .lmdb_meta import META, TREE_SIZE, Tree, newest_meta

Ints = npt.NDArray[np.int64]

HEADER = 16
NODE = 8
_BRANCH, _LEAF, OVERFLOW, _LEAF2 = 0x01, 0x02, 0x04, 0x20
BIG, SUB, DUP = 0x01, 0x02, 0x04
"""Flags of a node: its data lies in overflow pages; is a tree; stands for several values."""
DUPSORT, INTEGER_KEYS = 0x04, 0x08
"""Flags of a database."""
_EMPTY = (1 << 64) - 1
_DEEPEST = 32
_AT_ONCE = 2048


@dataclass(slots=True)
class Records:
    """Where keys and data lie, one entry a record, in the tree's order. For ``BIG`` data ``at`` is the overflow page's
    header plus :data:`HEADER`; ``at = -1``: the record's data lies outside of what it may use."""

    key_at: Ints
    key_size: npt.NDArray[np.uint16]
    at: Ints
    size: Ints
    flags: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.at)

    @classmethod
    def joined(cls, parts: list[Records]) -> Records:
        if not parts:
            return cls(_ints(0), np.zeros(0, np.uint16), _ints(0), _ints(0), np.zeros(0, np.uint8))
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))

    def only(self, which: npt.NDArray[Any]) -> Records:
        """Those that a mask or an array of numbers names."""
        return Records(*(getattr(self, name)[which] for name in self.__slots__))


class Pages:
    """The pages of one file, as its newest meta page describes them. Raises ``FormatError`` where that is damaged."""

    def __init__(self, data: Bytes, url: str) -> None:
        self.data = data
        self.url = url
        found = newest_meta(data, url)
        self.main = found.main
        self.size = found.page_size
        self.declared = found.pages
        there = len(data) // self.size
        self.count = min(self.declared, there)
        self.words: npt.NDArray[np.uint16] = data[: there * self.size].view("<u2")
        self._seen = np.zeros(self.count, np.bool_)

    @property
    def is_cut(self) -> bool:
        """Whether the file has fewer pages than its meta page says; the pages it lacks may all be free ones."""
        return self.count < self.declared

    def records(self, tree: Tree, what: str) -> Records:
        """All records of a tree, which must be as many as it says."""
        parts = []
        for pages in self._leaves(tree, what):
            node, page = self._nodes(pages, _LEAF)
            parts.append(self._records(node, page))
        found = Records.joined(parts)
        if not tree.flags & DUPSORT and len(found) != tree.entries:
            raise FormatError(f"{what} has {len(found)} records, its description says {tree.entries}", url=self.url)
        return found

    def values_of(self, at: int, size: int, flags: int) -> tuple[Ints, Ints]:
        """Places and sizes of the values of one key that has several, in their order."""
        if not flags & SUB:
            return self._keys_as_values(at, size)
        if size != TREE_SIZE:
            raise FormatError("a key's tree of values is described in a wrong size", url=self.url, offset=at)
        tree = Tree.parse(self.data[at : at + size].tobytes())
        starts, sizes = [], []
        for pages in self._leaves(tree, "a key's tree of values"):
            for page in pages.tolist():
                found = self._keys_as_values(page * self.size, self.size)
                starts.append(found[0])
                sizes.append(found[1])
        if sum(map(len, starts)) != tree.entries:
            raise FormatError("a key has other values than its description says", url=self.url, offset=at)
        return (np.concatenate(starts), np.concatenate(sizes)) if starts else (_ints(0), _ints(0))

    def _leaves(self, tree: Tree, what: str) -> list[Ints]:
        """The numbers of a tree's leaf pages, in order, some thousands at a time."""
        if tree.root == _EMPTY:
            return []
        if not 1 <= tree.depth <= _DEEPEST:
            raise FormatError(f"{what} is declared as {tree.depth} levels deep", url=self.url)
        level = self._visit(np.array([min(tree.root, np.iinfo(np.int64).max)], np.int64), what)
        for _ in range(tree.depth - 1):
            children = [self._children(level[i : i + _AT_ONCE]) for i in range(0, len(level), _AT_ONCE)]
            level = self._visit(np.concatenate(children), what)
        return [level[i : i + _AT_ONCE] for i in range(0, len(level), _AT_ONCE)]

    def _visit(self, pages: Ints, what: str) -> Ints:
        bad = np.flatnonzero((pages < 2) | (pages >= self.count))
        if len(bad):
            page = int(pages[bad[0]])
            why = "cut off" if self.count <= page < self.declared else "damaged"
            raise FormatError(f"{what} needs page {page}, the file has {self.count}: {why}", url=self.url)
        if self._seen[pages].any() or len(np.unique(pages)) != len(pages):
            raise FormatError(f"{what} comes to one page twice: damaged", url=self.url)
        self._seen[pages] = True
        head = pages * (self.size // 2)
        low, mid, high, top = (self.words[head + k].astype(np.int64) for k in range(4))
        own = low | mid << 16 | high << 32 | top << 48
        wrong = np.flatnonzero(own != pages)
        if len(wrong):
            page = int(pages[wrong[0]])
            raise FormatError(f"page {page} says that it is another: damaged", url=self.url, offset=page * self.size)
        return pages

    def _children(self, pages: Ints) -> Ints:
        node = self._nodes(pages, _BRANCH)[0] // 2
        low, high, top = (self.words[node + k].astype(np.int64) for k in range(3))
        return low | high << 16 | top << 32

    def _nodes(self, pages: Ints, kind: int) -> tuple[Ints, Ints]:
        """The file offsets of all nodes of these pages, and the offset of the page that each is on."""
        head = pages * (self.size // 2)
        flags, lower, upper = (self.words[head + k].astype(np.int64) for k in (5, 6, 7))
        self._demand(flags & (_BRANCH | _LEAF | OVERFLOW | META | _LEAF2) == kind, pages, "is of another kind")
        self._demand(
            (lower >= HEADER) & (lower % 2 == 0) & (lower <= upper) & (upper <= self.size), pages, "has wrong bounds"
        )
        counts = (lower - HEADER) // 2
        if kind == _BRANCH:
            self._demand(counts > 0, pages, "is a branch of nothing")
        self._demand(counts * NODE <= self.size - upper, pages, "has no room for its nodes")
        owner = np.repeat(np.arange(len(pages)), counts)
        slot = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        offset = self.words[head[owner] + HEADER // 2 + slot].astype(np.int64)
        inside = (offset >= upper[owner]) & (offset % 2 == 0) & (offset + NODE <= self.size)
        self._demand(inside, pages[owner], "has a node outside of itself")
        start = pages[owner] * self.size
        return start + offset, start

    def _records(self, node: Ints, page: Ints) -> Records:
        low, high, flags, key_size = (self.words[node // 2 + k] for k in range(4))
        size = low.astype(np.int64) | high.astype(np.int64) << 16
        key_at = node + NODE
        at = key_at + key_size
        end = page + self.size
        big = flags & BIG != 0
        self._demand(at + np.where(big, 8, 0) <= end, page // self.size, "has a node that is longer than itself")
        good = at + size <= end
        if big.any():
            number = self.data[at[big][:, None] + np.arange(8)].view("<u8")[:, 0]
            in_file = number < self.count
            start = np.where(in_file, number, 0).astype(np.int64) * self.size + HEADER
            at[big] = start
            good[big] = in_file & (number >= 2) & (start + size[big] <= self.count * self.size)
            if self.is_cut and not good.all():
                raise FormatError(
                    f"has {self.count} of {self.declared} pages, and values lie behind its end: cut off",
                    url=self.url,
                    offset=len(self.data),
                )
        at[~good] = -1
        return Records(key_at, key_size.astype(np.uint16), at, size, flags.astype(np.uint8))

    def _demand(self, good: npt.NDArray[np.bool_], pages: Ints, what: str) -> None:
        if not good.all():
            page = int(pages[np.flatnonzero(~good)[0]])
            raise FormatError(f"page {page} {what}: damaged", url=self.url, offset=page * self.size)

    def _keys_as_values(self, at: int, room: int) -> tuple[Ints, Ints]:
        """The keys on a leaf page, or on the small page in a leaf's node: there they are the values of another key."""
        error = FormatError("a page of values is damaged", url=self.url, offset=at)
        if room < HEADER:
            raise error
        _, width, flags, lower, _ = struct.unpack("<QHHHH", self.data[at : at + HEADER].tobytes())
        count = (lower - HEADER) // 2
        if not flags & _LEAF or count < 0:
            raise error
        if flags & _LEAF2:
            if HEADER + count * max(width, 1) > room:
                raise error
            return at + HEADER + np.arange(count, dtype=np.int64) * width, np.full(count, width, np.int64)
        if HEADER + 2 * count > room:
            raise error
        node = self.data[at + HEADER : at + HEADER + 2 * count].tobytes()
        offset = np.frombuffer(node, "<u2").astype(np.int64)
        if (offset + NODE > room).any():
            raise error
        sizes = self.data[(at + offset + 6)[:, None] + np.arange(2)].view("<u2")[:, 0].astype(np.int64)
        if (offset + NODE + sizes > room).any():
            raise error
        return at + offset + NODE, sizes


def overflow_fault(data: Bytes, at: int, size: int, page_size: int) -> str | None:
    """What is wrong with the header of the overflow pages whose data begins at ``at``; ``None``: nothing."""
    number, _, flags, pages = struct.unpack("<QHHI", data[at - HEADER : at].tobytes())
    if number * page_size != at - HEADER or not flags & OVERFLOW or HEADER + size > pages * page_size:
        return "its overflow pages are not those that it names"
    return None


def _ints(count: int) -> Ints:
    return np.zeros(count, np.int64)
