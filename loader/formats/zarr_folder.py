"""The objects of one zarr store: a folder, as it was listed, in which keys are looked up.

A store is bound as a whole: its version is a digest of the names and versions of all objects in it (:func:`bind`). With
a listing a key that is not in it is absent, and nothing outside the folder can be reached. Without the right to list,
keys are asked for one by one: absent is then what the store answers ``NotFound`` to, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from cachefs.errors import Changed, Denied, FormatError, NotFound
from cachefs.hashing import name_digest
from cachefs.objstore.url import parse_url
from cachefs.shard import ObjectStat

from .abc import Bytes, Objects

if TYPE_CHECKING:
    from .abc import Mapped

MARKS = ("zarr.json", ".zarray", ".zgroup", ".zmetadata")
"""Names of which one is in every folder that is a zarr group or array."""

Listing: TypeAlias = Mapping[str, ObjectStat]
"""By key: the name below the store's folder."""


def folder_of(url: str) -> str:
    """A folder's URL as listings spell it: without a slash at its end, local ones as absolute paths."""
    target = parse_url(url)
    return (target.key if target.is_local else url).rstrip("/")


def bind(url: str, listed: Sequence[ObjectStat]) -> ObjectStat:
    """The store ``url`` as if it were one object, whose version changes with every object in it."""
    start = len(folder_of(url)) + 1
    lines = sorted(f"{item.url[start:]}\0{item.size}\0{item.version}" for item in listed)
    return ObjectStat(url, sum(item.size for item in listed), name_digest("zarr", *lines))


class StoreFolder:
    """Keys of one store. Raises ``Changed`` if the folder is not as the data set's listing saw it."""

    def __init__(self, objects: Objects, url: str) -> None:
        self.url = folder_of(url)
        self._objects = objects
        # a store that is read part by part is listed once
        self._listing = objects.recalled(url, "zarr listing", lambda: _listing(objects, url, self.url))

    @property
    def keys(self) -> Iterable[str] | None:
        """All keys; ``None`` where this user may not list them."""
        return None if self._listing is None else self._listing.keys()

    @property
    def can_ask(self) -> bool:
        """Whether :meth:`ask` does anything: for remote stores that may be listed."""
        return self._listing is not None and not parse_url(self.url).is_local

    def ask(self, keys: Iterable[str]) -> None:
        """Have those keys that exist fetched; returns at once."""
        if self._listing is not None:
            self._objects.ask([self._listing[key] for key in keys if key in self._listing])

    def fetch(self, keys: Iterable[str]) -> dict[str, Bytes]:
        """The bytes of those keys that exist, each a map of its own. Errors other than absence are raised."""
        maps: dict[str, Mapped] = {}
        for key in keys:
            found = self._map(key)
            if found is not None:
                maps[key] = found
        for data, ready in maps.values():  # all are asked for by now
            ready(0, len(data))
        return {key: found.data for key, found in maps.items()}

    def probe(self, keys: Iterable[str]) -> dict[str, Bytes]:
        """As :meth:`fetch`, for keys of which some need not exist.

        Without the right to list, a store may answer ``Denied`` for a key that is missing; here that counts as absent
        as long as one of the keys is there.
        """
        if self._listing is not None:
            return self.fetch(keys)
        found: dict[str, Bytes] = {}
        denied: Denied | None = None
        for key in keys:
            try:
                found |= self.fetch([key])
            except Denied as e:
                denied = e
        if denied is not None and not found:
            raise denied
        return found

    def release(self) -> None:
        """Let go of what the maps so far hold open; they stay valid."""
        self._objects.close()

    def _map(self, key: str) -> Mapped | None:
        if self._listing is not None:
            stat = self._listing.get(key)
            if stat is None:
                return None
            try:
                return self._objects.map(stat.url, stat)
            except NotFound as e:
                raise Changed("listed before, and gone now", url=stat.url, hint="list the data set again") from e
        if any(part in ("", ".", "..") for part in key.split("/")) or "\\" in key:
            raise FormatError(f"the metadata names {key!r}, which is not in its folder", url=self.url)
        try:
            return self._objects.map(f"{self.url}/{key}")
        except NotFound:
            return None


def _listing(objects: Objects, url: str, folder: str) -> Listing | None:
    bound = objects.bound(url)
    try:
        listed = objects.list(folder)
    except Denied:
        if bound is not None:
            raise  # what was listed before can be listed again
        return None
    if not listed:
        raise NotFound("no such folder, or nothing in it", url=url)
    if bound is not None and (now := bind(url, listed)) and (now.version, now.size) != bound:
        raise Changed("the store is no longer the one that was listed", url=url, hint="list it again")
    return {item.url[len(folder) + 1 :]: item for item in listed}
