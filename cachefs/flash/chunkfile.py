"""The open files of one entry: its data, its digests, and the bitmap that readers see."""

from __future__ import annotations

from array import array

from ..bitmap import ChunkBits
from .fileops import FileOps
from .layout import data_name, meta_name
from .sidecar import FIRST_READ, Damaged, Header, pack_digest, parse_digests, parse_header, stored_digest


def read_header(ops: FileOps, fd: int) -> Header:
    """The header of an open sidecar. Raises ``Damaged``, ``Foreign`` or ``OSError``."""
    found = parse_header(ops.read(fd, FIRST_READ, 0))
    if isinstance(found, int):
        found = parse_header(ops.read(fd, found, 0))
    if isinstance(found, int) or ops.fstat(fd).st_size != found.file_bytes:
        raise Damaged("the sidecar has the wrong length")
    return found


class ChunkFile:
    """Data and sidecar descriptors, the digest table and the chunk bits. Owns and closes them.

    A published entry is opened for reading, without its sidecar (``meta_fd`` None). Different chunks may be read and
    written by several threads at once; the caller keeps two from working on one chunk and guards :attr:`bits`.
    """

    def __init__(
        self, ops: FileOps, header: Header, data_fd: int, meta_fd: int | None, digests: array[int], bits: bytes | None
    ) -> None:
        self._ops = ops
        self.header = header
        self.data_fd = data_fd
        self._meta_fd = meta_fd
        self.digests = digests
        self.bits = ChunkBits(header.n_chunks, bits)

    @classmethod
    def create(cls, ops: FileOps, dir_fd: int, name: str, header: Header, raw: bytes) -> ChunkFile:
        """Make the files of a new entry: preallocated data, then the sidecar with an empty digest table.

        Raises ``OSError`` and leaves nothing behind that the disk lets it remove.
        """
        table = bytes(8 * header.n_chunks)
        fds: list[int] = []
        made: list[str] = []
        try:
            for file in (data_name(name), meta_name(name)):
                fds.append(ops.create(file, dir_fd=dir_fd))
                made.append(file)
                if len(fds) == 1:
                    ops.allocate(fds[0], header.size)
                else:
                    ops.write(fds[1], raw + table, 0)
            return cls(ops, header, fds[0], fds[1], array("Q", table), None)
        except OSError:
            for fd in fds:
                ops.close(fd)
            for file in made:
                ops.unlink(file, dir_fd=dir_fd)
            raise

    @classmethod
    def open(
        cls,
        ops: FileOps,
        header: Header,
        data: tuple[str, int],
        meta: tuple[str, int],
        *,
        write: bool,
        bits: bytes | None,
    ) -> ChunkFile:
        """Open an existing entry's files, each given as (name, directory descriptor).

        Raises ``OSError``, or ``Damaged`` if the table is cut short.
        """
        meta_fd = ops.open(meta[0], dir_fd=meta[1], write=write)
        data_fd = -1
        try:
            digests = parse_digests(ops.read(meta_fd, 8 * header.n_chunks, header.table_offset), header.n_chunks)
            data_fd = ops.open(data[0], dir_fd=data[1], write=write)
            file = cls(ops, header, data_fd, meta_fd if write else None, digests, bits)
        except BaseException:
            ops.close(meta_fd)
            if data_fd >= 0:
                ops.close(data_fd)
            raise
        if not write:
            ops.close(meta_fd)
        return file

    def write(self, chunk: int, data: memoryview | bytes) -> None:
        """The chunk's bytes, then its digest. The caller sets the bit after that."""
        digest = stored_digest(data)
        self._ops.write(self.data_fd, data, chunk * self.header.chunk_size)
        self._record(chunk, digest)

    def read(self, chunk: int) -> bytes:
        return self._ops.read(self.data_fd, self.header.chunk_bytes(chunk), chunk * self.header.chunk_size)

    def check(self, chunk: int) -> bool:
        """Whether the bytes on disk are those whose digest is recorded."""
        return stored_digest(self.read(chunk)) == self.digests[chunk]

    def forget(self, chunk: int) -> None:
        """The chunk's bytes are no good: it counts as not on disk."""
        self._record(chunk, 0)

    def _record(self, chunk: int, digest: int) -> None:
        if self._meta_fd is None:
            raise ValueError("a published entry is never modified")
        self._ops.write(self._meta_fd, pack_digest(digest), self.header.digest_offset(chunk))
        self.digests[chunk] = digest

    def close(self) -> None:
        self.bits.close()
        self._ops.close(self.data_fd)
        if self._meta_fd is not None:
            self._ops.close(self._meta_fd)


class Donor:
    """The file of an entry that was replaced because one of its chunks was bad: gives its good chunks to the new one.

    Keeps the old file open, and so its space in use, until :meth:`close`.
    """

    def __init__(self, ops: FileOps, file: ChunkFile, bad: int) -> None:
        self._ops = ops
        self._header = file.header
        self._digests = array("Q", file.digests)
        self._digests[bad] = 0
        self._fd = ops.duplicate(file.data_fd)

    def offers(self, chunk: int) -> bool:
        return self._fd >= 0 and self._digests[chunk] != 0

    def take(self, chunk: int) -> bytes | None:
        """The chunk's bytes if they fit their digest; None, and no offer any more, if they do not."""
        data = self._ops.read(self._fd, self._header.chunk_bytes(chunk), chunk * self._header.chunk_size)
        if stored_digest(data) == self._digests[chunk]:
            return data
        self.refuse(chunk)
        return None

    def refuse(self, chunk: int) -> None:
        """The chunk is bad: offer it no more."""
        self._digests[chunk] = 0

    def close(self) -> None:
        """Let go of the old file; idempotent."""
        if self._fd >= 0:
            self._ops.close(self._fd)
            self._fd = -1
