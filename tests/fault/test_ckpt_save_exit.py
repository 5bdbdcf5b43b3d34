"""How a program that saves ends: a failure is never silent, and a save that was begun is finished."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckptstore import CheckpointStore


def run(script: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )


# The second save cannot be written: its folder's name is taken by a file.
FAILING = """
import sys, pathlib, torch
from ckptstore import CheckpointStore
root = pathlib.Path(sys.argv[1])
store = CheckpointStore(root)
store.save(1, {"x": torch.ones(4)})
token = next(root.glob("step-*/*.safetensors")).name.rpartition("-r")[0]
(root / f".tmp-step-000000000002-g000001-{token}").write_text("in the way")
store.save_async(2, {"x": torch.ones(4)})
if sys.argv[2] == "close":
    store.close()
print("end")
"""


@pytest.mark.parametrize("how", ["close", "nothing"])
def test_a_failure_of_the_last_save_is_not_silent(how: str, tmp_path: Path) -> None:
    done = run(FAILING, str(tmp_path), how)
    assert "the save of step 2 failed" in done.stderr
    if how == "nothing":
        assert done.returncode == 0 and "end" in done.stdout
    else:
        assert done.returncode == 1 and "end" not in done.stdout
        assert done.stderr.count("Traceback") >= 1 and ".tmp-step-000000000002" in done.stderr.splitlines()[-1]
    with CheckpointStore(tmp_path) as store:
        assert store.latest() == 1 and store.verify(1) == []


def test_a_program_that_ends_without_waiting_finishes_its_save(tmp_path: Path) -> None:
    script = """
import sys, torch
from ckptstore import CheckpointStore
CheckpointStore(sys.argv[1]).save_async(1, {"x": torch.ones(1 << 20)})
"""
    done = run(script, str(tmp_path))
    assert done.returncode == 0 and done.stderr == ""
    with CheckpointStore(tmp_path) as store:
        assert store.latest() == 1 and store.verify() == []


def test_an_interrupt_while_waiting_ends_the_program_and_leaves_the_save_whole(tmp_path: Path) -> None:
    script = """
import _thread, signal, sys, threading, torch
from ckptstore import CheckpointStore
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born with it ignored
with CheckpointStore(sys.argv[1]) as store:
    store.save(1, {"x": torch.ones(1 << 18)})
    threading.Timer(0.01, _thread.interrupt_main).start()
    for step in range(2, 10_000):
        store.save(step, {"x": torch.ones(1 << 18)})
"""
    done = run(script, str(tmp_path))
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
    with CheckpointStore(tmp_path) as store:
        assert store.verify(1) == []
