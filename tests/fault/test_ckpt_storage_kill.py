"""SIGKILL of a process that saves without pause: what it was promised before is there afterwards."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckptstore.claims import claim_generation
from ckptstore.layout import StepRef
from ckptstore.storage import Storage, open_storage
from ckptstore.testing.saving import require_sound, save_step
from ckptstore.timeline import latest_ref, read_timeline

if TYPE_CHECKING:
    from cachefs.testing.seaweed import SeaweedServer

# The job: claim, resume, save; a line to the parent for each step that was acknowledged.
JOB = """
import sys
from ckptstore.claims import claim_generation
from ckptstore.storage import open_storage
from ckptstore.testing.saving import save_step
storage = open_storage(sys.argv[1])
claim = claim_generation(storage, sys.argv[2])
print("claim", claim.generation, claim.resume_step or 0, flush=True)
for step in range((claim.resume_step or 0) + 1, 100_000):
    save_step(storage, claim, step, nodes=2)
    print("step", step, claim.generation, flush=True)
"""
DEADLINE = 60.0


def run_and_kill(url: str, env: dict[str, str], attempt: str, rng: random.Random) -> StepRef | None:
    """Start the job, kill it at some moment after it has claimed, and return the last step it was promised."""
    process = subprocess.Popen(
        [sys.executable, "-c", JOB, url, attempt],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process, process.stdout, process.stderr:
        lines = [process.stdout.readline()]
        assert lines[0].startswith("claim"), process.stderr.read()
        for _ in range(rng.randrange(4)):
            lines.append(process.stdout.readline())
        until = time.monotonic() + rng.uniform(0, 0.1)
        while time.monotonic() < until:
            pass  # the moment of the kill, not a wait for something
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
        assert process.wait(DEADLINE) == -signal.SIGKILL
    whole = [line.split() for line in lines if line.endswith("\n")]
    return max((StepRef(int(w[1]), int(w[2])) for w in whole if w[0] == "step"), default=None)


def kill_again_and_again(url: str, env: dict[str, str], storage: Storage, times: int, seed: int) -> None:
    rng = random.Random(seed)
    promised: StepRef | None = None
    for number in range(times):
        promised = run_and_kill(url, env, f"attempt {number}", rng) or promised
        found = latest_ref(storage)
        if promised is not None:
            assert found is not None
            assert found.step >= promised.step
        if found is not None:
            require_sound(storage, found)
    survivor = claim_generation(storage, "survivor")
    assert survivor.generation == times + 1
    save_step(storage, survivor, 1_000_000)
    assert read_timeline(storage).live[0] == StepRef(1_000_000, times + 1)


@pytest.mark.chaos
def test_a_job_that_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    kill_again_and_again(str(root), {}, open_storage(root), times=4, seed=1)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_that_is_killed_thirty_times_loses_nothing(tmp_path: Path) -> None:
    root = tmp_path / "store"
    kill_again_and_again(str(root), {}, open_storage(root), times=30, seed=2)


@pytest.mark.chaos
@pytest.mark.s3
def test_a_job_on_s3_that_is_killed_again_and_again_loses_nothing(seaweed: SeaweedServer) -> None:
    bucket = seaweed.make_bucket("ckpt.kill")
    url = f"s3://{bucket}/few"
    with open_storage(url, seaweed.origin) as storage:
        kill_again_and_again(url, seaweed.env, storage, times=3, seed=3)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.s3
def test_a_job_on_s3_that_is_killed_thirty_times_loses_nothing(seaweed: SeaweedServer) -> None:
    bucket = seaweed.make_bucket("ckpt.kill")
    url = f"s3://{bucket}/many"
    with open_storage(url, seaweed.origin) as storage:
        kill_again_and_again(url, seaweed.env, storage, times=30, seed=4)
