"""What a directory holds after its last owner died at any moment: a listing, and a pure decision about it.

The store changes names only in these orders, so every crash leaves one of the situations that :func:`decide` knows:

- create: data file in ``filling``, then its sidecar;
- publish: data from ``filling`` to ``entries``, then the sidecar after it;
- evict: sidecar removed, then data renamed to ``dying``, then (when nobody holds it) removed.

An entry is visible only with both files, and no chunk is read before its digest was checked, so a file that a crash
left torn is never served. No data file is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .chunkfile import read_header
from .fileops import FileOps, Found
from .layout import Layout, Place, dying_serial, meta_name, parse_name
from .sidecar import Damaged, Foreign


class Pair(NamedTuple):
    """The two files of one entry in one place; None for one that is not there."""

    data: Found | None = None
    meta: Found | None = None


@dataclass(frozen=True)
class Listing:
    """Our files by entry name in ``entries`` and ``filling``, and those in ``dying``."""

    entries: Mapping[str, Pair] = field(default_factory=dict)
    filling: Mapping[str, Pair] = field(default_factory=dict)
    dying: tuple[Found, ...] = ()


class Kept(NamedTuple):
    """An entry to keep. Its two places differ only if it died half-published: the sidecar has to follow the data."""

    name: str
    data: Found
    meta: Found
    place: Place
    meta_place: Place


class Leftover(NamedTuple):
    """A file to remove once nobody holds it. ``name`` is the entry's."""

    name: str
    place: Place
    file: Found


@dataclass(frozen=True)
class Verdict:
    """``kept`` least recently used first."""

    kept: tuple[Kept, ...]
    leftovers: tuple[Leftover, ...]


def decide(listing: Listing) -> Verdict:
    """Pure: which entries a directory holds, and which files are the leftovers of a crash.

    A published pair wins over a filling one of the same name. A half-published one (data in ``entries``, sidecar still
    in ``filling``) is kept and finished: publishing begins only when every digest is recorded, and each chunk is
    verified before it is read anyway.
    """
    kept: list[Kept] = []
    leftovers = [Leftover(found.name.split(".")[0], Place.DYING, found) for found in listing.dying]

    def drop(name: str, place: Place, pair: Pair) -> None:
        leftovers.extend(Leftover(name, place, f) for f in (pair.meta, pair.data) if f is not None)

    for name in sorted(listing.entries.keys() | listing.filling.keys()):
        published = listing.entries.get(name, Pair())
        filling = listing.filling.get(name, Pair())
        if published.data and published.meta:
            kept.append(Kept(name, published.data, published.meta, Place.ENTRIES, Place.ENTRIES))
            drop(name, Place.FILLING, filling)
        elif published.data and filling.meta and not filling.data:
            kept.append(Kept(name, published.data, filling.meta, Place.ENTRIES, Place.FILLING))
        else:
            drop(name, Place.ENTRIES, published)
            if filling.data and filling.meta:
                kept.append(Kept(name, filling.data, filling.meta, Place.FILLING, Place.FILLING))
            else:
                drop(name, Place.FILLING, filling)
    kept.sort(key=lambda entry: entry.meta.mtime)
    return Verdict(tuple(kept), tuple(leftovers))


def list_tree(layout: Layout, ops: FileOps) -> tuple[Listing, int]:
    """The directories' content, and the bytes on disk of the names that are left out of it: their format is unknown.

    Sidecars that belong to no data file are opened to tell our leftovers from files of another format version; all
    others are not read.
    """
    entries, filling = _pairs(layout, ops, Place.ENTRIES), _pairs(layout, ops, Place.FILLING)
    foreign: set[str] = set()
    for place, pairs in ((Place.ENTRIES, entries), (Place.FILLING, filling)):
        foreign |= {n for n, p in pairs.items() if p.meta and not p.data and _is_foreign(layout, ops, place, n)}
    left_out = [p for name in foreign for pairs in (entries, filling) if (p := pairs.pop(name, None))]
    left_out_bytes = sum(found.disk_bytes for p in left_out for found in (p.data, p.meta) if found)
    dying = tuple(f for f in ops.list_files(layout.fd(Place.DYING)) if dying_serial(f.name) is not None)
    return Listing(entries, filling, dying), left_out_bytes


def next_serial(listing: Listing) -> int:
    """One more than the highest serial in ``dying``."""
    return max((dying_serial(found.name) or 0 for found in listing.dying), default=-1) + 1


def _is_foreign(layout: Layout, ops: FileOps, place: Place, name: str) -> bool:
    fd = ops.open(meta_name(name), dir_fd=layout.fd(place))
    try:
        read_header(ops, fd)
    except Foreign:
        return True
    except Damaged:
        return False
    finally:
        ops.close(fd)
    return False


def _pairs(layout: Layout, ops: FileOps, place: Place) -> dict[str, Pair]:
    data: dict[str, Found] = {}
    meta: dict[str, Found] = {}
    for found in ops.list_files(layout.fd(place)):
        parsed = parse_name(found.name)
        if parsed:
            (data if parsed[1] == "data" else meta)[parsed[0]] = found
    return {name: Pair(data.get(name), meta.get(name)) for name in data.keys() | meta.keys()}
