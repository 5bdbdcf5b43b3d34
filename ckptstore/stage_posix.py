"""The hidden folder in which a step on a file system is written before it becomes a checkpoint by one rename."""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cachefs.errors import CheckpointConflict, CheckpointError

from .durable import DurableFiles, os_errors
from .layout import MANIFEST, StepRef, check_file
from .storage import Stage, byte_views

if TYPE_CHECKING:
    from typing_extensions import Buffer

_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})


class PosixStage(Stage):
    """A hidden folder that becomes the step's. See :class:`.storage.Stage`."""

    needs_tombstone = False

    def __init__(self, files: DurableFiles, root: str, ref: StepRef, attempt: str) -> None:
        self.ref = ref
        self.attempt = attempt
        self._has_manifest = False
        self._files = files
        self._root = root
        self._final = os.path.join(root, ref.folder)
        self._folder = os.path.join(root, ref.temp_folder(attempt))
        with os_errors(self._folder):
            files.make_folders(root)
            try:
                self._files.ops.mkdir(self._folder)
            except FileExistsError:  # another process of this attempt was first
                if not os.path.isdir(self._folder):
                    raise
            # Held open, so that no later folder of this name can be taken for this one: inode numbers are used again.
            self._handle = os.open(self._folder, os.O_RDONLY) if hasattr(os, "O_DIRECTORY") else None
            if self._handle is not None:
                weakref.finalize(self, os.close, self._handle)

    def write(self, file: str, buffers: Iterable[Buffer]) -> int:
        check_file(file)
        path = os.path.join(self._folder, file)
        with self._errors(path):
            try:
                size = self._files.write_file(path, byte_views(buffers))
            except FileExistsError:
                raise CheckpointConflict(
                    "was written before by an attempt of this id",
                    url=path,
                    hint="abort the earlier save, or give each run its own attempt id",
                ) from None
            self._files.sync_folder(self._folder)
        return size

    def sizes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._errors(self._folder), os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.is_file(follow_symlinks=False):
                    continue
                # Opening makes a network file system ask the server, where stat may answer from a stale cache.
                with open(entry.path, "rb", buffering=0) as f:
                    found[entry.name] = os.fstat(f.fileno()).st_size
        return found

    def publish(self, manifest: bytes) -> bool:
        path = os.path.join(self._folder, MANIFEST)
        with self._errors(path):
            if not self._has_manifest:
                self._files.write_file(path, [memoryview(manifest)])
                self._has_manifest = True
            self._files.sync_folder(self._folder)
            try:
                self._files.ops.rename_new(self._folder, self._final)
            except OSError as e:
                if e.errno in _TAKEN:
                    return False
                raise
        return True

    def settle(self) -> None:
        with os_errors(self._final):
            self._files.sync_folder(self._root)

    def discard(self) -> list[CheckpointError]:
        """As the base class says, and more: the attempt's whole hidden folder goes, whoever wrote into it.

        It is renamed first. So a coordinator that is about to commit finds it gone, or was faster and nothing of the
        committed step is touched.
        """
        dead = f"{self._folder}.dead-{secrets.token_hex(8)}"
        try:
            if self._handle is not None and not os.path.samestat(os.fstat(self._handle), os.stat(self._folder)):
                return []  # that is a later save of the same step
            self._files.ops.rename_new(self._folder, dead)
        except FileNotFoundError:
            return []
        except OSError as e:
            return [CheckpointError(f"cannot be removed: {e.strerror}", url=self._folder)]
        failed: list[CheckpointError] = []
        try:
            for name in os.listdir(dead):
                try:
                    self._files.ops.unlink(os.path.join(dead, name))
                except OSError as e:
                    failed.append(CheckpointError(f"cannot be removed: {e.strerror}", url=os.path.join(dead, name)))
            if not failed:
                self._files.ops.rmdir(dead)
        except OSError as e:
            failed.append(CheckpointError(f"cannot be removed: {e.strerror}", url=dead))
        return failed

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """As :func:`os_errors`; that something is missing here can only mean that the save was given up."""
        with os_errors(path):
            try:
                yield
            except FileNotFoundError as e:
                raise CheckpointError(
                    f"{self.ref} was given up or committed by another process of this attempt", url=self._folder
                ) from e
