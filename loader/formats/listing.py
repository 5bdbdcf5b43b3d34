"""Indexes that tools write beside their shards: JSON from outside, decoded by type and checked.

An index of 100,000 shards is read in well under a second, so no check here is one for each key in Python.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec

from cachefs.errors import FormatError

T = TypeVar("T")
INDEX = "index.json"

MOST_SAMPLES = (1 << 32) - 1
"""Of one shard: its number and a sample's in it share 64 bits."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST_SAMPLES)]
"""The samples of a shard."""
Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Bytes, or tokens."""


class _Tables(msgspec.Struct):
    shards: msgspec.Raw = msgspec.Raw()
    chunks: msgspec.Raw = msgspec.Raw()


def tool_of(raw: bytes) -> str | None:
    """Whose index the bytes are: ``"mds"`` or ``"litdata"``, by what it lists; ``None``: no index of either."""
    try:
        tables = msgspec.json.decode(raw, type=_Tables)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if _is_list(tables.shards):
        return "mds"
    return "litdata" if _is_list(tables.chunks) else None


def _is_list(raw: msgspec.Raw) -> bool:
    return bytes(memoryview(raw)[:64]).lstrip()[:1] == b"["


def decoded(raw: bytes, kind: type[T], what: str, url: str) -> T:
    """``raw`` as ``kind``. Raises ``FormatError`` for bytes that are no such JSON."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise FormatError(f"no readable {what}: {e}", url=url) from e


def is_inside(name: str) -> bool:
    """Whether a name that an index gives is one of an object in or below the index's own folder."""
    if "\\" in name or "\0" in name:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
