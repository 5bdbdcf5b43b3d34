"""Where things lie below the cache directory, and proof that they are ours.

::

    <cache_dir>/lock                      flock for the life of the store; holds the owner's pid
    <cache_dir>/nearflash-v1/MARKER       says that the tree is this program's, with a random id
    <cache_dir>/nearflash-v1/entries/     <name>.data, <name>.meta    published
    <cache_dir>/nearflash-v1/filling/     <name>.data, <name>.meta    being filled
    <cache_dir>/nearflash-v1/dying/       <name>.<8 hex>.data         evicted, perhaps still mapped by somebody
    <cache_dir>/nearflash-v1/attached/    <name>.<attachment>.att     beside an entry, published or filling
    <cache_dir>/nearflash-v1/attached/    <name>.<attachment>.new     being written

``<name>`` is 40 hexadecimal digits made from endpoint, URL and version, so no part of a URL becomes a path;
``<attachment>`` is its user's choice, of a few letters, digits, dots and dashes. A layout of another version lives in a
tree of another name and is not looked at. Only regular files with these names are ever renamed or removed; anything
else, in or beside the tree, stays as it is. All access goes through descriptors of the directories, opened without
following links.
"""

from __future__ import annotations

import enum
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CacheError, DiskFault
from ..limits import SCARCE
from .fileops import FileOps

TREE = "nearflash-v1"
MARKER = "MARKER"
_NEW_MARKER = "MARKER.new"
_PROBE = "probe"
_MARKER_FORMAT = 1
_STEM = re.compile(r"([0-9a-f]{40})\.(data|meta)")
_DYING = re.compile(r"[0-9a-f]{40}\.([0-9a-f]{8})\.data")
_ATTACHED = re.compile(r"([0-9a-f]{40})\.([a-z0-9.-]{1,64})\.(att|new)")


class Place(enum.Enum):
    """A directory of the tree; what a file's place says about it."""

    ENTRIES = "entries"
    FILLING = "filling"
    DYING = "dying"
    ATTACHED = "attached"


def data_name(name: str) -> str:
    return f"{name}.data"


def meta_name(name: str) -> str:
    return f"{name}.meta"


def dying_name(name: str, serial: int) -> str:
    return f"{name}.{serial & 0xFFFFFFFF:08x}.data"


def attached_name(name: str, attachment: str) -> str:
    return f"{name}.{attachment}.att"


def attaching_name(name: str, attachment: str) -> str:
    """The file's name while it is written."""
    return f"{name}.{attachment}.new"


def parse_attached(file: str) -> tuple[str, str | None] | None:
    """(entry name, attachment) of a file in ``attached``, the latter None for one that is not whole; None for a file
    that is not ours."""
    m = _ATTACHED.fullmatch(file)
    return (m[1], m[2] if m[3] == "att" else None) if m else None


def parse_name(file: str) -> tuple[str, str] | None:
    """(entry name, "data" or "meta") of a file in ``entries`` or ``filling``; None for a file that is not ours."""
    m = _STEM.fullmatch(file)
    return (m[1], m[2]) if m else None


def dying_serial(file: str) -> int | None:
    """The serial in the name of a file in ``dying``; None for a file that is not ours."""
    m = _DYING.fullmatch(file)
    return int(m[1], 16) if m else None


