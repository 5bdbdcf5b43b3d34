"""The daemon's socket takes nobody's file; an interrupted warm-up ends at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cachefs.daemon.place import ListeningSocket
from cachefs.errors import ConfigError


def test_a_file_in_the_way_of_the_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(ConfigError, match=r"notes\.txt: is in the way of the daemon's socket .* NEARFLASH_SOCKET"):
        ListeningSocket(path)
    assert path.read_text() == "precious" and [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_a_socket_that_a_former_daemon_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    left = ListeningSocket(path)
    left.sock.close()  # as a killed daemon does: the path stays
    with ListeningSocket(path) as fresh:
        assert fresh.in_place
    assert not path.exists()


INTERRUPTED = """
import signal, threading
from cachefs.shard import ObjectStat
from cachefs.warm import warm

class Stuck:
    def stats(self):
        return {}

    def open(self, url, *, version, size):
        threading.Event().wait()

signal.signal(signal.SIGINT, signal.default_int_handler)
main = threading.main_thread().ident
threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
warm(Stuck(), [ObjectStat(f"s3://b/{n}", 1, "v", 0) for n in range(20)], lambda n: None)
"""


def test_an_interrupt_ends_a_warm_up_whatever_it_waits_for() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=30)
    assert done.returncode != 0 and "KeyboardInterrupt" in done.stderr
