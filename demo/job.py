"""The training job as the demo sees it: a torchrun with fixed arguments, watched through what its ranks record."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cachefs.errors import NearflashError

from .plan import EPOCHS, RANKS, Plan
from .processes import Mark
from .record import Step, StepReader

REPOSITORY = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.05


class JobFailed(NearflashError):
    """The training job ended with an error, or stopped making progress. ``output`` is the end of what it printed."""

    output: str = ""


@dataclass(frozen=True)
class Run:
    """One run of the training: where it reads, checkpoints, caches and records. The same for every attempt of it."""

    name: str
    data: str
    """``s3://bucket`` with one folder per data set."""
    checkpoints: str
    cache_dir: Path
    records: Path
    plan: Plan

    def argv(self) -> list[str]:
        """The command line; ``--standalone`` gives every launch an id of its own and binds to loopback."""
        return [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
            *("--nproc-per-node", str(RANKS), "-m", "demo.train"),
            *("--data", self.data, "--checkpoints", self.checkpoints, "--records", str(self.records)),
            *("--length", str(self.plan.length), "--batch-size", str(self.plan.batch_size)),
            *("--crop", str(self.plan.crop), "--save-every", str(self.plan.save_every), "--epochs", str(EPOCHS)),
        ]


class Job:
    """A running attempt of a run. Owned by the caller, who waits with :meth:`finish` or ends it with :meth:`kill`."""

    def __init__(self, run: Run, environ: Mapping[str, str], *, log: Path) -> None:
        self.run = run
        self.mark = Mark("NEARFLASH_DEMO_JOB")
        self.started = time.time()
        self._log = log
        self._readers = [StepReader(run.records, rank) for rank in range(RANKS)]
        self._attempt = len(self._readers[0].attempts())
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as out:
            self._process = subprocess.Popen(
                run.argv(),
                cwd=REPOSITORY,
                env={**_own_environ(), **environ, **self.mark.environ(), "NEARFLASH_CACHE_DIR": str(run.cache_dir)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def steps(self, rank: int) -> list[Step]:
        """What this attempt's rank has recorded so far."""
        attempts = self._readers[rank].attempts()
        return attempts[self._attempt] if len(attempts) > self._attempt else []

    def finish(self, on_step: Callable[[Step], None], *, patience: float = 90.0) -> None:
        """Wait for the job to end by itself, reporting rank 0's newest step as it comes.

        Raises :class:`JobFailed` if it fails, and if no step comes for ``patience`` seconds.
        """
        self._watch(on_step, lambda: False, patience)
        if self._process.returncode:
            raise self._failed(f"ended with code {self._process.returncode}")

    def until(self, step: int, on_step: Callable[[Step], None], *, patience: float = 90.0) -> None:
        """Wait until every rank has recorded ``step`` (counted from 1). Raises :class:`JobFailed` as above."""

        def reached() -> bool:
            return all((steps := self.steps(rank)) and steps[-1].step >= step for rank in range(RANKS))

        self._watch(on_step, reached, patience)
        if self._process.poll() is not None:
            raise self._failed(f"ended before step {step}")

    def _watch(self, on_step: Callable[[Step], None], enough: Callable[[], bool], patience: float) -> None:
        last, moved = 0, time.monotonic()
        while self._process.poll() is None:
            steps = self.steps(0)
            if steps and steps[-1].step != last:
                last, moved = steps[-1].step, time.monotonic()
                on_step(steps[-1])
            if enough():
                return
            if time.monotonic() - moved > patience:
                raise self._failed(f"made no step for {patience:.0f} s")
            time.sleep(POLL_SECONDS)

    def _failed(self, what: str) -> JobFailed:
        failure = JobFailed(f"run {self.run.name!r} {what}", url=str(self._log))
        text = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        failure.output = "\n".join(text[-25:])
        return failure

    def left(self, *, deadline: float) -> int:
        """How many of the job's processes are still there; looks until there is none, at most ``deadline`` seconds."""
        end = time.monotonic() + deadline
        while (found := len(self.mark.processes())) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return found

    def kill(self) -> int:
        """SIGKILL torchrun, ranks, workers and the node daemon they started. Returns how many processes died.

        Idempotent. Raises :class:`cachefs.errors.DeadlineExceeded` if one survives.
        """
        killed = self.mark.kill()
        self._process.wait(20)
        return killed


def _own_environ() -> dict[str, str]:
    """This process's environment without what would point the job at other stores, caches or settings."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "NEARFLASH_"))}
