"""Which chunks of an entry can be read: a small mapped file that the daemon writes and its clients read.

Layout (little-endian), a memfd on Linux and an unlinked temporary file elsewhere::

    0   8  magic b"NFBITS" + 2 bytes of format version
    8   8  u64 number of chunks
    16  1  1 once every chunk can be read
    17  1  1 once the entry was replaced: what is still unset here never will be, open the object again
    18  46 zero
    64  n  one byte per chunk, 0 or 1

A whole byte per chunk lets several threads set chunks without read-modify-write, and lets a reader search with
``find``. A byte becomes 1 only after the chunk's bytes are in the file, and never goes back to 0. Both sides pass
through system calls or the interpreter's own locks between looking at the byte and touching the data, which orders
the two on every architecture that Python runs on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import weakref
from types import TracebackType

from .errors import ProtocolMismatch

MAGIC = b"NFBITS\x00\x01"
HEADER_BYTES = 64
_HEADER = struct.Struct("<8sQBB")
_ALL_SET = 16
_SUPERSEDED = 17
_F_SEAL_FUTURE_WRITE = 0x0010  # linux/fcntl.h; Python has no name for it before 3.14


def _first_zero(view: mmap.mmap, start: int, end: int) -> int | None:
    at = view.find(b"\x00", HEADER_BYTES + start, HEADER_BYTES + end)
    return None if at < 0 else at - HEADER_BYTES


class ChunkBits:
    """The writer's side: owns the file and its only writable map. One per open entry, in the daemon.

    ``initial`` holds one byte (0 or 1) per chunk to begin with. The file is sealed where the system can, so that a
    client that is handed the descriptor can neither write nor resize it. Not thread-safe for :attr:`count`; the
    owner guards that.
    """

    def __init__(self, n_chunks: int, initial: bytes | None = None) -> None:
        if initial is not None and len(initial) != n_chunks:
            raise ValueError(f"{len(initial)} initial bytes for {n_chunks} chunks")
        self.n_chunks = n_chunks
        self.count = sum(initial) if initial else 0
        self.fd = _anonymous_file()
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, HEADER_BYTES + n_chunks)
        self._map = mmap.mmap(self.fd, HEADER_BYTES + n_chunks)
        self._map[: _HEADER.size] = _HEADER.pack(MAGIC, n_chunks, self.all_set, 0)
        if initial:
            self._map[HEADER_BYTES:] = initial
        _seal(self.fd)

    @property
    def all_set(self) -> bool:
        return self.count == self.n_chunks

    def set(self, chunk: int) -> bool:
        """Mark one chunk readable. False if it was marked already."""
        if self._map[HEADER_BYTES + chunk]:
            return False
        self._map[HEADER_BYTES + chunk] = 1
        self.count += 1
        if self.all_set:
            self._map[_ALL_SET] = 1
        return True

    def has(self, chunk: int) -> bool:
        return bool(self._map[HEADER_BYTES + chunk])

    def missing(self) -> list[int]:
        """All chunks not yet marked, ascending."""
        out: list[int] = []
        at = 0
        while (found := _first_zero(self._map, at, self.n_chunks)) is not None:
            out.append(found)
            at = found + 1
        return out

    def mark_superseded(self) -> None:
        """Tell readers that this entry was replaced; they open the object again for what is still missing."""
        self._map[_SUPERSEDED] = 1

    def snapshot(self) -> bytes:
        """The chunk bytes as they are now, fit for ``initial``."""
        return self._map[HEADER_BYTES:]

    def close(self) -> None:
        """Unmap and close; idempotent. Readers keep their own maps."""
        self._map.close()
        self._close_fd()


class BitmapReader:
    """The reader's side: a read-only map of a bitmap whose descriptor came from the daemon.

    The descriptor stays the caller's and may be closed once this is made. Raises :class:`ProtocolMismatch` for a file
    that is not a bitmap of this format version. Reading needs no call to the daemon.
    """

    def __init__(self, fd: int) -> None:
        size = os.fstat(fd).st_size
        if size < HEADER_BYTES:
            raise ProtocolMismatch("the daemon's chunk bitmap is cut short", hint="restart the daemon")
        self._map = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        magic, self.n_chunks, _, _ = _HEADER.unpack_from(self._map)
        if magic != MAGIC or size < HEADER_BYTES + self.n_chunks:
            self._map.close()
            raise ProtocolMismatch(
                "the daemon's chunk bitmap has another format", hint="use one nearflash version for both"
            )

    @property
    def all_set(self) -> bool:
        """Whether every chunk can be read (one byte is looked at)."""
        return self._map[_ALL_SET] == 1

    @property
    def superseded(self) -> bool:
        """Whether the entry was replaced: chunks not set by now are to be had by opening the object again."""
        return self._map[_SUPERSEDED] == 1

    def has(self, chunk: int) -> bool:
        """Whether chunk ``chunk`` (0-based) can be read."""
        if not 0 <= chunk < self.n_chunks:
            raise IndexError(f"chunk {chunk} of {self.n_chunks}")
        return self._map[HEADER_BYTES + chunk] == 1

    def first_missing(self, start: int = 0, end: int | None = None) -> int | None:
        """The first chunk in ``[start, end)`` that cannot be read yet, or None. ``end`` defaults to all chunks."""
        stop = self.n_chunks if end is None else end
        if not 0 <= start <= stop <= self.n_chunks:
            raise IndexError(f"chunks [{start}, {stop}) of {self.n_chunks}")
        return None if self.all_set else _first_zero(self._map, start, stop)

    def close(self) -> None:
        """Unmap; idempotent."""
        self._map.close()

    def __enter__(self) -> BitmapReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("nearflash-bits", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as f:
        return os.dup(f.fileno())


def _seal(fd: int) -> None:
    try:
        import fcntl
    except ImportError:
        return
    if not hasattr(fcntl, "F_ADD_SEALS"):
        return
    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    # Sealing is hardening only: a system without it (or without the newer write seal) works the same.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
