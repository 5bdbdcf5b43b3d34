"""Views of what callers hand in, and what is common to both kinds of backends. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ..errors import Changed, Corrupt
from .abc import ObjectMeta

if TYPE_CHECKING:
    from typing_extensions import Buffer


def as_pieces(data: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """Flat byte views of one buffer or of several; nothing is copied. Empty ones are left out."""
    many = cast("Sequence[Buffer]", data) if isinstance(data, list | tuple) else [cast("Buffer", data)]
    views = [memoryview(piece) for piece in many]
    return [view.cast("B") if view.nbytes else view for view in views if view.nbytes]


def match_tag(version: ObjectMeta | None) -> str | None:
    """The ETag to send as If-Match so that a reply is of this version; ``None`` where that cannot be done.

    A weak tag (``W/"..."``) never matches (RFC 9110, 13.1.1): then only the reply's own fields can be compared.
    """
    etag = version.etag if version is not None else None
    return None if etag is None or etag.startswith("W/") else etag


def check_version(got: ObjectMeta, wanted: ObjectMeta, *, url: str) -> None:
    """Raise :class:`Changed` unless a reply's object is the version that was asked for.

    Only what both sides know is compared: not every store gives every field in every reply.
    """
    if got.etag is not None and wanted.etag is not None:
        same = got.etag == wanted.etag
    elif got.version_id is not None and wanted.version_id is not None:
        same = got.version_id == wanted.version_id
    else:
        same = not (got.modified and wanted.modified) or got.modified == wanted.modified
    if not same or got.size != wanted.size:
        raise Changed("the object is no longer the version that was opened", url=url)


def check_range(got: tuple[int, int], length: int, wanted: tuple[int, int], *, url: str) -> None:
    """Raise :class:`Corrupt` unless a reply names the range that was asked for and has as many bytes."""
    start, end = wanted
    if got != wanted:
        raise Corrupt(f"asked for bytes {start}-{end - 1}, got {got[0]}-{got[1] - 1}", url=url, offset=start)
    if length != end - start:
        raise Corrupt(f"asked for {end - start} bytes, got {length}", url=url, offset=start)


def parse_content_range(value: str | None) -> tuple[int, int, int] | None:
    """``(start, end, size)``, end exclusive, of a ``Content-Range: bytes a-b/size`` header; else ``None``."""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", value or "")
    return (int(match[1]), int(match[2]) + 1, int(match[3])) if match else None
