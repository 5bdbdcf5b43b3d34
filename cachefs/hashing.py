"""Digests: xxh3-64 for cached chunks, xxh3-128 for checkpoint chunks, blake2b for names.

xxh3 guards against rot and mix-ups, not against an adversary. Names of files on disk come from blake2b because URLs
are chosen by others and two of them must never share a name.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer


def chunk_digest(data: Buffer) -> int:
    """64-bit xxh3 of one chunk as an unsigned integer (flash store, peers)."""
    return xxhash.xxh3_64_intdigest(data)


def tensor_digest(data: Buffer) -> str:
    """128-bit xxh3 of one checkpoint chunk as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def name_digest(*parts: str | bytes) -> str:
    """40 hexadecimal digits that name an entry on disk; parts are length-prefixed, so no two lists collide."""
    h = hashlib.blake2b(digest_size=20)
    for part in parts:
        raw = part if isinstance(part, bytes) else part.encode("utf-8", "surrogateescape")
        h.update(len(raw).to_bytes(8, "little"))
        h.update(raw)
    return h.hexdigest()
