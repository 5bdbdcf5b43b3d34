"""Folders that a conversion is filling, or was filling when it was killed: they look whole and are not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cachefs.errors import FormatError

if TYPE_CHECKING:
    from cachefs.shard import ObjectStat

UNFINISHED = ".nearflash-unfinished"
"""The object that marks such a folder."""


def refuse_unfinished(listed: Iterable[ObjectStat], url: str) -> None:
    """Raises ``FormatError`` where a mark is among the objects of a listing."""
    if any(item.url.endswith("/" + UNFINISHED) for item in listed):
        raise FormatError(
            "a conversion into this folder is not finished, or was interrupted",
            url=url,
            hint="wait for it, or run it again with --force",
        )
