"""A checkpoint store under a prefix of an object store.

Files are written under their final names; one conditional PUT of the manifest (``If-None-Match: *``) makes them a
checkpoint. Nothing rests on rename, copy or the order of a listing. Keys are the given prefix, as it stands, and the
name; a prefix without a final ``/`` gets one.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import xxhash

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import (
    Changed,
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointError,
    Corrupt,
    NearflashError,
    NotFound,
    PreconditionFailed,
)
from cachefs.objstore.url import ObjectUrl

from .layout import StepRef, check_file
from .storage import TRIES, UNCLEAR, FileInfo, Stage, Storage, byte_views, check_name, pause

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from cachefs.objstore.abc import Listing, ObjectMeta

SINGLE_BYTES = 16 << 20
"""Up to this a file goes in one (conditional) PUT; above, in parts of at least this size."""
MAX_PARTS = 9_000
"""Stores take 10,000 parts of one object; larger objects get larger parts."""
WINDOW = 16 << 20
"""Bytes of one GET where a range is read piece by piece."""


class SyncStore(Protocol):
    """What this module asks of ``cachefs.objstore.blocking.BlockingStore``: the store's methods, synchronous."""

    def head(self, key: str) -> ObjectMeta: ...

    def get(self, key: str) -> tuple[ObjectMeta, Buffer]: ...

    def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer: ...

    def list(self, prefix: str, *, delimiter: bool = False) -> Iterator[Listing]: ...

    def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta: ...

    def put_multipart(self, key: str, parts: Iterable[Buffer], *, concurrency: int = 4) -> ObjectMeta: ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def close(self) -> None: ...


