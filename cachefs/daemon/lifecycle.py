"""A daemon's life: be the only one, serve, end in bounded time when told to or when nobody needs it any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiofiles
import msgspec

from ..clock import SYSTEM_CLOCK, Clock
from ..config import Settings
from ..connection import Lost, connect_socket
from ..errors import CacheBusy, CacheError, NearflashError
from ..flash import FlashStore
from ..launch import Started, make_runtime_dir
from ..metrics import Metrics
from ..protocol import VERSIONS, Failed, Hello
from .control import ControlServer
from .counters import COUNTERS
from .disk import Disk
from .engine import Engine
from .idle import IdleWatch
from .log import MOST_LOG_BYTES, Log, private_opener
from .place import ListeningSocket, SocketLock
from .plans import Plans
from .prefetch import Prefetcher
from .stores import StoreOpener

STATE_NAME = "daemon.json"
STOP_SECONDS = 10.0
"""From the order to stop until the process ends, however slow the disk or the origin is."""
_OWN_BYTES = MOST_LOG_BYTES + 32 * 1024
"""What log, note and lock take of the quota, in whole blocks."""
_BUSY_SECONDS = 3.0
_TICK = 0.5
_TIDY_INTERVAL = 2.0
_RACE_PAUSE = 0.02

Ready = Callable[[Started], None]
"""Called once: when a daemon serves (this or another one), or with what keeps this one from it."""


def run(settings: Settings, ready: Ready, *, echo: bool = False, clock: Clock = SYSTEM_CLOCK) -> None:
    """Serve until SIGTERM, SIGINT, a client's stop, or ``settings.idle_timeout`` without clients.

    One daemon serves a socket: if another one does, or is about to, this one tells ``ready`` so and returns. Raises
    what keeps it from serving, after telling ``ready``.
    """
    try:
        make_runtime_dir(settings.socket.parent)
        lock = _take_or_find(settings, clock)
    except NearflashError as e:
        ready(Started(failed=Failed.of(e)))
        raise
    if isinstance(lock, int):
        ready(Started(pid=lock, already=True))
        return
    try:
        _raise_descriptor_limit()
        asyncio.run(_serve(settings, ready, echo, clock))
    finally:
        lock.close()


def _take_or_find(settings: Settings, clock: Clock) -> SocketLock | int:
    """The lock, or the pid of the daemon that holds it, once it answers. A holder that is ending is waited for."""
    deadline = clock.monotonic() + settings.connect_timeout
    while True:
        lock = SocketLock.take(settings.socket)
        if lock is not None:
            return lock
        if pid := _serving_pid(settings):
            return pid
        if clock.monotonic() >= deadline:
            what = f"another daemon holds the socket and has not answered for {settings.connect_timeout:.0f} s"
            raise CacheBusy(what, url=str(settings.socket), hint="end that process")
        clock.sleep(_RACE_PAUSE)


def _serving_pid(settings: Settings) -> int | None:
    hello = Hello(VERSIONS, f"probe-{os.getpid()}", os.getpid(), settings.origin)
    try:
        connection, welcome = connect_socket(settings.socket, hello, timeout=1.0)
    except (Lost, CacheError):
        return None
    connection.close()
    return welcome.pid


async def _serve(settings: Settings, ready: Ready, echo: bool, clock: Clock) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    log = Log(settings.cache_dir, clock, echo=echo)
    metrics = Metrics(COUNTERS)
    plans = Plans(clock, fifo=settings.eviction == "s3fifo")
    disk = Disk(
        lambda: FlashStore.open(settings, metrics=metrics, clock=clock, reserved=_OWN_BYTES, ranking=plans.following),
        clock,
        log,
    )
    opener = StoreOpener(settings, metrics=metrics, clock=clock)
    engine = Engine(settings, disk, opener, plans, metrics=metrics, clock=clock, log=log)
    prefetcher = Prefetcher(engine, metrics, log)
    control = ControlServer(
        engine, prefetcher, cache_dir=settings.cache_dir, metrics=metrics, clock=clock, log=log, on_stop=stop.set
    )
    try:
        await _open_disk(disk, clock)
        place = ListeningSocket(settings.socket)
    except NearflashError as e:
        ready(Started(failed=Failed.of(e)))
        await engine.close()
        raise
    writing = asyncio.create_task(log.run())
    working = [
        asyncio.create_task(_essential("prefetch", prefetcher.run(), log, stop)),
        asyncio.create_task(_essential("listen", _listen(place, settings.socket, control, clock), log, stop)),
    ]
    await _write_state(settings, log)
    log.record("started", pid=os.getpid(), socket=str(settings.socket))
    ready(Started(pid=os.getpid()))
    try:
        log.record("stopping", reason=await _until_over(stop, settings, engine, prefetcher, control, clock))
    finally:
        end = threading.Timer(STOP_SECONDS, os._exit, (1,))
        end.daemon = True
        end.start()
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await control.close()
        await engine.close()
        log.record("stopped")
        log.close()
        await writing
        end.cancel()


async def _essential(name: str, work: Coroutine[Any, Any, None], log: Log, stop: asyncio.Event) -> None:
    """Work that the daemon cannot do without: if it fails, the daemon stops in order, and a client starts another."""
    try:
        await work
    except Exception as e:  # noqa: BLE001 - whatever it is, leases and files are given back before the end
        log.record("defect", where=name, error=f"{type(e).__name__}: {e}")
        stop.set()


async def _listen(place: ListeningSocket, path: Path, control: ControlServer, clock: Clock) -> None:
    """Serve the socket until cancelled; put up a new one if the path is taken away (cleaners of temporary folders)."""
    while True:
        with place:
            serving = asyncio.create_task(control.serve(place.sock))
            try:
                while place.in_place:
                    await clock.asleep(_TICK)
            finally:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
        make_runtime_dir(path.parent)
        place = ListeningSocket(path)


async def _until_over(
    stop: asyncio.Event,
    settings: Settings,
    engine: Engine,
    prefetcher: Prefetcher,
    control: ControlServer,
    clock: Clock,
) -> str:
    """Return why to stop: told to, or idle. Does the housekeeping meanwhile."""
    watch = IdleWatch(settings.idle_timeout, clock.monotonic())
    tidied = clock.monotonic()
    while True:
        try:
            await asyncio.wait_for(stop.wait(), _TICK)
            return "told to"
        except TimeoutError:
            now = clock.monotonic()
        if watch.expired(busy=len(control.sessions) > 0 or engine.busy or prefetcher.busy, now=now):
            return f"no client for {settings.idle_timeout:g} s"
        if now - tidied >= _TIDY_INTERVAL:
            tidied = now
            await engine.tidy()


async def _write_state(settings: Settings, log: Log) -> None:
    """Leave a note of who serves the directory, for people and tools; nothing depends on it."""
    state = {"pid": os.getpid(), "socket": str(settings.socket), "protocol": list(VERSIONS)}
    target = settings.cache_dir / STATE_NAME
    fresh = target.with_suffix(".new")
    try:
        async with aiofiles.open(fresh, "wb", opener=private_opener) as file:
            await file.write(msgspec.json.encode(state))
        await asyncio.to_thread(os.replace, fresh, target)
    except OSError as e:
        log.record("state_not_written", error=str(e))


def _raise_descriptor_limit() -> None:
    """Every client holds a few descriptors of ours, every opening passes two: use all that the system allows."""
    try:
        import resource
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # unlimited hard limits that the kernel does not take
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _open_disk(disk: Disk, clock: Clock) -> None:
    """Open the store. A daemon that was killed a moment ago may be about to lose its lock: that is waited for."""
    deadline = clock.monotonic() + _BUSY_SECONDS
    while True:
        try:
            await disk.open()
            return
        except CacheBusy:
            if clock.monotonic() >= deadline:
                raise
            await clock.asleep(_RACE_PAUSE)