class Layout:
    """The open tree: a descriptor per directory. Owned by the store; closed with it."""

    def __init__(self, cache_dir: Path, ops: FileOps, fds: dict[str, int], store_id: str, block: int) -> None:
        self.cache_dir = cache_dir
        self.path = cache_dir / TREE
        self.tree_fd = fds[TREE]
        self._store_id = store_id
        self._ops = ops
        self._fds = fds
        self.block_bytes = block

    @classmethod
    def open(cls, cache_dir: Path, ops: FileOps) -> Layout:
        """Open the tree, making it if there is none. The caller holds the lock.

        Raises :class:`CacheError` if something that is not ours has the tree's name, ``OSError`` for the rest.
        """
        fds: dict[str, int] = {}
        try:
            fds["."] = ops.open_top(str(cache_dir))
            fds[TREE] = _open_or_make(ops, TREE, fds["."], cache_dir)
            store_id = _read_marker(ops, fds[TREE], cache_dir) or _write_marker(ops, fds[TREE])
            for place in Place:
                fds[place.value] = _open_or_make(ops, place.value, fds[TREE], cache_dir / TREE)
            block = ops.block_bytes(fds[TREE])
        except BaseException:
            for fd in fds.values():
                ops.close(fd)
            raise
        return cls(cache_dir, ops, fds, store_id, block)

    def fd(self, place: Place) -> int:
        return self._fds[place.value]

    def file(self, place: Place, file: str) -> str:
        """The path of a file, for messages."""
        return str(self.path / place.value / file)

    def directory_bytes(self) -> int:
        """What the directories, the marker and the lock take on disk."""
        own = sum(self._ops.disk_bytes(fd) for fd in self._fds.values())
        return own + 2 * self.block_bytes  # one block each for marker and lock

    def check_reachable(self) -> None:
        """Raise :class:`DiskFault` unless the path leads to a tree with our id (perhaps mounted anew)."""
        with self._by_path():
            pass

    def check_present(self) -> None:
        """Raise :class:`DiskFault` unless the path still leads to this very tree.

        A cache directory that has vanished or was replaced (an unmounted disk, an ``rm -r``) is a failed disk, not an
        empty cache.
        """
        with self._by_path() as tree:
            if not os.path.sameopenfile(tree, self.tree_fd):
                raise self._vanished()

    def probe(self) -> None:
        """Find out whether the disk works: reach the tree by its path, write, sync and remove a small file.

        Where a disk that failed is back, the directories are opened anew under the same descriptor numbers.
        Raises :class:`DiskFault` or ``OSError``.
        """
        with self._by_path() as tree:
            if not os.path.sameopenfile(tree, self.tree_fd):
                self._reopen(tree)
        try:
            self._ops.unlink(_PROBE, dir_fd=self.tree_fd)
        except FileNotFoundError:
            pass
        fd = self._ops.create(_PROBE, dir_fd=self.tree_fd)
        try:
            self._ops.write(fd, bytes(4096), 0)
            self._ops.sync(fd)
        finally:
            self._ops.close(fd)
            self._ops.unlink(_PROBE, dir_fd=self.tree_fd)

    def close(self) -> None:
        for fd in self._fds.values():
            self._ops.close(fd)

    @contextmanager
    def _by_path(self) -> Iterator[int]:
        """The tree as the path leads to it now; :class:`DiskFault` if that is not a tree with our id.

        A process out of descriptors or memory cannot tell: the ``OSError`` as it is.
        """
        try:
            top = self._ops.open_top(str(self.cache_dir))
            try:
                tree = self._ops.open_dir(TREE, dir_fd=top)
            finally:
                self._ops.close(top)
        except OSError as e:
            raise self._unreachable(e) from e
        try:
            try:
                store_id = _read_marker(self._ops, tree, self.cache_dir)
            except (OSError, CacheError) as e:
                raise self._unreachable(e) from e
            if store_id != self._store_id:
                raise self._vanished()
            yield tree
        finally:
            self._ops.close(tree)

    def _unreachable(self, e: OSError | CacheError) -> OSError:
        return e if isinstance(e, OSError) and e.errno in SCARCE else self._vanished()

    def _reopen(self, tree: int) -> None:
        fresh = {".": self._ops.open_top(str(self.cache_dir)), TREE: self._ops.duplicate(tree)}
        try:
            for place in Place:
                fresh[place.value] = self._ops.open_dir(place.value, dir_fd=tree)
            for name, fd in fresh.items():
                os.dup2(fd, self._fds[name], inheritable=False)
        finally:
            for fd in fresh.values():
                self._ops.close(fd)

    def _vanished(self) -> DiskFault:
        return DiskFault(
            "the cache directory has vanished or was replaced",
            url=str(self.cache_dir),
            hint="reads pass through; mount it again, or restart the daemon to begin anew",
        )


def _open_or_make(ops: FileOps, name: str, parent: int, where: Path) -> int:
    try:
        try:
            return ops.open_dir(name, dir_fd=parent)
        except FileNotFoundError:
            ops.make_dir(name, dir_fd=parent)
            return ops.open_dir(name, dir_fd=parent)
    except NotADirectoryError:
        raise CacheError(
            "is not a directory of this cache", url=str(where / name), hint="move it away or choose another cache_dir"
        ) from None


def _read_marker(ops: FileOps, tree: int, cache_dir: Path) -> str | None:
    """The tree's id; None if there is no marker yet in an empty tree."""
    try:
        fd = ops.open(MARKER, dir_fd=tree)
    except FileNotFoundError:
        if set(os.listdir(tree)) - {_NEW_MARKER}:
            raise _not_ours(cache_dir) from None
        return None
    try:
        found = json.loads(ops.read(fd, 4096, 0))
        if found["format"] != _MARKER_FORMAT:
            raise _not_ours(cache_dir)
        return str(found["id"])
    except (ValueError, TypeError, KeyError) as e:
        raise _not_ours(cache_dir) from e
    finally:
        ops.close(fd)


def _write_marker(ops: FileOps, tree: int) -> str:
    store_id = secrets.token_hex(16)
    text = json.dumps({"program": "nearflash", "format": _MARKER_FORMAT, "id": store_id}) + "\n"
    try:
        ops.unlink(_NEW_MARKER, dir_fd=tree)
    except FileNotFoundError:
        pass
    fd = ops.create(_NEW_MARKER, dir_fd=tree)
    try:
        ops.write(fd, text.encode(), 0)
        ops.sync(fd)
    finally:
        ops.close(fd)
    ops.rename(_NEW_MARKER, MARKER, src_fd=tree, dst_fd=tree)
    return store_id


def _not_ours(cache_dir: Path) -> CacheError:
    return CacheError(
        "holds no marker of this cache, so it is left alone",
        url=str(cache_dir / TREE),
        hint="choose another cache_dir, or remove it if nothing else needs it",
    )
