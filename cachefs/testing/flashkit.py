"""Helpers for tests of the flash store: deterministic objects, readers like a client's, a look at the disk."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..bitmap import BitmapReader
from ..clock import Clock
from ..config import CHUNK_ALIGN, Settings
from ..flash import Entry, EntryKey, FlashStore
from ..flash.fileops import FileOps
from ..metrics import Metrics
from .clock import ManualClock

CHUNK = CHUNK_ALIGN


@dataclass(frozen=True)
class Thing:
    """An object to cache: its key and its bytes."""

    key: EntryKey
    data: bytes

    @property
    def n_chunks(self) -> int:
        return -(-len(self.data) // CHUNK)

    def chunk(self, i: int) -> bytes:
        return self.data[i * CHUNK : (i + 1) * CHUNK]


def thing(name: str, size: int) -> Thing:
    """An object whose bytes depend on its name alone."""
    return Thing(EntryKey("http://store", f"s3://bucket/{name}", "v1"), random.Random(name).randbytes(size))


def open_store(
    folder: Path, quota: int = 8 << 20, *, clock: Clock | None = None, ops: FileOps | None = None, free_floor: int = 0
) -> FlashStore:
    """A store in ``folder`` with 64 KiB chunks."""
    settings = Settings(
        cache_dir=folder, socket=folder / "unused.sock", quota=quota, chunk_size=CHUNK, free_floor=free_floor
    )
    return FlashStore.open(settings, metrics=Metrics(), clock=clock or ManualClock(), ops=ops)


def fill(store: FlashStore, what: Thing) -> Entry:
    """Cache the whole object, without a lease left over."""
    entry = store.create(what.key, len(what.data), lease=True)
    for i in entry.missing():
        entry.write_chunk(i, what.chunk(i))
    entry.release()
    return entry


class Reader:
    """Holds an entry as a client does: a private map of the data and a map of the bitmap, no descriptor kept."""

    def __init__(self, entry: Entry) -> None:
        data_fd, bits_fd = entry.reader_fds()
        try:
            st = os.fstat(data_fd)
            self.inode, self.disk_bytes = st.st_ino, st.st_blocks * 512
            self.map = (
                mmap.mmap(data_fd, entry.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
                if entry.size
                else None
            )
            self.bits = BitmapReader(bits_fd)
        finally:
            os.close(data_fd)
            os.close(bits_fd)

    def wrong(self, what: Thing) -> list[int]:
        """The chunks whose bit is set although the bytes are not the object's."""
        if self.map is None:
            return []
        return [
            i
            for i in range(what.n_chunks)
            if self.bits.has(i) and self.map[i * CHUNK : i * CHUNK + len(what.chunk(i))] != what.chunk(i)
        ]

    def close(self) -> None:
        if self.map is not None:
            self.map.close()
        self.bits.close()


def disk_usage(folder: Path, readers: Iterable[Reader] = ()) -> int:
    """Bytes of disk that ``folder`` takes, like ``du -s``, and what ``readers`` hold of files already removed from it.

    Files that vanish while it looks count as gone.
    """
    held = {reader.inode: reader.disk_bytes for reader in readers if reader.map is not None}
    total = os.lstat(folder).st_blocks * 512
    for base, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                st = os.lstat(os.path.join(base, name))
            except FileNotFoundError:
                continue
            total += st.st_blocks * 512
            held.pop(st.st_ino, None)
    return total + sum(held.values())


def files_of(folder: Path, entry: Entry) -> dict[str, Path]:
    """Where a live entry's files are now: "data" and "meta" to path."""
    return {
        kind: path for kind in ("data", "meta") for path in (folder / "nearflash-v1").glob(f"*/{entry.name}.{kind}")
    }


def flip_bit(path: Path, offset: int) -> None:
    """Rot: one bit of the file changes, its times do not."""
    st = os.stat(path)
    with open(path, "r+b") as f:
        f.seek(offset)
        byte = f.read(1)[0]
        f.seek(offset)
        f.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))
