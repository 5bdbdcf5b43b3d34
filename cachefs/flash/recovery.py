"""What a directory means after its last owner died at any moment: a listing, a pure decision, and its execution.

The store changes names only in these orders, so every crash leaves one of the situations that :func:`decide` knows:

- create: data file in ``filling``, then its sidecar;
- publish: data from ``filling`` to ``entries``, then the sidecar after it;
- evict: sidecar removed, then data renamed to ``dying``, then (when nobody holds it) removed.

An entry is visible only with both files in one place, and no chunk is read before its digest was checked, so a file
that a crash left torn is never served. No data file is read here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from .fileops import FileOps, Found
from .layout import Layout, Place, data_name, dying_name, is_dying_name, meta_name, parse_name


@dataclass(frozen=True)
class Pair:
    """The two files of one entry in one place; None for one that is not there."""

    data: Found | None = None
    meta: Found | None = None

    @property
    def whole(self) -> bool:
        return self.data is not None and self.meta is not None

    @property
    def disk_bytes(self) -> int:
        return sum(f.disk_bytes for f in (self.data, self.meta) if f is not None)

    @property
    def last_use(self) -> float:
        """Seconds since the epoch; the sidecar's time stamp."""
        return self.meta.mtime if self.meta else 0.0


NOTHING = Pair()


@dataclass(frozen=True)
class Listing:
    """Our files by entry name in ``entries`` and ``filling``, and the file names in ``dying``."""

    entries: Mapping[str, Pair] = field(default_factory=dict)
    filling: Mapping[str, Pair] = field(default_factory=dict)
    dying: tuple[Found, ...] = ()


class Act(enum.Enum):
    """One repair. The value says what it does to the named entry's file."""

    FINISH_PUBLISH = "rename the sidecar from filling to entries"
    BURY_DATA = "rename the data file to dying"
    REMOVE_META = "remove the sidecar"


@dataclass(frozen=True)
class Step:
    act: Act
    name: str
    place: Place


@dataclass(frozen=True)
class Verdict:
    """What to keep, and the steps (in order) that tidy the rest. ``keep`` maps a name to where the entry is."""

    keep: Mapping[str, tuple[Place, Pair]]
    steps: tuple[Step, ...]


def decide(listing: Listing) -> Verdict:
    """Pure: which entries a directory holds, and what to do about the leftovers of a crash.

    A published pair wins over a filling one of the same name. Half-published ones (data in ``entries``, sidecar still
    in ``filling``) are finished: publishing begins only when every digest is recorded, and each chunk is verified
    before it is read anyway.
    """
    keep: dict[str, tuple[Place, Pair]] = {}
    steps: list[Step] = []

    def drop(name: str, place: Place, pair: Pair) -> None:
        if pair.meta:
            steps.append(Step(Act.REMOVE_META, name, place))
        if pair.data:
            steps.append(Step(Act.BURY_DATA, name, place))

    for name in listing.entries.keys() | listing.filling.keys():
        published = listing.entries.get(name, NOTHING)
        filling = listing.filling.get(name, NOTHING)
        if published.whole:
            keep[name] = (Place.ENTRIES, published)
            drop(name, Place.FILLING, filling)
        elif published.data and filling.meta and not filling.data:
            steps.append(Step(Act.FINISH_PUBLISH, name, Place.FILLING))
            keep[name] = (Place.ENTRIES, Pair(published.data, filling.meta))
        else:
            drop(name, Place.ENTRIES, published)
            if filling.whole:
                keep[name] = (Place.FILLING, filling)
            else:
                drop(name, Place.FILLING, filling)
    return Verdict(keep, tuple(steps))


def list_tree(layout: Layout, ops: FileOps) -> Listing:
    """Read the directories. Files that are not ours are left out."""
    dying = tuple(f for f in ops.list_files(layout.fd(Place.DYING)) if is_dying_name(f.name))
    return Listing(_pairs(layout, ops, Place.ENTRIES), _pairs(layout, ops, Place.FILLING), dying)


def execute(steps: tuple[Step, ...], layout: Layout, ops: FileOps, first_serial: int) -> int:
    """Carry the steps out; returns the next unused serial for names in ``dying``. Raises ``OSError``."""
    serial = first_serial
    for step in steps:
        fd = layout.fd(step.place)
        if step.act is Act.FINISH_PUBLISH:
            ops.rename(meta_name(step.name), meta_name(step.name), src_fd=fd, dst_fd=layout.fd(Place.ENTRIES))
        elif step.act is Act.REMOVE_META:
            ops.unlink(meta_name(step.name), dir_fd=fd)
        else:
            target = dying_name(step.name, serial)
            ops.rename(data_name(step.name), target, src_fd=fd, dst_fd=layout.fd(Place.DYING))
            serial += 1
    return serial


def next_serial(listing: Listing) -> int:
    """One more than the highest serial in ``dying``."""
    return max((int(f.name.split(".")[1], 16) for f in listing.dying), default=-1) + 1


def _pairs(layout: Layout, ops: FileOps, place: Place) -> dict[str, Pair]:
    data: dict[str, Found] = {}
    meta: dict[str, Found] = {}
    for found in ops.list_files(layout.fd(place)):
        parsed = parse_name(found.name)
        if parsed:
            (data if parsed[1] == "data" else meta)[parsed[0]] = found
    return {name: Pair(data.get(name), meta.get(name)) for name in data.keys() | meta.keys()}
