"""Opening one shard: its objects mapped, its format found, its samples indexed.

Ownership. ``Shard.view()`` gives a memoryview that owns a private, writable mapping; every array below is a view whose
base chain ends there, so a mapping lives as long as the last sample cut from it and nothing is ever unmapped by hand.
Closing a shard here gives back its leases and descriptors only. Compressed shards are decompressed to private memory,
with the same ownership.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from cachefs.errors import DataError, FormatError, Superseded
from cachefs.objstore.url import parse_url

from .formats import Format, SampleIndex, WebDataset, detect
from .formats.abc import Mapped, Opened
from .sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cachefs.client import Client, ObjectStat, Shard

Value = TypeVar("Value")

_POPULATE_MOST = 256 << 20
_MADV_POPULATE_READ = 22


class ClientObjects:
    """:class:`loader.formats.abc.Objects` over a client. The shards it opened are kept open until :meth:`close`.

    ``known``: version and size, by URL, of objects that are bound already. ``whole``: maps are complete when they are
    handed out; ``dense``: and all their pages are mapped.
    """

    def __init__(
        self, client: Client, known: dict[str, tuple[str, int]], *, dense: bool = False, whole: bool = False
    ) -> None:
        self._client = client
        self._known = known
        self._dense = dense
        self._whole = whole or dense
        self._open: list[Shard] = []
        self._by_url: dict[str, Shard] = {}

    def map(self, url: str, stat: ObjectStat | None = None) -> Mapped:
        shard = self._shard(url, stat)
        if not self._whole:
            filling = shard.filling()
            return Mapped(np.frombuffer(filling.view, np.uint8), filling.ready)
        view = shard.view()
        if self._dense and len(view) <= _POPULATE_MOST:
            _populate(view)
        return Mapped(np.frombuffer(view, np.uint8))

    def kept(self, url: str, name: str) -> bytes | None:
        return self._shard(url).attachment(name)

    def keep(self, url: str, name: str, make: Callable[[], bytes]) -> None:
        if not parse_url(url).is_local:  # nothing is ever kept beside a user's own files
            self._shard(url).attach(name, make())

    def _shard(self, url: str, stat: ObjectStat | None = None) -> Shard:
        shard = self._by_url.get(url)
        if shard is None:
            version, size = self._known.get(url, (None, None)) if stat is None else (stat.version, stat.size)
            shard = self._client.open(url, version=version, size=size)
            self._open.append(shard)
            self._by_url[url] = shard
        return shard

    def bound(self, url: str) -> tuple[str, int] | None:
        return self._known.get(url)

    def ask(self, stats: Sequence[ObjectStat]) -> None:
        self._client.prefetch(stats)

    def recalled(self, url: str, name: str, make: Callable[[], Value]) -> Value:
        bound = self._known.get(url)
        return make() if bound is None else self._client.recall.get((name, url, *bound), make)

    def read(self, url: str) -> bytes:
        return self._client.read(url)

    def stat(self, url: str) -> ObjectStat:
        return self._client.stat(url)

    def list(self, folder: str) -> Sequence[ObjectStat]:
        return self._client.list(folder)

    def close(self) -> None:
        """Give back leases and descriptors; maps stay valid. Idempotent."""
        self._by_url.clear()
        while self._open:
            self._open.pop().close()


def _populate(view: memoryview) -> None:
    """Map all pages for reading at once: a fault for each costs as much as copying a few kilobytes.

    Nothing depends on it: a kernel before 5.14 refuses, and then the pages are mapped when they are touched.
    """
    memory = view.obj
    if sys.platform == "linux" and isinstance(memory, mmap.mmap):
        with suppress(OSError):
            memory.madvise(_MADV_POPULATE_READ)


@dataclass
class OpenShard:
    """One shard, or one part of it, ready to read: ``format.read(source, index, i, url)``."""

    url: str
    format: Format
    source: Any
    index: SampleIndex
    private_bytes: int
    """What it takes besides the mapping: its decompressed bytes."""
    objects: ClientObjects
    reopen: Callable[[], OpenShard]
    """Opens the same again, waiting for all of its bytes."""
    guard: AbstractContextManager[Any] | None = None
    """Held by a thread that reads, where others might and the source is not made for that."""
    decoders: dict[str, Callable[[Any], Any] | None] = field(default_factory=dict)
    """Memory of the decode step: what decodes each field of this shard."""

    def read(self, i: int, fields: frozenset[str] | None = None) -> Sample:
        """Sample ``i`` of the shard, or of the part."""
        if self.guard is not None:
            with self.guard:
                return self._read(i, fields)
        return self._read(i, fields)

    def _read(self, i: int, fields: frozenset[str] | None) -> Sample:
        try:
            return self.format.read(self.source, self.index, i, self.url, fields)
        except Superseded:
            self._renew()
            return self.format.read(self.source, self.index, i, self.url, fields)

    def columns(self, rows: npt.NDArray[np.int64], fields: frozenset[str] | None = None) -> dict[str, Any]:
        """Many samples at once; see :meth:`loader.formats.Format.columns`."""
        with self.guard or nullcontext():
            try:
                return self.format.columns(self.source, self.index, rows, self.url, fields)
            except Superseded:
                self._renew()
                return self.format.columns(self.source, self.index, rows, self.url, fields)

    def _renew(self) -> None:
        """It was read while it filled, and the cache goes on with another file: map that one."""
        fresh = self.reopen()
        self.objects.close()
        self.source, self.index, self.objects = fresh.source, fresh.index, fresh.objects

    def close(self) -> None:
        """Give back leases and descriptors; samples already handed out stay valid. Idempotent."""
        self.objects.close()


def _other_format(objects: ClientObjects, url: str, format: Format) -> Format | None:
    """The format that the bytes tell, where it is another one than was taken."""
    try:
        found = detect(objects, url)
    except DataError:
        return None
    return None if found is None or type(found) is type(format.base) else found


def while_filling(
    client: Client, known: dict[str, tuple[str, int]], use: Callable[[ClientObjects], Value], *, dense: bool = False
) -> tuple[Value, ClientObjects]:
    """What ``use`` makes of a data set's objects, and the objects, which are the caller's to close.

    They are mapped while they fill; where the cache goes on with another file meanwhile, once more when they are whole.
    """
    for whole in (False, True):
        objects = ClientObjects(client, known, dense=dense, whole=whole)
        try:
            return use(objects), objects
        except Superseded:
            objects.close()
            if whole:
                raise
        except BaseException:
            objects.close()
            raise
    raise AssertionError("unreachable")


def open_mapped(
    client: Client,
    url: str,
    format: Format | None = None,
    *,
    version: str | None = None,
    size: int | None = None,
    index: SampleIndex | None = None,
    unpacked: int | None = None,
    part: int | None = None,
    whole: bool = False,
) -> OpenShard:
    """Open, map and index one shard.

    ``format=None``: the bytes decide. With ``index`` that is taken instead of a new one; ``unpacked``: its
    decompressed size, where that is known; ``part``: which part of it (``None``: all); ``whole``: wait for all of it
    first. Raises ``UnknownFormat``, ``FormatError``, or what the client raises.
    """
    known = {} if version is None or size is None else {url: (version, size)}
    chosen = format

    def open_in(objects: ClientObjects) -> tuple[Format, Opened]:
        found = chosen if chosen is not None else detect(objects, url) or WebDataset()
        try:
            return found, found.open(objects, url, index=index, unpacked=unpacked, part=part)
        except FormatError as e:
            other = None if chosen is None or e.hint else _other_format(objects, url, chosen)
            if other is None:
                raise
            raise FormatError(
                f"its bytes are {other.name}, not {found.name}",
                url=url,
                hint="the format was named with format=, or told by another shard of the data set",
            ) from e

    dense = format is not None and format.dense
    if whole:
        objects = ClientObjects(client, known, dense=dense, whole=True)
        try:
            kind, opened = open_in(objects)
        except BaseException:
            objects.close()
            raise
    else:
        (kind, opened), objects = while_filling(client, known, open_in, dense=dense)
    reopen = partial(
        open_mapped, client, url, kind, version=version, size=size, index=opened.index, unpacked=unpacked, part=part,
        whole=True,
    )  # fmt: skip
    shard = OpenShard(url, kind, opened.source, opened.index, opened.private_bytes, objects, reopen)
    if parse_url(url).is_local:
        shard.close()  # there is no lease to keep, and a descriptor saved
    return shard
