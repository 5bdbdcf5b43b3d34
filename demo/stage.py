"""What the story plays on: an S3 server, the proxy that counts, and the jobs it started, all ended on leaving."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from cachefs.config import Origin
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

from .job import Job, Run
from .plan import Plan
from .screen import Advance, Screen
from .traffic import Get, committed, gets_of

DATA, CHECKPOINTS = "text", "checkpoints"
"""The buckets."""

LOOPBACK = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
"""Nothing goes through an HTTP proxy that the environment may name: all servers are on this machine."""

JOB_SETTINGS = {
    **LOOPBACK,
    "NEARFLASH_CHUNK_SIZE": "128KiB",  # the shards are small, so the chunks are too
    "NEARFLASH_HEDGE_SHARE": "0",  # what left the origin is counted, and a busy machine makes any read late
    "NEARFLASH_IDLE_TIMEOUT": "120",  # a daemon that the demo could not stop ends by itself
    "OMP_NUM_THREADS": "1",  # sums in one order
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
}


@dataclass
class Stage:
    """Everything that runs. Made by :func:`open_stage`, which ends it all."""

    plan: Plan
    work: Path
    screen: Screen
    server: SeaweedServer
    proxy: CountingProxy
    jobs: list[Job] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each part of the story took, by title."""

    @property
    def origin(self) -> Origin:
        """The store as the jobs reach it: through the counting proxy."""
        return replace(self.server.origin, endpoint=self.proxy.endpoint)

    @contextlib.contextmanager
    def part(self, title: str, total: int | None = None) -> Iterator[Advance]:
        """A part of the story on the screen, timed."""
        start = time.monotonic()
        with self.screen.stage(title, total) as advance:
            yield advance
        self.seconds[title] = time.monotonic() - start

    def run(self, name: str) -> Run:
        """A run with a cache, a checkpoint prefix and records of its own."""
        own = self.work / name
        return Run(name, f"s3://{DATA}", f"s3://{CHECKPOINTS}/{name}", own / "cache", own / "records", self.plan)

    def launch(self, run: Run) -> Job:
        """Start the run, or start it again: the command line and the settings are the same every time."""
        environ = {**self.server.env, "AWS_ENDPOINT_URL": self.proxy.endpoint, **JOB_SETTINGS}
        job = Job(run, environ, log=self.work.parent / "logs" / f"{len(self.jobs) + 1}-{run.name}.log")
        self.jobs.append(job)
        return job

    def gets(self, since: float) -> list[Get]:
        """All GETs of data objects from ``since`` on."""
        return [g for g in gets_of(self.proxy.requests, DATA) if g.time >= since]

    def committed(self, run: Run) -> int:
        """The newest step that the run has committed; 0 for none."""
        return committed(self.proxy.requests, CHECKPOINTS, f"{run.name}/")

    def stop(self) -> None:
        """Kill every job's processes. Idempotent."""
        for job in self.jobs:
            job.kill()


@contextlib.contextmanager
def open_stage(out: Path, plan: Plan, screen: Screen) -> Iterator[Stage]:
    """A server with empty buckets in ``out/work``, which is emptied first and removed at the end."""
    work = out / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    start = time.monotonic()
    title = "starting SeaweedFS"
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, work, ignore_errors=True)
        with screen.stage(title):
            server = stack.enter_context(SeaweedServer(work / "s3"))
            proxy = stack.enter_context(CountingProxy(server.endpoint))
            for bucket in (DATA, CHECKPOINTS):
                server.make_bucket(bucket)
        stage = Stage(plan, work, screen, server, proxy, seconds={title: time.monotonic() - start})
        stack.callback(stage.stop)
        yield stage
