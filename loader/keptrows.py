"""Token files that stay placed from pass to pass: what a data set keeps of the gathering of windows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from cachefs.errors import NearflashError

from .formats import Tokens
from .rowgather import WindowRows

if TYPE_CHECKING:
    from cachefs.client import Client

    from .manifest import Manifest

_MOST_PLACED: Final = 8192
_LEAST_PLACED: Final = 64
"""Token shards that stay placed from pass to pass, as far as the cache can spare them."""
_SPARE: Final = 16
"""What one process holds of the cache beyond what it reads is at most this part of the quota."""


class KeepsRows:
    """What a definition is that keeps them; each process its own."""

    _rows: tuple[int, int, WindowRows] | None = None  # process, capacity

    def _windowed(self) -> tuple[Manifest, Client]:
        """The token files, and who opens them."""
        raise NotImplementedError

    def take_rows(self, format: Tokens, capacity: int) -> WindowRows:
        """What gathers the windows of token files, for one pass; :meth:`keep_rows` takes it back."""
        kept, self._rows = self._rows, None
        if kept is not None and kept[0] == os.getpid():
            if kept[1] >= capacity:
                return kept[2]
            kept[2].close()
        manifest, client = self._windowed()
        count = len(manifest.shards)
        # a local file is not held from anyone by being mapped; what is mapped of the cache cannot be evicted
        if not any("://" in stat.url for stat in manifest.shards[:1]):
            return WindowRows(format, manifest, client, capacity=max(capacity, min(count, _MOST_PLACED)), resting=count)
        spare = _spare(client) // max(int(manifest.sizes.max(initial=0)), 1)
        slots = min(count, max(2 * capacity, _LEAST_PLACED), spare)
        return WindowRows(format, manifest, client, capacity=max(capacity, slots), resting=spare)

    def keep_rows(self, rows: WindowRows, capacity: int) -> None:
        """Keep the placed shards for the next pass of this process, as far as the cache can spare them."""
        if self._rows is None:
            self._rows = (os.getpid(), capacity, rows)
            rows.rest()
        else:
            rows.close()


def _spare(client: Client) -> int:
    """Bytes of the cache that one process may hold without reading them."""
    try:
        return int(client.stats()["quota_bytes"] or 0) // _SPARE
    except NearflashError:
        return 0  # whoever opens a shard is told
