"""The daemon's engine over a scripted store, without sockets, for tests."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..clock import SYSTEM_CLOCK, Clock
from ..config import Origin, Settings
from ..daemon.counters import COUNTERS
from ..daemon.disk import Disk
from ..daemon.engine import Engine, Opening
from ..daemon.log import Log
from ..daemon.origins import Access
from ..daemon.plans import Plans
from ..flash import Entry, FlashStore
from ..flash.fileops import FileOps
from ..metrics import Metrics
from ..objstore.url import ObjectUrl
from .scripted import ScriptedStore

CHUNK = 64 * 1024
ORIGIN = Origin(endpoint="http://origin.test")
ACCESS = Access.by(ORIGIN)


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return once ``condition`` holds; it is looked at again and again, since it may concern threads and processes."""
    for _ in range(int(seconds / 0.002)):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"not so after {seconds:.0f} s")


@dataclass
class EngineBox:
    """An engine and what it works with. URLs are ``s3://bucket/<key>``."""

    engine: Engine
    store: ScriptedStore
    metrics: Metrics
    log: Log
    disk: Disk
    clock: Clock

    async def open(self, key: str, *, version: str | None = None, size: int | None = None) -> Opening:
        return await self.engine.open(f"s3://bucket/{key}", ACCESS, version, size)

    async def wait_all(self, opening: Opening, seconds: float = 30.0) -> bool:
        """Wait for every chunk of an opening."""
        entry = entry_of(opening)
        progress = await self.engine.wait(entry, opening.source, 0, entry.n_chunks, seconds)
        return progress.done

    async def read(self, opening: Opening) -> bytes:
        """All bytes of an opening as a reader gets them; gives the opening back."""
        assert opening.holding is not None, "not cached"
        assert await self.wait_all(opening)
        data_fd, bitmap_fd = opening.holding.open_files()
        try:
            return os.pread(data_fd, opening.holding.entry.size, 0)
        finally:
            os.close(data_fd)
            os.close(bitmap_fd)
            self.engine.release(opening)


def entry_of(opening: Opening) -> Entry:
    """The cache entry of an opening that is cached."""
    assert opening.holding is not None, "not cached"
    return opening.holding.entry


def box_settings(cache_dir: Path, **changes: Any) -> Settings:
    """Small chunks, a small budget."""
    values: dict[str, Any] = {
        "quota": 64 << 20,
        "chunk_size": CHUNK,
        "transfer_bytes": 8 * CHUNK,
        "request_deadline": 30.0,
        **changes,
    }
    return Settings(cache_dir=cache_dir, socket=cache_dir / "s.sock", **values)


@asynccontextmanager
async def engine_box(
    cache_dir: Path,
    store: ScriptedStore,
    *,
    clock: Clock = SYSTEM_CLOCK,
    ops: FileOps | None = None,
    choose: Callable[[Origin], ScriptedStore] | None = None,
    **changes: Any,
) -> AsyncIterator[EngineBox]:
    """An open engine on ``cache_dir`` whose every bucket is ``store``; ``ops`` are the flash store's system calls.

    ``choose`` gives another store to some origins.
    """
    settings = box_settings(cache_dir, **changes)
    metrics = Metrics(COUNTERS)
    log = Log(cache_dir, clock)
    plans = Plans(clock, fifo=settings.eviction == "s3fifo")
    disk = Disk(
        lambda: FlashStore.open(settings, metrics=metrics, clock=clock, ops=ops, ranking=plans.following), clock, log
    )

    def opener(url: ObjectUrl, origin: Origin) -> ScriptedStore:
        return choose(origin) if choose is not None else store

    engine = Engine(settings, disk, opener, plans, metrics=metrics, clock=clock, log=log)
    await disk.open()
    writing = asyncio.create_task(log.run())
    try:
        yield EngineBox(engine, store, metrics, log, disk, clock)
    finally:
        await engine.close()
        log.close()
        await writing