class ObjectStorage(Storage):
    """A prefix in a bucket. Owns ``store`` and closes it. ``part_bytes`` is the size of multipart parts."""

    def __init__(
        self, url: ObjectUrl, store: SyncStore, *, part_bytes: int = SINGLE_BYTES, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.prefix = url.key if not url.key or url.key.endswith("/") else f"{url.key}/"
        self.url = f"{url.root}/{self.prefix}"[:-1]
        self.store = store
        self.part_bytes = part_bytes
        self.clock = clock

    def key(self, name: str) -> str:
        """The key of a name."""
        return self.prefix + check_name(name)

    def exists(self) -> bool:
        return any(page.objects for page in self.store.list(self.prefix))

    def read(self, name: str) -> bytes:
        return bytes(self.store.get(self.key(name))[1])

    def read_range(self, name: str, start: int, end: int) -> Buffer:
        if start == end:
            return b""
        try:
            return self.store.get_range(self.key(name), start, end)
        except (Changed, Corrupt) as e:  # nothing here is ever changed by us
            raise CheckpointDamaged(e.what, url=self.describe(name), offset=start) from e

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        if not target.nbytes:
            return
        view = target.cast("B")
        for position in range(0, len(view), WINDOW):
            piece = view[position : position + WINDOW]
            piece[:] = memoryview(self.read_range(name, start + position, start + position + len(piece))).cast("B")

    def size(self, name: str) -> int:
        return self.store.head(self.key(name)).size

    def list(self, prefix: str = "") -> list[FileInfo]:
        found = (
            FileInfo(self._name(item.key), item.size, item.modified)
            for page in self.store.list(self.prefix + prefix)
            for item in page.objects
            if not item.key.endswith("/")
        )
        return sorted(found, key=lambda info: info.name)

    def folders(self) -> builtins.list[str]:
        pages = self.store.list(self.prefix, delimiter=True)
        return sorted({self._name(folder).rstrip("/") for page in pages for folder in page.prefixes})

    def create(self, name: str, data: bytes) -> bool:
        try:
            self.store.put(self.key(name), data, if_none_match=True)
        except PreconditionFailed:
            return False
        return True

    def stage(self, ref: StepRef, attempt: str) -> Stage:
        return _ObjectStage(self, ref, attempt)

    def close(self) -> None:
        self.store.close()

    def _name(self, key: str) -> str:
        if not key.startswith(self.prefix):
            raise CheckpointError(f"the store lists {key!r}, which was not asked for", url=self.url)
        return key[len(self.prefix) :]


class _ObjectStage(Stage):
    """Files under their final names, which no reader looks at before there is a manifest. See :class:`.Stage`."""

    needs_tombstone = True

    def __init__(self, storage: ObjectStorage, ref: StepRef, attempt: str) -> None:
        self.ref = ref
        self.attempt = attempt
        self._storage = storage
        self._own: dict[str, None] = {}  # keys that exist, or may exist, by this process's doing; dict: ordered set

    def write(self, file: str, buffers: Iterable[Buffer]) -> int:
        check_file(file)
        name = f"{self.ref.folder}/{file}"
        views = list(byte_views(buffers))
        size = sum(map(len, views))
        error: NearflashError | None = None
        for attempt in range(TRIES):
            pause(attempt, self._storage.clock)
            try:
                if self._send(name, views, size):
                    return size
            except UNCLEAR as e:
                error = e
                continue
            found = self._compare(name, views, size)
            if found is True:
                return size
            if found is False:
                raise CheckpointConflict(
                    "was written before, with other content, by an attempt of this id",
                    url=self._storage.describe(name),
                    hint="abort the earlier save, or give each run its own attempt id",
                ) from error
        raise error or CheckpointError("is neither free nor taken", url=self._storage.describe(name))

    def sizes(self) -> dict[str, int]:
        folder = f"{self.ref.folder}/"
        return {info.name[len(folder) :]: info.size for info in self._storage.list(folder)}

    def publish(self, manifest: bytes) -> bool:
        return self._storage.create(self.ref.manifest, manifest)

    def settle(self) -> None:
        return

    def discard(self) -> list[CheckpointError]:
        keys = list(self._own)
        try:
            self._storage.store.delete(keys)
        except NearflashError as e:
            return [CheckpointError(f"{len(keys)} files could not be removed: {e}", url=self._storage.url)]
        self._own.clear()
        return []

    def _send(self, name: str, views: Sequence[memoryview], size: int) -> bool:
        """Write the object if its name is free; ``False`` if it is not. Others' objects never count as own."""
        key = self._storage.key(name)
        known = key in self._own
        self._own[key] = None
        try:
            if size <= self._storage.part_bytes:
                meta = self._storage.store.put(key, views or b"", if_none_match=True)
            elif self._there(key):
                raise PreconditionFailed("the name is taken", url=self._storage.describe(name))
            else:
                part = max(self._storage.part_bytes, -(-size // MAX_PARTS))
                meta = self._storage.store.put_multipart(key, split(views, part))
        except PreconditionFailed:
            if not known:
                del self._own[key]
            return False
        if meta.size != size:
            raise CheckpointError(f"the store took {meta.size} of {size} bytes", url=self._storage.describe(name))
        return True

    def _there(self, key: str) -> bool:
        try:
            self._storage.store.head(key)
        except NotFound:
            return False
        return True

    def _compare(self, name: str, views: Sequence[memoryview], size: int) -> bool | None:
        """Whether the object has this content; ``None`` if it is not there (any more)."""
        try:
            if self._storage.size(name) != size:
                return False
            ours, theirs = xxhash.xxh3_128(), xxhash.xxh3_128()
            for view in views:
                ours.update(view)
            for start in range(0, size, WINDOW):
                theirs.update(self._storage.read_range(name, start, min(size, start + WINDOW)))
        except NotFound:
            return None
        return ours.digest() == theirs.digest()


def split(views: Iterable[memoryview], size: int) -> Iterator[Buffer]:
    """The bytes of ``views`` in pieces of ``size`` (the last may be shorter); a piece within one view is a view."""
    pending: list[memoryview] = []
    missing = size
    for view in views:
        position = 0
        while position < len(view):
            piece = view[position : position + missing]
            position += len(piece)
            missing -= len(piece)
            pending.append(piece)
            if not missing:
                yield pending[0] if len(pending) == 1 else b"".join(pending)
                pending, missing = [], size
    if pending:
        yield pending[0] if len(pending) == 1 else b"".join(pending)
