"""``kill -9`` at random moments of ``save_async``: what is left always verifies, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Imports once, then forks for every round: a job that resumes and saves without pause until it is killed, and a
# reader that proves that the newest step is whole, is what was saved, and is not older than the last promise.
PROGRAM = """
import os, random, signal, sys, time, traceback
import torch
from ckptstore import CheckpointStore, SaveOptions

torch.set_num_threads(1)
url, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)

def state(step):
    return {"w": torch.full((300, 1000), float(step)), "b": torch.full((5,), step), "step": step}

def job(pipe):
    store = CheckpointStore(url, save_options=SaveOptions(segment_bytes=1 << 19, chunk_bytes=1 << 18))
    found = store.resume_or_init(state(0))
    step = found["step"] if found else 0
    os.write(pipe, b"begin\\n")
    while True:
        step += 1
        now = state(step)
        saving = store.save_async(step, now)
        now["w"].fill_(-1)  # training goes on in the same memory
        now["b"].fill_(-1)
        saving.result()
        os.write(pipe, f"{step}\\n".encode())

def check(acknowledged):
    with CheckpointStore(url) as store:
        latest = store.latest()
        assert (latest or 0) >= acknowledged, (latest, acknowledged)
        if latest is not None:
            assert store.verify(latest) == []
            found = store.load(step=latest)
            assert all(torch.equal(found[k], v) for k, v in state(latest).items() if k != "step")
            assert found["step"] == latest

def forked(work, *args):
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.alarm(90)
        work(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)

def pace(pipe):
    with CheckpointStore(url + "-paced") as store:
        store.save(1, state(1))
        began = time.monotonic()
        for step in range(2, 4):
            store.save(step, state(step))
        os.write(pipe, str((time.monotonic() - began) / 2).encode())

# This process opens no store itself: clients of object stores do not survive a fork at their best.
source, sink = os.pipe()
assert os.waitpid(forked(pace, sink), 0)[1] == 0
typical = float(os.read(source, 100))
acknowledged, lucky = 0, 0
for number in range(rounds):
    source, sink = os.pipe()
    pid = forked(job, sink)
    os.close(sink)
    assert os.read(source, 6) == b"begin\\n"
    until = time.monotonic() + rng.uniform(0.5 * typical, 6 * typical)
    while time.monotonic() < until:
        time.sleep(0.001)  # the moment of the kill, not a wait for something
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(source) as told:
        steps = [int(line) for line in told.read().split()]
    lucky += bool(steps)
    acknowledged = max([acknowledged, *steps])
    code = os.waitpid(forked(check, acknowledged), 0)[1]
    assert code == 0, (number, code)
    print("round", number, "acknowledged", acknowledged, flush=True)
assert lucky >= rounds // 3, f"only {lucky} of {rounds} rounds lived to an acknowledgement: nothing was tested"
"""


def kill_rounds(url: str, rounds: int, seed: int, env: dict[str, str]) -> None:
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "NEARFLASH_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, url, str(rounds), str(seed)],
        env={**plain, **env, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 + 20 * rounds,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("round ") == rounds


def s3_env(seaweed: Any) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": seaweed.endpoint,
        "AWS_ACCESS_KEY_ID": seaweed.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
        "AWS_REGION": "us-east-1",
    }


@pytest.mark.chaos
def test_kills_on_a_file_system(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "run"), 4, 1, {})


@pytest.mark.chaos
@pytest.mark.s3
def test_kills_on_s3(seaweed: Any, s3_bucket: str) -> None:
    kill_rounds(f"s3://{s3_bucket}/run", 3, 2, s3_env(seaweed))


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.timeout(700)
def test_thirty_kills_on_a_file_system(tmp_path: Path) -> None:
    kill_rounds(str(tmp_path / "run"), 30, 3, {})


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.s3
@pytest.mark.timeout(700)
def test_thirty_kills_on_s3(seaweed: Any, s3_bucket: str) -> None:
    kill_rounds(f"s3://{s3_bucket}/run", 30, 4, s3_env(seaweed))
