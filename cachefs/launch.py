"""Starting the daemon from a client: detached, told apart from the job, its failure reported in one line.

The daemon gets no descriptor of ours but the writing end of a pipe, on which it reports once that it serves, that
another one does, or why it cannot. It forks before it reports, so it is nobody's child and leaves no zombie here.
Settings travel in environment variables; keys, accounts and endpoints do not: they are each client's own.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import site
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

import msgspec

from .clock import SYSTEM_CLOCK, Clock
from .cloudvars import belongs_to_a_client
from .config import Settings, environment
from .errors import ConfigError, DaemonUnavailable
from .limits import SCARCE
from .protocol import Failed

_OWN = frozenset({"origin", "autostart", "passthrough_bytes"})
"""Settings that concern the client alone."""
_CROWD_WAIT = 5.0
"""A client waits this long for another one that is starting the daemon before it tries by itself."""


class Started(msgspec.Struct, frozen=True):
    """What a starting daemon reports: process ``pid`` serves, for longer ``already`` or from now on; or ``failed``."""

    pid: int = 0
    already: bool = False
    failed: Failed | None = None


def start_daemon(
    settings: Settings, *, timeout: float, grace: float | None = None, clock: Clock = SYSTEM_CLOCK
) -> Started:
    """Start a detached daemon and wait until it serves, or finds that another one does.

    Raises the error that keeps it from starting, or :class:`DaemonUnavailable` after ``timeout`` seconds. A caller that
    is in a greater hurry than the daemon needs gives it ``grace`` seconds to go on starting, for the next call.
    """
    if not sys.executable:
        raise DaemonUnavailable("this program has no Python to start the daemon with", hint="start it: cachefs daemon")
    make_runtime_dir(settings.socket.parent)
    reader, writer = os.pipe()
    try:
        command = [sys.executable, "-P", "-m", "cachefs", "daemon", "--report-fd", str(writer)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(writer,),
            start_new_session=True,
            cwd=os.sep,
            env=daemon_environment(settings, environment()),
        )
        os.close(writer)
        writer = -1
        began = clock.monotonic()
        report = _read_report(reader, began + timeout, clock)
        left = max(1.0, began + (timeout if grace is None else grace) - clock.monotonic())
        if report is None and grace is not None and grace > timeout:
            threading.Thread(target=_reap, args=(process, left), daemon=True).start()
        else:
            _reap(process, left)
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    if report is None:
        what = f"the daemon did not start within {timeout:.1f} s"
        raise DaemonUnavailable(what, url=str(settings.cache_dir), hint="try: cachefs daemon --foreground")
    if report.failed is not None:
        raise report.failed.error()
    if not report.pid:
        what = "the daemon ended before it served"
        raise DaemonUnavailable(what, url=str(settings.cache_dir), hint="try: cachefs daemon --foreground")
    return report


def _reap(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Collect the process we started; it forks the daemon proper and ends at once, unless something holds it up."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def daemon_environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a daemon that shall have these settings, whatever files and folders it starts in.

    It serves clients with other credentials than those of ours, so that none of these are in it.
    """
    env = {k: v for k, v in environ.items() if k != "NEARFLASH_CONFIG" and not belongs_to_a_client(k)}
    for field in fields(settings):
        value = getattr(settings, field.name)
        name = f"NEARFLASH_{field.name.upper()}"
        if field.name in _OWN:
            env.pop(name, None)
        elif value is not None:
            env[name] = str(value)
    installed = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    path = python_path(Path(__file__).resolve().parent.parent, map(Path, installed), environ.get("PYTHONPATH"))
    if path:
        env["PYTHONPATH"] = path
    return env


def python_path(home: Path, installed: Iterable[Path], inherited: str | None) -> str | None:
    """The ``PYTHONPATH`` with which a fresh Python finds the package in ``home``.

    Where it looks anyway, in a place for installed packages, the variable stays as it is: what it names comes before
    the standard library, and an installed package may bear the name of one of its modules.
    """
    if home in {place.resolve() for place in installed}:
        return inherited
    return os.pathsep.join(p for p in (str(home), inherited) if p)


def make_runtime_dir(folder: Path) -> None:
    """Make the socket's folder (0700), or check that it is this user's: another could listen in it in our place."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        infos = (folder.lstat(), folder.stat())
    except OSError as e:
        raise ConfigError(f"cannot be used for the daemon's socket: {e.strerror}", url=str(folder), hint=_PLACE) from e
    ours = not hasattr(os, "geteuid") or all(info.st_uid in (os.geteuid(), 0) for info in infos)
    if not ours or (os.name == "posix" and infos[1].st_mode & 0o022):
        what = "the folder of the daemon's socket belongs to or can be changed by other users"
        raise ConfigError(what, url=str(folder), hint=_PLACE)


_PLACE = "set NEARFLASH_SOCKET to a path in a folder of your own, mode 0700"


@contextlib.contextmanager
def crowd_lock(settings: Settings, clock: Clock = SYSTEM_CLOCK, *, until: float = math.inf) -> Iterator[None]:
    """Only one client of a node starts the daemon; the others wait here, for a bounded time, and then find it.

    The wait ends at ``until`` (monotonic) at the latest, with the lock or without it.

    A courtesy that saves starts, not a guard: correctness rests on the daemon's own lock. The kernel drops the lock
    with its holder.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    make_runtime_dir(settings.socket.parent)
    with _open_lock(f"{settings.socket}.start") as file:
        deadline = min(clock.monotonic() + _CROWD_WAIT, until)
        while clock.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                clock.sleep(0.01)
            except OSError:
                break  # a file system without locks: everybody tries
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # likewise
                fcntl.flock(file, fcntl.LOCK_UN)  # a child forked meanwhile shares the open file and would keep it


def _open_lock(path: str) -> BinaryIO:
    try:
        return open(path, "ab")
    except OSError as e:
        if e.errno in SCARCE:
            raise
        raise ConfigError(f"cannot be used to start the daemon: {e.strerror}", url=path, hint=_PLACE) from e


def _read_report(reader: int, deadline: float, clock: Clock) -> Started | None:
    """What the daemon wrote until it closed the pipe (nothing readable: no pid); ``None`` if not by the deadline."""
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - clock.monotonic())):
                return None
            part = os.read(reader, 65536)
            if not part:
                break
            data += part
    try:
        return msgspec.json.decode(data, type=Started)
    except msgspec.DecodeError:
        return Started()


def write_report(fd: int, report: Started) -> None:
    """The daemon's side: report once and close the pipe. A client that is gone already does not matter."""
    with contextlib.suppress(BrokenPipeError):
        os.write(fd, msgspec.json.encode(report))
    os.close(fd)
