"""The calls under way: what asks a data set for samples, where that cannot be told in another way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The calls under way, innermost first, without those of this package."""
    frame: FrameType | None = sys._getframe(1)
    within = __name__.partition(".")[0] + "."
    while frame is not None and frame.f_globals.get("__name__", "").startswith(within):
        frame = frame.f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
