"""The objects of a data set as a format sees them: :class:`Objects`, and the bytes of those that it maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from cachefs.shard import ObjectStat

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A shard's bytes: 1-D ``uint8``, C-contiguous, writable (the map under it is private)."""

Value = TypeVar("Value")

Ready: TypeAlias = Callable[[int, int], None]
"""``ready(start, end)`` returns once these bytes of a mapped object are there; raises the origin's error, or
``DeadlineExceeded``."""


def all_there(start: int, end: int) -> None:
    """The :data:`Ready` of an object that is complete."""


class Mapped(NamedTuple):
    """One mapped object. ``data`` may still be filling: call ``ready`` before looking at bytes."""

    data: Bytes
    ready: Ready = all_there


class Objects(Protocol):
    """The objects of a data set, at the versions that its listing saw, as a format may ask for them.

    All raise what the client raises (``NotFound``, ``Denied``, ``Changed`` ...). Maps are fresh, private and writable,
    and live as long as the last view into them.
    """

    def map(self, url: str, stat: ObjectStat | None = None) -> Mapped:
        """One object's bytes, perhaps before they have arrived. ``stat``: as a listing saw it, else ``Changed``."""

    def bound(self, url: str) -> tuple[str, int] | None:
        """Version and size that the data set's listing saw of this URL; ``None`` where there was no listing."""

    def read(self, url: str) -> bytes:
        """One small object, whole."""

    def stat(self, url: str) -> ObjectStat:
        """Size and version of one object."""

    def list(self, folder: str) -> Sequence[ObjectStat]:
        """All objects below a folder, in order of their names."""

    def kept(self, url: str, name: str) -> bytes | None:
        """What :meth:`keep` left beside the object in the node's cache; ``None`` if nothing is there."""

    def keep(self, url: str, name: str, make: Callable[[], bytes]) -> None:
        """Leave bytes made from the object beside it in the node's cache, if it takes them; else they are not made."""

    def ask(self, stats: Sequence[ObjectStat]) -> None:
        """Have these objects fetched, in this order; returns at once. Local ones are left alone."""

    def recalled(self, url: str, name: str, make: Callable[[], Value]) -> Value:
        """What ``make`` tells of the object, at the version that the data set's listing saw; remembered for the shards
        that are opened next. ``name``: what it tells."""

    def close(self) -> None:
        """Give back what the maps so far hold open (leases, descriptors); they stay valid, and more may be made."""
