"""What layouts take and give: :class:`Folder` and :class:`Found`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from cachefs.errors import FormatError

if TYPE_CHECKING:
    from cachefs.client import Client
    from cachefs.shard import ObjectStat

    from ..formats import Format

MOST_INDEX: Final = 512 << 20
"""Bytes; an index is read whole, and one of a million shards has fewer."""


_AT_ONCE = 16
Item = TypeVar("Item")
Answer = TypeVar("Answer")


def side_by_side(ask: Callable[[Item], Answer], items: Sequence[Item]) -> list[Answer]:
    """``ask`` of each item, in their order, several at once; raises the first error."""
    with ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(len(items), 1))) as pool:
        return list(pool.map(ask, items))


@dataclass(frozen=True)
class Found:
    """Shards in order, and what an index knows of them: one entry a shard in ``counts`` (samples) and ``raw_sizes``
    (bytes decompressed). ``format``: what the index says they are (``None``: their bytes tell)."""

    stats: tuple[ObjectStat, ...]
    format: Format | None = None
    counts: tuple[int, ...] | None = None
    raw_sizes: tuple[int, ...] | None = None

    def named(self, asked: Format | None) -> Format | None:
        """The format that is known before any shard is read: what the user asked for, completed by the index."""
        return asked.completed(self.format) if asked is not None and self.format is not None else asked or self.format


@dataclass(frozen=True)
class Folder:
    """A folder as listed: ``url`` without a slash at its end, and every object below it, hidden ones included.

    ``format``: what the user asked for, if anything. A layout of another format than that must not take the folder.
    """

    url: str
    listed: tuple[ObjectStat, ...]
    client: Client = field(repr=False)
    format: Format | None = None

    @cached_property
    def by_url(self) -> dict[str, ObjectStat]:
        return {item.url: item for item in self.listed}

    def named(self, *names: str) -> Sequence[ObjectStat]:
        """The objects anywhere below the folder whose last part is one of ``names``."""
        return [item for item in self.listed if item.url.rpartition("/")[2] in names]

    def read(self, url: str) -> bytes:
        """An index, whole. Raises ``FormatError`` for one that is too large to be one."""
        stat = self.by_url.get(url)
        if stat is not None and stat.size > MOST_INDEX:
            raise FormatError(f"{stat.size} bytes are too many for an index, {MOST_INDEX} are the most", url=url)
        return self.client.read(url)


Layout: TypeAlias = Callable[[Folder], Found | None]
"""``None``: the folder is not of this kind. Raises ``FormatError`` for one that is, and is damaged."""
