"""The open files of one entry: its data, its digests, and the bitmap that readers see."""

from __future__ import annotations

from array import array

from ..bitmap import ChunkBits
from .fileops import FileOps
from .sidecar import FIRST_READ, Damaged, Header, pack_digest, parse_digests, parse_header, stored_digest


def read_header(ops: FileOps, fd: int) -> Header:
    """The header of an open sidecar. Raises ``Damaged``, ``Foreign`` or ``OSError``."""
    found = parse_header(ops.read(fd, FIRST_READ, 0))
    if isinstance(found, int):
        found = parse_header(ops.read(fd, found, 0))
    if isinstance(found, int):
        raise Damaged("the sidecar is cut short")
    return found


def read_digests(ops: FileOps, fd: int, header: Header) -> array[int]:
    return parse_digests(ops.read(fd, 8 * header.n_chunks, header.table_offset), header.n_chunks)


class ChunkFile:
    """Data and sidecar descriptors, the digest table and the chunk bits. Owns and closes them.

    A published entry is opened for reading, without its sidecar (``meta_fd`` None). Different chunks may be read and
    written by several threads at once; the caller keeps two from working on one chunk and guards :attr:`bits`.
    """

    def __init__(
        self, ops: FileOps, header: Header, data_fd: int, meta_fd: int | None, digests: array[int], bits: ChunkBits
    ) -> None:
        self._ops = ops
        self.header = header
        self.data_fd = data_fd
        self._meta_fd = meta_fd
        self.digests = digests
        self.bits = bits

    @classmethod
    def open(
        cls, ops: FileOps, header: Header, dir_fd: int, data: str, meta: str, *, write: bool, bits: bytes | None
    ) -> ChunkFile:
        """Open the files of an existing entry. Raises ``OSError``, or ``Damaged`` if the table is cut short."""
        meta_fd = ops.open(meta, dir_fd=dir_fd, write=write)
        data_fd = -1
        try:
            digests = read_digests(ops, meta_fd, header)
            data_fd = ops.open(data, dir_fd=dir_fd, write=write)
            file = cls(ops, header, data_fd, meta_fd if write else None, digests, ChunkBits(header.n_chunks, bits))
        except BaseException:
            ops.close(meta_fd)
            if data_fd >= 0:
                ops.close(data_fd)
            raise
        if not write:
            ops.close(meta_fd)
        return file

    def chunk_bytes(self, chunk: int) -> int:
        return min(self.header.chunk_size, self.header.size - chunk * self.header.chunk_size)

    def write(self, chunk: int, data: memoryview) -> None:
        """The chunk's bytes, then its digest. The caller sets the bit after that."""
        digest = stored_digest(data)
        self._ops.write(self.data_fd, data, chunk * self.header.chunk_size)
        self._record(chunk, digest)

    def read(self, chunk: int) -> bytes:
        return self._ops.read(self.data_fd, self.chunk_bytes(chunk), chunk * self.header.chunk_size)

    def check(self, chunk: int) -> bool:
        """Whether the bytes on disk are those whose digest is recorded."""
        return stored_digest(self.read(chunk)) == self.digests[chunk]

    def forget(self, chunk: int) -> None:
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
