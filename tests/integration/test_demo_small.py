"""The main job, shrunken: every check of the demo holds, and nothing is left of it, however it ends."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from demo.plan import SMALL
from demo.processes import Mark
from demo.screen import Screen
from demo.story import tell

ROOT = Path(__file__).parents[2]


@pytest.mark.s3
@pytest.mark.chaos
@pytest.mark.timeout(400)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    screen = io.StringIO()
    checks = tell(tmp_path, SMALL, Screen(Console(file=screen, width=200)))
    assert [c.name for c in checks if not c.passed] == [], screen.getvalue()
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["passed"] and found["resumed_from_step"] < found["killed_after_step"] < SMALL.steps_per_epoch
    assert (tmp_path / "main-job.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "work").exists()
    assert "SIGKILL" in screen.getvalue()


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    mark = Mark("DEMO_TEST_MARK")
    demo = subprocess.Popen(
        [sys.executable, "-m", "demo", "--size", "small", "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **mark.environ()},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert demo.stdout is not None
        said = ""
        while "training on" not in said:
            line = demo.stdout.readline()
            assert line, said
            said += line
        wait_for_ranks(mark)
        demo.send_signal(number)
        said += demo.communicate(timeout=60)[0]
        assert demo.returncode == 130, said
        assert "nothing is left running" in said
        assert mark.processes() == []
        assert not (tmp_path / "work").exists()
    finally:
        mark.kill()
        demo.wait(20)


def wait_for_ranks(mark: Mark) -> None:
    """Until demo, server, torchrun and two ranks are there."""
    end = time.monotonic() + 60
    while len(mark.processes()) < 5:
        assert time.monotonic() < end, "the ranks did not start"
        time.sleep(0.1)
