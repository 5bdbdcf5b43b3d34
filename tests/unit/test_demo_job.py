"""Watching, killing and starting again a job that stands in for torchrun: it records steps like the ranks do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.job import Job, JobFailed, Run
from demo.plan import RANKS, SMALL
from demo.record import Step

TRAIN = """
import os, sys, time
from contextlib import ExitStack
from demo.record import Recorder
folder, pause = sys.argv[1], float(sys.argv[3])
steps, code, ranks = map(int, (sys.argv[2], *sys.argv[4:]))
print("secret in the environment:", os.environ["AWS_SECRET_ACCESS_KEY"] in " ".join(sys.argv))
with ExitStack() as stack:
    recorders = [stack.enter_context(Recorder(folder, rank)) for rank in range(ranks)]
    for step in range(1, steps + 1):
        for recorder in recorders:
            recorder.step(step, 0, 1 / step, [[step]])
        time.sleep(pause)
print("the last words")
sys.exit(code)
"""


@dataclass(frozen=True)
class FakeRun(Run):
    """A run whose command records ``steps`` steps, ``pause`` seconds apart, and ends with ``code``."""

    steps: int = 3
    pause: float = 0.0
    code: int = 0

    def argv(self) -> list[str]:
        numbers = map(str, (self.steps, self.pause, self.code, RANKS))
        return [sys.executable, "-c", TRAIN, str(self.records), *numbers]


@contextmanager
def job(folder: Path, *, steps: int = 3, pause: float = 0.0, code: int = 0) -> Iterator[Job]:
    run = FakeRun("fake", "", "", folder / "cache", folder / "records", SMALL, steps, pause, code)
    found = Job(run, {"AWS_SECRET_ACCESS_KEY": "do-not-show"}, log=folder / "logs" / "fake.log")
    try:
        yield found
    finally:
        found.kill()


def quiet(step: Step) -> None:
    pass


def test_finish_reports_the_newest_step(tmp_path: Path) -> None:
    with job(tmp_path, steps=5, pause=0.1) as running:
        seen: list[int] = []
        running.finish(lambda s: seen.append(s.step), patience=30)
        assert seen == sorted(set(seen)) and seen[0] >= 1
        assert [[s.step for s in running.steps(rank)] for rank in range(RANKS)] == [[1, 2, 3, 4, 5]] * RANKS


def test_kill_and_start_again_gives_each_attempt_its_own_steps(tmp_path: Path) -> None:
    with job(tmp_path, steps=10_000, pause=0.02) as first:
        first.until(4, quiet, patience=30)
        assert first.kill() == 1
        assert first.steps(0)[-1].step >= 4
    with job(tmp_path, steps=2) as second:
        second.finish(quiet, patience=30)
        assert [s.step for s in second.steps(1)] == [1, 2]
    assert first.steps(0)[-1].step >= 4, "the first attempt's steps are still its own"
    assert first.kill() == 0


def test_a_failing_job_shows_its_last_output(tmp_path: Path) -> None:
    with job(tmp_path, code=3) as running:
        with pytest.raises(JobFailed, match="run 'fake' ended with code 3") as failure:
            running.finish(quiet, patience=30)
        assert "the last words" in failure.value.output
        assert "secret in the environment: False" in failure.value.output


def test_a_job_that_ends_too_early_is_a_failure(tmp_path: Path) -> None:
    with job(tmp_path, steps=2) as running, pytest.raises(JobFailed, match="ended before step 9"):
        running.until(9, quiet, patience=30)


def test_left_counts_what_is_still_there(tmp_path: Path) -> None:
    with job(tmp_path, steps=2, pause=60) as running:
        running.until(1, quiet, patience=30)
        assert running.left(deadline=0.0) == 1
        running.kill()
        assert running.left(deadline=10.0) == 0


def test_a_job_that_hangs_is_a_failure(tmp_path: Path) -> None:
    with job(tmp_path, steps=2, pause=60) as running, pytest.raises(JobFailed, match="made no step for 3 s"):
        running.finish(quiet, patience=3)


def test_the_command_is_the_same_every_time_and_holds_no_secret(tmp_path: Path) -> None:
    run = Run("a", "s3://text", "s3://checkpoints/a", tmp_path / "cache", tmp_path / "records", SMALL)
    assert run.argv() == run.argv()
    assert run.argv()[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    assert "demo.train" in run.argv()
