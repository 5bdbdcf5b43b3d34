"""Records that are kept beside a shard: msgpack behind a checksum, since what comes back is input from outside."""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from cachefs.hashing import chunk_digest

Record = TypeVar("Record")

_SUM: Final = 8


def seal(record: Any) -> bytes:
    """The record as bytes, for :func:`unseal`."""
    body: bytes = msgspec.msgpack.encode(record)
    return _sum(body) + body


def unseal(raw: bytes, kind: type[Record], what: str) -> Record:
    """The record that :func:`seal` made these bytes of. Raises ``ValueError``, which says ``what`` they were to be, for
    any others. Whether the record fits its shard is for the caller to see."""
    body = raw[_SUM:]
    if _sum(body) != raw[:_SUM]:
        raise ValueError(f"{what} with a wrong checksum")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as e:
        raise ValueError(f"bytes that are not {what}: {e}") from e


def _sum(body: bytes) -> bytes:
    return chunk_digest(body).to_bytes(_SUM, "little")
