"""What a directory holds after its last owner died at any moment: a listing, and a pure decision about it.

The store changes names only in these orders, so every crash leaves one of the situations that :func:`decide` knows:

- create: data file in ``filling``, then its sidecar;
- publish: data from ``filling`` to ``entries``, then the sidecar after it;
- evict: sidecar removed, then data renamed to ``dying``, then (when nobody holds it) removed;
- attach: written under a name of its own, then renamed; removed at any time after the entry's sidecar.

An entry is visible only with both files, and no chunk is read before its digest was checked, so a file that a crash
left torn is never served. No data file is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..attachments import MOST_PER_ENTRY
from .chunkfile import read_header
from .fileops import FileOps, Found
from .layout import Layout, Place, dying_serial, meta_name, parse_attached, parse_name
from .sidecar import Damaged, Foreign


class Pair(NamedTuple):
    """The two files of one entry in one place; None for one that is not there."""

    data: Found | None = None
    meta: Found | None = None


@dataclass(frozen=True)
class Listing:
    """Our files by entry name in ``entries``, ``filling`` and ``attached``, and those in ``dying``."""

    entries: Mapping[str, Pair] = field(default_factory=dict)
    filling: Mapping[str, Pair] = field(default_factory=dict)
    dying: tuple[Found, ...] = ()
    attached: Mapping[str, tuple[Found, ...]] = field(default_factory=dict)


class Kept(NamedTuple):
    """An entry to keep. Its two places differ only if it died half-published: the sidecar has to follow the data.

    ``attached``: its attachments' files, oldest first.
    """

    name: str
    data: Found
    meta: Found
    place: Place
    meta_place: Place
    attached: tuple[Found, ...] = ()


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
    verified before it is read anyway. Attachments stay with an entry that is kept, as many as one may have; those of no
    entry, and those that are not whole, are leftovers.
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
    own = {entry.name: _newest(listing.attached.get(entry.name, ())) for entry in kept}
    for name, files in listing.attached.items():
        leftovers.extend(Leftover(name, Place.ATTACHED, f) for f in files if f not in own.get(name, ()))
    return Verdict(tuple(entry._replace(attached=own[entry.name]) for entry in kept), tuple(leftovers))


def _newest(files: tuple[Found, ...]) -> tuple[Found, ...]:
    """The whole ones, oldest first, and the newest of too many."""
    whole = [f for f in files if (parsed := parse_attached(f.name)) is not None and parsed[1] is not None]
    return tuple(sorted(whole, key=lambda f: (f.mtime, f.name))[-MOST_PER_ENTRY:])


def list_tree(layout: Layout, ops: FileOps) -> tuple[Listing, int]:
    """The directories' content, and the bytes on disk of the names that are left out of it: their format is unknown.

    Sidecars that belong to no data file are opened to tell our leftovers from files of another format version; all
    others are not read.
    """
    entries, filling = _pairs(layout, ops, Place.ENTRIES), _pairs(layout, ops, Place.FILLING)
    foreign: set[str] = set()
    for place, pairs in ((Place.ENTRIES, entries), (Place.FILLING, filling)):
        foreign |= {n for n, p in pairs.items() if p.meta and not p.data and _is_foreign(layout, ops, place, n)}
    attached: dict[str, tuple[Found, ...]] = {}
    for found in ops.list_files(layout.fd(Place.ATTACHED)):
        if parsed := parse_attached(found.name):
            attached[parsed[0]] = (*attached.get(parsed[0], ()), found)
    left_out = [p for name in foreign for pairs in (entries, filling) if (p := pairs.pop(name, None))]
    left_out_bytes = sum(found.disk_bytes for p in left_out for found in (p.data, p.meta) if found)
    left_out_bytes += sum(found.disk_bytes for name in foreign for found in attached.pop(name, ()))
    dying = tuple(f for f in ops.list_files(layout.fd(Place.DYING)) if dying_serial(f.name) is not None)
    return Listing(entries, filling, dying, attached), left_out_bytes


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
