"""Ending marked processes: however detached, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from demo.processes import Interrupted, Mark, signals_as_exceptions

DETACH = """
import subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
"""


@contextmanager
def sleeper(code: str, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environ})
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def wait_for(mark: Mark, count: int) -> None:
    end = time.monotonic() + 20
    while len(mark.processes()) != count:
        assert time.monotonic() < end, f"{len(mark.processes())} marked processes, not {count}"
        time.sleep(0.02)


def test_kill_finds_a_detached_grandchild_whose_parent_is_gone() -> None:
    mark = Mark("NEARFLASH_TEST_MARK")
    with sleeper(DETACH, mark.environ()) as parent:
        parent.wait(20)
        wait_for(mark, 1)
        assert mark.kill() == 1
        assert mark.processes() == []
        assert mark.kill() == 0


def test_kill_leaves_processes_with_another_mark_alone() -> None:
    mine, other = Mark("NEARFLASH_TEST_MARK"), Mark("NEARFLASH_TEST_MARK")
    with sleeper("import time; time.sleep(60)", other.environ()) as stranger:
        wait_for(other, 1)
        assert mine.kill() == 0
        assert stranger.poll() is None


def test_sigterm_becomes_an_exception_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"), signals_as_exceptions():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
