"""The client of a node's cache: opens objects, lists them, asks for them ahead of time.

``connect()`` costs nothing: the daemon is contacted, and started if there is none, by the first call that needs it.
Local paths never need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .config import Settings
from .local import LocalShard, list_folder, read_file, stat_file
from .objstore.url import ObjectUrl, parse_url
from .shard import ObjectStat, Shard

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Client", "ObjectStat", "Shard", "connect"]


def connect(settings: Settings | None = None, **overrides: Any) -> Client:
    """A client for ``settings``, or for :meth:`Settings.load` with ``overrides``. Contacts nobody yet."""
    if settings is None:
        settings = Settings.load(**overrides)
    elif overrides:
        settings = settings.with_(**overrides)
    return Client(settings)


class Client:
    """One process's access to the node's cache; synchronous, usable from several threads.

    A forked child goes on with the same object over a connection of its own; a pickled client is its settings and
    connects anew. Errors are those of :mod:`cachefs.errors`.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def open(
        self,
        url: str | os.PathLike[str],
        *,
        version: str | None = None,
        size: int | None = None,
        deadline: float | None = None,
    ) -> Shard:
        """Open one object and start fetching it if this node lacks it. Does not wait for bytes.

        ``version`` and ``size`` as a listing gave them save the request that asks the origin; an object that has
        moved on is ``Changed``. ``deadline`` (seconds) bounds this call and each later wait of the shard; without it
        a wait ends with ``DeadlineExceeded`` once nothing arrived for ``settings.request_deadline``. Local paths and
        ``file://`` are mapped in place.
        """
        target = parse_url(url)
        if target.is_local:
            return LocalShard(target.key, version=version, size=size)
        raise NotImplementedError

    def list(self, url: str | os.PathLike[str], *, delimiter: bool = False, cached: bool = False) -> list[ObjectStat]:
        """The objects in the folder ``url`` and below it, in key order; folder markers are left out.

        The URL of a bucket lists all of it; a missing ``/`` at the end is added, so ``s3://b/data`` never lists
        ``s3://b/data2``. With ``delimiter`` only the folder's own objects, and its subfolders as prefixes (see
        :class:`ObjectStat`). ``cached`` fills in ``cached_bytes`` (0 otherwise).
        """
        target = parse_url(url)
        if target.is_local:
            return list_folder(target.key, delimiter=delimiter)
        raise NotImplementedError

    def stat(self, url: str | os.PathLike[str]) -> ObjectStat:
        """Size, version and cached bytes of one object, as the origin has it now."""
        target = parse_url(url)
        if target.is_local:
            return stat_file(target.key)
        raise NotImplementedError

    def read(self, url: str | os.PathLike[str]) -> bytes:
        """A small object whole (an index, a manifest), as it is now, past the cache."""
        target = parse_url(url)
        if target.is_local:
            return read_file(target.key)
        raise NotImplementedError

    def prefetch(self, urls: Iterable[str | ObjectStat]) -> None:
        """Ask for objects ahead of time, in this order; returns at once. Local paths are left alone."""
        wanted = [_spec(item) for item in urls]
        if any(not target.is_local for target, _, _ in wanted):
            raise NotImplementedError

    def close(self) -> None:
        """Close this process's connections and give back its leases. Idempotent; open shards stay readable."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return (Client, (self.settings,))

    def __repr__(self) -> str:
        return f"<Client of {self.settings.cache_dir}>"


def _spec(item: str | ObjectStat) -> tuple[ObjectUrl, str | None, int | None]:
    if isinstance(item, ObjectStat):
        return parse_url(item.url), item.version, item.size
    return parse_url(item), None, None
