"""Where things lie below the cache directory, and proof that they are ours.

::

    <cache_dir>/lock                      flock for the life of the store; holds the owner's pid
    <cache_dir>/nearflash-v1/MARKER       says that the tree is this program's, with a random id
    <cache_dir>/nearflash-v1/entries/     <name>.data, <name>.meta    published
    <cache_dir>/nearflash-v1/filling/     <name>.data, <name>.meta    being filled
    <cache_dir>/nearflash-v1/dying/       <name>.<8 hex>.data         evicted, perhaps still mapped by somebody

``<name>`` is 40 hexadecimal digits made from endpoint, URL and version, so no part of a URL becomes a path. A layout of
another version lives in a tree of another name and is not looked at. Only regular files with these names are ever
renamed or removed; anything else, in or beside the tree, stays as it is. All access goes through descriptors of the
directories, opened without following links.
"""

from __future__ import annotations

import enum
import json
import os
import re
import secrets
from pathlib import Path

from ..errors import CacheError, DiskFault
from .fileops import FileOps

TREE = "nearflash-v1"
MARKER = "MARKER"
_MARKER_FORMAT = 1
_STEM = re.compile(r"([0-9a-f]{40})\.(data|meta)")
_DYING = re.compile(r"[0-9a-f]{40}\.[0-9a-f]{8}\.data")


class Place(enum.Enum):
    """A directory of the tree; what a file's place says about it."""

    ENTRIES = "entries"
    FILLING = "filling"
    DYING = "dying"


def data_name(name: str) -> str:
    return f"{name}.data"


def meta_name(name: str) -> str:
    return f"{name}.meta"


def dying_name(name: str, serial: int) -> str:
    return f"{name}.{serial & 0xFFFFFFFF:08x}.data"


def parse_name(file: str) -> tuple[str, str] | None:
    """(entry name, "data" or "meta") of a file in ``entries`` or ``filling``; None for a file that is not ours."""
    m = _STEM.fullmatch(file)
    return (m[1], m[2]) if m else None


def is_dying_name(file: str) -> bool:
    return _DYING.fullmatch(file) is not None


class Layout:
    """The open tree: a descriptor per directory. Owned by the store; closed with it."""

    def __init__(self, cache_dir: Path, ops: FileOps, tree_fd: int, fds: dict[Place, int], store_id: str) -> None:
        self.cache_dir = cache_dir
        self.path = cache_dir / TREE
        self.store_id = store_id
        self.tree_fd = tree_fd
        self._ops = ops
        self._fds = fds

    @classmethod
    def open(cls, cache_dir: Path, ops: FileOps) -> Layout:
        """Open the tree, making it if there is none. The caller holds the lock.

        Raises :class:`CacheError` if something that is not ours has the tree's name, ``OSError`` for the rest.
        """
        fds: list[int] = []
        try:
            top = ops.open_dir(str(cache_dir))
            fds.append(top)
            tree = _open_or_make(ops, TREE, top, cache_dir)
            fds.append(tree)
            store_id = _read_marker(ops, tree, cache_dir) or _write_marker(ops, tree, cache_dir)
            places = {}
            for place in Place:
                places[place] = _open_or_make(ops, place.value, tree, cache_dir / TREE)
                fds.append(places[place])
        except BaseException:
            for fd in fds:
                ops.close(fd)
            raise
        ops.close(top)
        return cls(cache_dir, ops, tree, places, store_id)

    def fd(self, place: Place) -> int:
        return self._fds[place]

    def file(self, place: Place, file: str) -> Path:
        """The path of a file, for messages."""
        return self.path / place.value / file

    def directory_bytes(self) -> int:
        """What the directories and the marker take on disk."""
        own = sum(self._ops.disk_bytes(fd) for fd in (self.tree_fd, *self._fds.values()))
        return own + 2 * self._ops.block_bytes(self.tree_fd)  # marker and lock, one block each

    def check_present(self) -> None:
        """Raise :class:`DiskFault` unless the path still leads to this very tree.

        A cache directory that has vanished or was replaced (an unmounted disk, an ``rm -r``) is a failed disk, not an
        empty cache.
        """
        try:
            top = self._ops.open_dir(str(self.cache_dir))
            try:
                tree = self._ops.open_dir(TREE, dir_fd=top)
            finally:
                self._ops.close(top)
        except OSError as e:
            raise self._vanished() from e
        try:
            if not os.path.sameopenfile(tree, self.tree_fd) or _read_marker(self._ops, tree, self.cache_dir) is None:
                raise self._vanished()
        finally:
            self._ops.close(tree)

    def _vanished(self) -> DiskFault:
        return DiskFault(
            "the cache directory has vanished or was replaced", url=str(self.cache_dir), hint="reads pass through"
        )

    def close(self) -> None:
        for fd in (self.tree_fd, *self._fds.values()):
            self._ops.close(fd)


def _open_or_make(ops: FileOps, name: str, parent: int, where: Path) -> int:
    try:
        ops.make_dir(name, dir_fd=parent)
    except FileExistsError:
        pass
    try:
        return ops.open_dir(name, dir_fd=parent)
    except NotADirectoryError:
        raise CacheError(
            "is not a directory of this cache", url=str(where / name), hint="move it away or choose another cache_dir"
        ) from None


def _read_marker(ops: FileOps, tree: int, cache_dir: Path) -> str | None:
    """The tree's id; None if there is no marker in an empty tree."""
    try:
        fd = ops.open(MARKER, dir_fd=tree)
    except FileNotFoundError:
        known = {place.value for place in Place}
        if set(os.listdir(tree)) - known - {MARKER + ".new"}:
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


def _write_marker(ops: FileOps, tree: int, cache_dir: Path) -> str:
    store_id = secrets.token_hex(16)
    text = json.dumps({"program": "nearflash", "format": _MARKER_FORMAT, "id": store_id}) + "\n"
    temporary = MARKER + ".new"
    try:
        ops.unlink(temporary, dir_fd=tree)
    except FileNotFoundError:
        pass
    fd = ops.create(temporary, dir_fd=tree)
    try:
        ops.write(fd, text.encode(), 0)
        ops.sync(fd)
    finally:
        ops.close(fd)
    ops.rename(temporary, MARKER, src_fd=tree, dst_fd=tree)
    return store_id


def _not_ours(cache_dir: Path) -> CacheError:
    return CacheError(
        "holds files but no marker of this cache, so it is left alone",
        url=str(cache_dir / TREE),
        hint="choose another cache_dir",
    )
