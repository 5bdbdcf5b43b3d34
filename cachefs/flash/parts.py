"""The parts of an open store that its modules share."""

from __future__ import annotations

from dataclasses import dataclass

from ..clock import Clock
from ..metrics import Metrics
from .fileops import FileOps
from .health import Health
from .index import Index
from .layout import Layout


@dataclass(frozen=True)
class Parts:
    """System calls, directories, what is held, how the disk does, counters, time. Owned by the store."""

    ops: FileOps
    layout: Layout
    index: Index
    health: Health
    metrics: Metrics
    clock: Clock

    def require_present(self) -> None:
        """Raise (and remember) :class:`DiskFault` if the directory has vanished: the disk is gone, not the files."""
        try:
            self.layout.check_present()
        except OSError as e:
            raise self.health.note(e, self.layout.path, "looking for it") from e
