"""LMDB databases, read from the bytes of ``data.mdb`` by a reader of our own (:mod:`.lmdb_pages`).

It follows the page format of LMDB 0.9 (data version 1, 64-bit, little-endian) as ``mdb.c`` documents it, and gives the
records in the order of a cursor of the ``lmdb`` package.

On purpose different from opening the database with liblmdb: no lock file is made or needed, so a read-only folder
works; nothing has to be opened again after a fork; a cut or damaged file is an error and not a signal; values are views
into private writable memory that stay valid without a transaction. There is no transaction, so nobody may write to the
database while it is read; one that changed is told from its size and time stamp as any shard is. Also different:
records that tell how many samples there are (``length``, ``num-samples``, ``__len__``) are not samples, and the pairs
of text recognition sets (``image-000000001`` and ``label-000000001``) are one sample each; both can be switched off.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cachefs.errors import ConfigError, FormatError

from ..sample import Sample
from .abc import Bytes, Format, Ready, SampleIndex, all_there
from .lmdb_keys import Grouping, bookkeeping, group, key_bytes, spelled
from .lmdb_meta import TREE_SIZE, Tree, is_lmdb
from .lmdb_pages import BIG, DUP, DUPSORT, INTEGER_KEYS, SUB, Pages, Records, overflow_fault
from .options import settle_names

_KEY, _VALUE = "__key__", "value"


@dataclass(slots=True)
class LmdbIndex(SampleIndex):
    """Record ``i`` is sample ``i``, unless ``grouping`` says which records make which sample."""

    records: Records
    page_size: int
    integer_keys: bool
    grouping: Grouping | None
    skipped: int
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.records) if self.grouping is None else len(self.grouping.table)

    @property
    def nbytes(self) -> int:
        each = 27 * len(self.records)
        return each + (0 if self.grouping is None else self.grouping.table.nbytes) + 1000


@dataclass(frozen=True)
class Lmdb(Format):
    """An LMDB file: ``data.mdb``, or any name where the database was made with ``subdir=False``.

    A sample is ``__key__`` (``str``; bytes that are no UTF-8 as surrogate escapes, integer keys as decimal numbers) and
    ``value`` (a ``uint8`` view). A key with several values (``dupsort``) makes several samples.

    ``database``: the name of a sub-database. ``None``: the main one; or, where that holds nothing but one
    sub-database, that.

    ``skip``: keys that are no samples. ``None``: the bookkeeping that tools leave, which is ``length``,
    ``num-samples`` and ``num_samples`` where the value is a decimal number, and names like ``__len__`` and
    ``__keys__``. ``()``: every record is a sample.

    ``group``: ``True`` makes one sample of all records whose keys end in the same number: ``image-000000001`` and
    ``label-000000001`` become the fields ``image`` and ``label`` of the sample with key ``000000001``. ``False``: one
    record, one sample. ``None``: grouped where the record ``num-samples`` (not skipped by name only) says exactly how
    many such numbers there are. ``text``: fields of grouped samples that are UTF-8 text and become ``str``.
    """

    name: ClassVar[str] = "lmdb"
    database: str | None = None
    group: bool | None = None
    skip: tuple[str, ...] | None = None
    text: tuple[str, ...] = ("label",)

    def __post_init__(self) -> None:
        settle_names(self, "skip", empty=True)
        settle_names(self, "text", optional=False, empty=True)

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        return is_lmdb(data)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> LmdbIndex:
        pages = Pages(data, url)
        tree, records, notes = self._database(pages)
        records = _each_value(pages, tree, records) if tree.flags & DUPSORT else records
        kept, counted = bookkeeping(data, records, self.skip)
        skipped = len(records) - int(np.count_nonzero(kept))
        if skipped:
            records = records.only(kept)
        inner = records.flags & (SUB | DUP) == SUB
        if inner.any():
            names = ", ".join(repr(spelled(key)) for key in key_bytes(data, records.only(inner))[:5])
            notes += (f"beside its records it has sub-databases, which are not read: {names}",)
            skipped += int(np.count_nonzero(inner))
            records = records.only(~inner)
        integers = bool(tree.flags & INTEGER_KEYS)
        grouping = None
        if self.group or (self.group is None and counted is not None and not integers):
            grouping = group(data, records, url, counted if self.group is None else None)
            if grouping is None:
                notes += ("its keys do not make the pairs that num-samples promises: every record is a sample",)
        return LmdbIndex(records, pages.size, integers, grouping, skipped, notes)

    def read(self, source: Bytes, index: LmdbIndex, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        sample = Sample()
        records, grouping = index.records, index.grouping
        if grouping is None:
            sample[_KEY] = self._key(source, index, i)
            if fields is None or _VALUE in fields:
                sample[_VALUE] = _value(source, index, i, i, url)
            return sample
        row = grouping.table[i].tolist()
        first = next(record for record in row if record >= 0)
        sample[_KEY] = spelled(_raw_key(source, records, first)).rpartition("-")[2]
        for name, record in zip(grouping.names, row, strict=True):
            if record >= 0 and (fields is None or name in fields):
                value = _value(source, index, record, i, url)
                sample[name] = _text(value, name, i, url, int(records.at[record])) if name in self.text else value
        return sample

    def kind(self, index: LmdbIndex, name: str) -> str:
        return "jpg" if index.grouping is not None and name == "image" else ""  # any encoding: its bytes tell

    def _key(self, source: Bytes, index: LmdbIndex, i: int) -> str:
        raw = _raw_key(source, index.records, i)
        return str(int.from_bytes(raw, "little")) if index.integer_keys else spelled(raw)

    def _database(self, pages: Pages) -> tuple[Tree, Records, tuple[str, ...]]:
        """The tree to read and its records."""
        main = pages.records(pages.main, "the main database")
        inner = np.flatnonzero(main.flags & (SUB | DUP) == SUB)
        if self.database is None and not (len(inner) and len(inner) == len(main)):
            return pages.main, main, ()
        names = [spelled(key) for key in key_bytes(pages.data, main.only(inner))]
        if self.database is None and len(names) > 1:
            raise ConfigError(
                f"holds {len(names)} databases and no records beside them",
                url=pages.url,
                hint=f"choose one: formats.Lmdb(database={names[0]!r}); there are {', '.join(map(repr, names[:20]))}",
            )
        name = names[0] if self.database is None else self.database
        if name not in names:
            known = ", ".join(map(repr, names[:20])) or "none"
            raise ConfigError(f"has no database {name!r}", url=pages.url, hint=f"there are: {known}")
        place = inner[names.index(name)]
        at, size = int(main.at[place]), int(main.size[place])
        if at < 0 or size != TREE_SIZE:
            raise FormatError(f"the description of database {name!r} is damaged", url=pages.url, offset=max(at, 0))
        tree = Tree.parse(pages.data[at : at + size].tobytes())
        return tree, pages.records(tree, f"database {name!r}"), ()


def _each_value(pages: Pages, tree: Tree, records: Records) -> Records:
    """The records of a database in which keys may have several values: one for each value."""
    several = np.flatnonzero(records.flags & DUP)
    counts = np.ones(len(records), np.int64)
    found = []
    for i in several.tolist():
        at, size = int(records.at[i]), int(records.size[i])
        if at < 0:
            raise FormatError("the values of a key are damaged", url=pages.url, offset=int(records.key_at[i]))
        found.append(pages.values_of(at, size, int(records.flags[i])))
        counts[i] = len(found[-1][0])
    if counts.sum() != tree.entries:
        raise FormatError(f"it has {counts.sum()} records, its description says {tree.entries}", url=pages.url)
    out = records.only(np.repeat(np.arange(len(records)), counts))
    starts = np.cumsum(counts) - counts
    for i, (places, sizes) in zip(several.tolist(), found, strict=True):
        out.at[starts[i] : starts[i] + counts[i]] = places
        out.size[starts[i] : starts[i] + counts[i]] = sizes
        out.flags[starts[i] : starts[i] + counts[i]] = 0
    return out


def _raw_key(source: Bytes, records: Records, i: int) -> bytes:
    at = int(records.key_at[i])
    return source[at : at + int(records.key_size[i])].tobytes()


def _value(source: Bytes, index: LmdbIndex, record: int, sample: int, url: str) -> Bytes:
    records = index.records
    at, size = int(records.at[record]), int(records.size[record])
    if at < 0:
        what = f"the record of sample {sample} is longer than its page or lies outside of the file"
        raise FormatError(what, url=url, offset=int(records.key_at[record]))
    if records.flags[record] & BIG:
        fault = overflow_fault(source, at, size, index.page_size)
        if fault is not None:
            raise FormatError(f"the record of sample {sample}: {fault}", url=url, offset=at)
    return source[at : at + size]


def _text(value: Bytes, name: str, sample: int, url: str, at: int) -> str:
    try:
        return str(value.data, "utf-8")
    except UnicodeDecodeError as e:
        hint = "formats.Lmdb(text=()) leaves it as bytes"
        raise FormatError(f"field {name!r} of sample {sample} is no UTF-8: {e}", url=url, offset=at, hint=hint) from e
