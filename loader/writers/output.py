"""Where a data set is written to: a local folder, or a prefix of an object store.

A folder gets its files all at once: they are written into a hidden folder within it, which readers pass over, and moved
when the last one is complete. In an object store each shard appears whole as soon as it is finished; what describes all
of them (an index) comes last. A conversion that fails takes away what it wrote; one that is killed cannot.

What is replaced stays until there is something to replace it with: in a folder all that is new, in a store the first
shard. From then on, until the last old file is gone, a mark lies beside the files (:mod:`loader.unfinished`). Readers
refuse what is so marked, so that a killed conversion never leaves what looks like a whole data set.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cachefs.errors import ConfigError, DataError
from cachefs.objstore.url import ObjectUrl, parse_url

from ..unfinished import UNFINISHED

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from cachefs.config import Origin
    from cachefs.objstore.blocking import BlockingStore

STAGE = ".nearflash-convert"
_ONE_REQUEST = 32 << 20
_LEAST_PART = 8 << 20
_MOST_PARTS = 9000


class Output(ABC):
    """The files of one data set on their way. Leaving the ``with`` block without :meth:`commit` discards them."""

    url: str

    def __init__(self, stage: Path) -> None:
        self._stage = stage
        self._open: list[IO[bytes]] = []

    def create(self, name: str) -> IO[bytes]:
        """A new file, seen by nobody until it is published."""
        file = (self._stage / name).open("xb")
        self._open = [*(other for other in self._open if not other.closed), file]
        return file

    @abstractmethod
    def publish(self, name: str) -> int:
        """Say that a created (and closed) file is complete; returns its size."""

    @abstractmethod
    def commit(self) -> None:
        """Let all that was published be seen, in that order, for good."""

    @abstractmethod
    def discard(self) -> None:
        """Take away what was not committed. Idempotent."""

    def _close_files(self) -> None:
        """Those that a writer which failed has left open."""
        for file in self._open:
            with suppress(OSError):
                file.close()

    def put(self, name: str, data: bytes) -> int:
        """One small file, created and published."""
        with self.create(name) as file:
            file.write(data)
        return self.publish(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def open_output(url: str, *, own: str, force: bool, origin: Origin) -> Output:
    """The output at ``url``, which must be empty. ``force``: files whose names match ``own`` are replaced.

    Raises ``DataError`` where other files are there, or where another conversion is writing.
    """
    target = parse_url(url)
    if target.is_local:
        return LocalOutput(Path(target.key), own=own, force=force)
    return StoreOutput(target, own=own, force=force, origin=origin)


class LocalOutput(Output):
    """A folder; it is made if it is not there."""

    def __init__(self, folder: Path, *, own: str, force: bool) -> None:
        if folder.exists() and not folder.is_dir():
            raise ConfigError("the output is a file, not a folder", url=str(folder))
        self.url = str(folder)
        self._folder = folder
        self._made = not folder.exists()
        names = [] if self._made else [entry.name for entry in os.scandir(folder) if entry.name != STAGE]
        self._old = _replaced(names, self.url, own, force)
        self._published: list[str] = []
        super().__init__(folder / STAGE)
        self._stage.mkdir(parents=True, exist_ok=True)
        self._lock: int | None = os.open(self._stage, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DataError("another conversion is writing there", url=self.url) from None
        for left in self._stage.iterdir():
            left.unlink()  # of a conversion that was killed

    def publish(self, name: str) -> int:
        path = self._stage / name
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._published.append(name)
        return path.stat().st_size

    def commit(self) -> None:
        mark = self._folder / UNFINISHED
        mark.touch()
        self._made = False
        self._sync()
        for name in self._old:
            (self._folder / name).unlink(missing_ok=True)
        for name in self._published:
            (self._stage / name).rename(self._folder / name)
        self._sync()
        mark.unlink()
        self._old, self._published = [], []
        self.discard()
        self._sync()

    def _sync(self) -> None:
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        if self._lock is None:
            return
        self._close_files()
        shutil.rmtree(self._stage, ignore_errors=True)
        os.close(self._lock)
        self._lock = None
        if self._made:
            with suppress(OSError):  # somebody else has put something there meanwhile
                self._folder.rmdir()


class StoreOutput(Output):
    """A prefix. Each file waits on local disk until it is complete and goes up in one piece."""

    def __init__(self, target: ObjectUrl, *, own: str, force: bool, origin: Origin) -> None:
        from cachefs.objstore.blocking import BlockingStore

        self._prefix = target.key.rstrip("/") + "/" if target.key.strip("/") else ""
        self.url = str(target.with_key(self._prefix))
        self._published: list[str] = []
        self._marked = self._touched = False
        self._temporary: tempfile.TemporaryDirectory[str] | None = tempfile.TemporaryDirectory(prefix="nearflash-")
        super().__init__(Path(self._temporary.name))
        self._store: BlockingStore = BlockingStore(target.root, origin)
        try:
            names = [key[len(self._prefix) :] for key in self._keys()]
            self._old = _replaced([name for name in names if name], self.url, own, force)
            self._touched = UNFINISHED in names  # by a conversion that was killed
        except BaseException:
            self.discard()
            raise

    def _keys(self) -> Iterator[str]:
        for page in self._store.list(self._prefix):
            yield from (item.key for item in page.objects)

    def publish(self, name: str) -> int:
        path = self._stage / name
        size = path.stat().st_size
        key = self._prefix + name
        if not self._marked:
            self._begin()
        self._touched = self._touched or name in self._old
        self._published.append(key)
        if size <= _ONE_REQUEST:
            self._store.put(key, path.read_bytes())
        else:
            self._store.put_multipart(key, _pieces(path, max(_LEAST_PART, -(-size // _MOST_PARTS))))
        path.unlink()
        return size

    def _begin(self) -> None:
        """Mark the prefix, and take away what describes the old shards, which would tell other readers that they are
        whole."""
        self._store.put(self._prefix + UNFINISHED, b"")
        self._marked = True
        for name in self._old:
            if name.endswith(".json"):
                self._touched = True
                self._store.delete([self._prefix + name])

    def commit(self) -> None:
        left = [key for key in (self._prefix + name for name in self._old) if key not in set(self._published)]
        if left:
            self._store.delete(left)
        self._published, self._touched = [], False
        self.discard()

    def discard(self) -> None:
        if self._temporary is None:
            return
        self._close_files()
        self._temporary.cleanup()
        self._temporary = None
        try:
            if self._published:
                self._store.delete(list(reversed(self._published)))
            if self._marked and not self._touched:  # else the old files are no longer all there
                self._store.delete([self._prefix + UNFINISHED])
        finally:
            self._store.close()


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(size):
            yield piece


def _replaced(names: list[str], url: str, own: str, force: bool) -> list[str]:
    """The files to take away, what describes the others first. Raises for an output that has to stay as it is."""
    there = sorted(name for name in names if not name.startswith("."))
    if not there:
        return []
    if not force:
        raise DataError(
            f"the output is not empty ({there[0]!r} ...)", url=url, hint="--force replaces what a conversion wrote"
        )
    others = [name for name in there if not re.fullmatch(own, name)]
    if others:
        raise DataError(f"the output holds {others[0]!r}, which no conversion of this kind wrote", url=url)
    return sorted(there, key=lambda name: not name.endswith(".json"))
