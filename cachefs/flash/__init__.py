"""The flash store: cached objects as files on a node's local disk. See :mod:`.layout` for the format on disk."""

from __future__ import annotations

from .entry import Entry
from .entryinfo import EntryInfo
from .quota import Usage
from .sidecar import EntryKey
from .store import FlashStore

__all__ = ["Entry", "EntryInfo", "EntryKey", "FlashStore", "Usage"]
