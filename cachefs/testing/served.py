"""A daemon in a thread of the test: the real control server and engine on a real socket, over a scripted store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..clock import SYSTEM_CLOCK, Clock
from ..config import Settings
from ..daemon.control import ControlServer
from ..daemon.place import ListeningSocket
from ..daemon.prefetch import Prefetcher
from ..flash.fileops import FileOps
from .enginebox import ORIGIN, EngineBox, box_settings, engine_box
from .scripted import ScriptedStore

T = TypeVar("T")


@dataclass
class Served:
    """A running server. ``settings`` are for a client of it; ``stopped`` is set when a client asked it to stop."""

    settings: Settings
    store: ScriptedStore
    loop: asyncio.AbstractEventLoop
    box: EngineBox
    control: ControlServer
    stopped: threading.Event = field(default_factory=threading.Event)

    def call(self, what: Callable[[], T]) -> T:
        """Run ``what`` in the server's loop and return its result."""

        async def go() -> T:
            return what()

        return asyncio.run_coroutine_threadsafe(go(), self.loop).result(30)

    def hold_reads(self) -> None:
        """Let ranged reads of the store wait until :meth:`let_reads`."""
        self.call(lambda: setattr(self.store, "gate", asyncio.Event()))

    def let_reads(self) -> None:
        gate = self.store.gate
        if gate is not None:
            self.call(gate.set)


@contextmanager
def served(
    folder: Path, store: ScriptedStore, *, clock: Clock = SYSTEM_CLOCK, ops: FileOps | None = None, **changes: Any
) -> Iterator[Served]:
    """Serve ``store`` as every bucket of ``s3://``, with a cache below ``folder``."""
    cache_dir = folder / "cache"
    cache_dir.mkdir(exist_ok=True)
    started: list[Served] = []
    ready = threading.Event()
    over: list[Callable[[], object]] = []

    async def serve() -> None:
        end = asyncio.Event()
        loop = asyncio.get_running_loop()
        over.append(lambda: loop.call_soon_threadsafe(end.set))
        async with engine_box(cache_dir, store, clock=clock, ops=ops, **changes) as box:
            prefetcher = Prefetcher(box.engine, box.metrics, box.log)
            stopped = threading.Event()
            control = ControlServer(
                box.engine,
                prefetcher,
                cache_dir=cache_dir,
                metrics=box.metrics,
                clock=box.clock,
                log=box.log,
                on_stop=stopped.set,
            )
            settings = box_settings(cache_dir, autostart=False, origin=ORIGIN, **changes)
            with ListeningSocket(settings.socket) as place:
                tasks = [asyncio.create_task(prefetcher.run()), asyncio.create_task(control.serve(place.sock))]
                started.append(Served(settings, store, loop, box, control, stopped))
                ready.set()
                await end.wait()
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await control.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30), "the server did not start"
        yield started[0]
    finally:
        for stop in over:
            stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"
