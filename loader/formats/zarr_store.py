"""The store that the zarr library decodes from: chunks that are mapped already, and nothing else.

Imports zarr, so it is imported itself only when a zarr store is read. The library runs its codecs on an event loop in
a thread of its own, shared by the whole process; nothing here waits on that thread, whatever there is to wait for or
to fail was fetched before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from .abc import Bytes


class MappedStore(Store):
    """Read-only. ``chunks`` are the keys that may be asked for now; ``None`` is one that is absent."""

    def __init__(self) -> None:
        super().__init__(read_only=True)
        self._is_open = True
        self.chunks: dict[str, Bytes | None] = {}

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        if key not in self.chunks:
            raise RuntimeError(f"{key!r} was not fetched")  # never taken for absent, which would read as fill values
        data = self.chunks[key]
        return None if data is None else prototype.buffer.from_bytes(_cut(data, byte_range).data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        return self.chunks.get(key) is not None

    @property
    def supports_writes(self) -> bool:
        return False

    @property
    def supports_deletes(self) -> bool:
        return False

    @property
    def supports_listing(self) -> bool:
        return False

    async def set(self, key: str, value: Buffer) -> None:
        raise NotImplementedError("a store that is read")

    async def delete(self, key: str) -> None:
        raise NotImplementedError("a store that is read")

    def list(self) -> AsyncIterator[str]:
        raise NotImplementedError("a store without a listing")

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("a store without a listing")

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        raise NotImplementedError("a store without a listing")

    def __eq__(self, value: object) -> bool:
        return self is value

    __hash__ = object.__hash__


def _cut(data: Bytes, wanted: Any) -> Bytes:
    size = len(data)
    if wanted is None:
        return data
    if isinstance(wanted, RangeByteRequest):
        start, end = wanted.start, wanted.end
    elif isinstance(wanted, OffsetByteRequest):
        start, end = wanted.offset, size
    elif isinstance(wanted, SuffixByteRequest):
        start, end = max(size - wanted.suffix, 0), size
    else:
        raise TypeError(f"a byte range of an unknown kind: {wanted!r}")
    if not 0 <= start <= end <= size:
        raise ValueError(f"bytes {start} to {end} of a chunk of {size}")
    return data[start:end]
