"""Where a checkpoint store lies: one root, on a POSIX file system or in an object store, behind one small interface.

Names are relative to the root and come from :mod:`.layout` only. All methods are synchronous and thread-safe. Errors
are of :mod:`cachefs.errors` and name the URL: a missing name is ``NotFound``, a lacking right ``Denied``, an object
store's own trouble ``Unavailable`` and its kind, a full or broken disk :class:`CheckpointError`.
"""

from __future__ import annotations

import builtins
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cachefs.clock import Clock
from cachefs.config import Origin
from cachefs.errors import (
    CheckpointDamaged,
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    PreconditionFailed,
    Throttled,
    Unavailable,
)
from cachefs.objstore.url import parse_url

from .manifest import FileRef

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from typing_extensions import Buffer

    from .layout import StepRef


TRIES = 5
"""How often a conditional write is tried whose outcome cannot be learned; a store's own retries come on top."""
UNCLEAR = (Unavailable, Throttled, PreconditionFailed, DeadlineExceeded)
"""Errors after which a write may have happened or may still happen."""
_FIRST_PAUSE = 0.1


@dataclass(frozen=True)
class FileInfo:
    """One file: its name from the root, its bytes, and the store's time stamp (s since the epoch)."""

    name: str
    size: int
    modified: float


class Stage(ABC):
    """The files of one step before its commit. One per process that writes; made by :meth:`Storage.stage`.

    The storage's half of a save: it puts files where they belong and knows nothing of claims and timelines
    (:mod:`.commit` does).
    """

    ref: StepRef
    attempt: str
    needs_tombstone: bool
    """Whether a manifest that is still under way could make a step of what :meth:`discard` has removed."""

    @abstractmethod
    def write(self, file: str, buffers: Iterable[Buffer]) -> int:
        """Write one new file of the step's folder; durable on return. Returns its size in bytes.

        Raises :class:`CheckpointConflict` if a file of that name with other content is there already.
        """

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """File -> bytes of everything written for this step so far, by any process."""

    def check(self, files: Sequence[FileRef]) -> None:
        """That every file of this step (no ``/`` in its name) is there with its size.

        Raises :class:`CheckpointError`, naming the first that is not.
        """
        found = self.sizes()
        for file in files:
            if "/" in file.name:
                continue
            size = found.get(file.name)
            if size != file.size:
                problem = "is missing" if size is None else f"has {size} bytes instead of {file.size}"
                raise CheckpointError(f"cannot commit {self.ref}: {file.name} {problem}", url=self.ref.folder)

    @abstractmethod
    def publish(self, manifest: bytes) -> bool:
        """Try to make the step visible with this manifest, in one atomic act. ``False``: something is there already.

        After an error it may have happened or not, or, on an object store, may still happen.
        """

    @abstractmethod
    def settle(self) -> None:
        """Make a published step survive a power cut."""

    @abstractmethod
    def discard(self) -> list[CheckpointError]:
        """Remove what this process wrote; never anything of a published step (with a tombstone, if one is needed,
        already in place). Returns what could not be removed."""


class Storage(ABC):
    """One store's root. See the module's text. ``close`` ends it; a context manager does that too."""

    url: str
    """The root as messages show it, without a trailing slash."""

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """What this place does not give and was noticed so far, in words (a file system without folder fsync)."""
        return ()

    def describe(self, name: str) -> str:
        """The full URL of a name, for messages."""
        return f"{self.url}/{name}"

    @abstractmethod
    def exists(self) -> bool:
        """Whether there is such a folder, or anything under the prefix."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """A file whole. Raises ``NotFound``."""

    @abstractmethod
    def read_range(self, name: str, start: int, end: int) -> Buffer:
        """Bytes ``[start, end)``, owned by the caller. Raises ``NotFound``; :class:`CheckpointDamaged` if too short."""

    @abstractmethod
    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill ``target`` (writable, C-contiguous) with the bytes from ``start`` on; errors as :meth:`read_range`."""

    @abstractmethod
    def size(self, name: str) -> int:
        """A file's bytes. Raises ``NotFound``."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[FileInfo]:
        """All files whose name starts with ``prefix``, sorted by name; empty if there is no such thing."""

    @abstractmethod
    def folders(self) -> builtins.list[str]:
        """Names of the folders right under the root, sorted; empty if there is no root."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Create a small file, whole or not at all; ``False`` if the name is taken. Makes folders as needed.

        After an error it may have happened or not: the caller reads back (:func:`.claims.create_record`).
        """

    @abstractmethod
    def stage(self, ref: StepRef, attempt: str) -> Stage:
        """Begin to write a step; several processes of one attempt share what they write."""

    def close(self) -> None:
        """Release connections. Idempotent."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_storage(url: str | os.PathLike[str], origin: Origin | None = None) -> Storage:
    """The storage behind a URL or a local path. Makes nothing and asks nothing yet.

    A relative path is resolved now, once. ``origin`` tells how to reach an object store (default: from the
    environment). The caller closes it. Raises :class:`ConfigError` for a URL that cannot be one.
    """
    parsed = parse_url(url)
    if parsed.is_local:
        from .storage_posix import PosixStorage

        return PosixStorage(parsed.key)
    from cachefs.objstore.blocking import BlockingStore

    from .storage_object import ObjectStorage

    return ObjectStorage(parsed, BlockingStore(parsed, origin if origin is not None else Origin.from_env()))


def check_name(name: str) -> str:
    """``name`` itself, if it is a relative name that cannot lead out of the root; :class:`ConfigError` otherwise."""
    if not name or any(part in {"", ".", ".."} for part in name.split("/")) or "\0" in name or "\\" in name:
        raise ConfigError(f"{name!r} is no name in a checkpoint store")
    return name


def pause(attempt: int, clock: Clock) -> None:
    """Wait before try number ``attempt`` (none before the first), longer each time and never in step with others."""
    if attempt:
        clock.sleep(random.uniform(0.5, 1.0) * _FIRST_PAUSE * 2**attempt)


def too_short(url: str, start: int, wanted: int, got: int) -> CheckpointDamaged:
    """The error for a file that ends before a range does."""
    return CheckpointDamaged(f"ends after {got} of {wanted} bytes", url=url, offset=start)


def byte_views(buffers: Iterable[Buffer]) -> Iterable[memoryview]:
    """Each buffer as a flat view of bytes; empty ones are left out (a view with a zero in its shape cannot be cast)."""
    for buffer in buffers:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise ConfigError(f"a buffer of shape {view.shape} and strides {view.strides} is not contiguous")
        if view.nbytes:
            yield view if view.format == "B" and view.ndim == 1 else view.cast("B")
