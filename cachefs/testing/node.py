"""One node of a test: settings of its own, real daemons started by its clients, and a way to end them."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..client import Client, connect
from ..config import MIB, Origin, Settings
from ..daemon.lifecycle import STATE_NAME


@dataclass
class Node:
    """``settings`` start daemons in a folder that nobody else uses."""

    settings: Settings

    def client(self, **changes: Any) -> Client:
        return connect(self.settings.with_(**changes))

    @property
    def daemon_pid(self) -> int | None:
        """The process that serves the cache directory, or served it last; ``None`` if there was none."""
        try:
            return int(msgspec.json.decode((self.settings.cache_dir / STATE_NAME).read_bytes())["pid"])
        except FileNotFoundError:
            return None

    @property
    def daemon_runs(self) -> bool:
        pid = self.daemon_pid
        return pid is not None and _is_daemon(pid)

    def kill_daemon(self, number: int = signal.SIGKILL) -> bool:
        """Send a signal to the daemon; False if none runs."""
        pid = self.daemon_pid
        if pid is None or not _is_daemon(pid):
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False

    def environment(self) -> dict[str, str]:
        """Environment variables that give a child process these settings and this origin."""
        origin = self.settings.origin
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "NEARFLASH_"))}
        env.update(
            NEARFLASH_CACHE_DIR=str(self.settings.cache_dir),
            NEARFLASH_SOCKET=str(self.settings.socket),
            NEARFLASH_CHUNK_SIZE=str(self.settings.chunk_size),
            NEARFLASH_TRANSFER_BYTES=str(self.settings.transfer_bytes),
            NEARFLASH_IDLE_TIMEOUT=str(self.settings.idle_timeout),
            NEARFLASH_HEDGE_SHARE=str(self.settings.hedge_share),
        )
        for name, value in (
            ("NEARFLASH_QUOTA", self.settings.quota),
            ("AWS_ENDPOINT_URL", origin.endpoint),
            ("AWS_REGION", origin.region),
            ("AWS_ACCESS_KEY_ID", origin.access_key_id),
            ("AWS_SECRET_ACCESS_KEY", origin.secret_access_key),
        ):
            if value is not None:
                env[name] = str(value)
        return env


@contextmanager
def node(folder: Path, origin: Origin, **changes: Any) -> Iterator[Node]:
    """A node whose cache is ``folder/cache``; its daemon is killed at the end."""
    with tempfile.TemporaryDirectory(prefix="nf-") as runtime:  # short, unlike test folders: socket paths are limited
        values: dict[str, Any] = {
            "cache_dir": folder / "cache",
            "socket": Path(runtime) / "s.sock",
            "quota": 512 * MIB,
            "chunk_size": MIB,
            "transfer_bytes": 16 * MIB,
            "idle_timeout": 60.0,
            "request_deadline": 60.0,
            "hedge_share": 0.0,  # requests are counted, and a busy machine makes any of them late
            "origin": origin,
            **changes,
        }
        this = Node(Settings(**values))
        try:
            yield this
        finally:
            if this.kill_daemon():
                wait_until(lambda: not this.daemon_runs, 20)


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Return once ``condition`` holds; it concerns other processes, so it is asked again and again."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so after {seconds:.0f} s"
        time.sleep(0.01)


def _is_daemon(pid: int) -> bool:
    """Whether a live process (no zombie) of that number is a daemon, not one that got its number later."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[0] not in "ZX" and b"cachefs" in command and b"daemon" in command
