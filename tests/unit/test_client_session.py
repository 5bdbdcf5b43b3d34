"""A client's session: one per process, whoever asks first."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cachefs.client import Client
from cachefs.config import Settings
from cachefs.forklock import ForkLock
from cachefs.session import Session


class SlowClient(Client):
    """Makes no session before all threads want to, or a moment has passed."""

    def __init__(self, settings: Settings, threads: int) -> None:
        super().__init__(settings)
        self.made: list[Session] = []
        self._all_want_one = threading.Barrier(threads)

    def _new_session(self) -> Session:
        try:
            self._all_want_one.wait(0.2)
        except threading.BrokenBarrierError:
            pass  # the others wait for ours, as they should
        self.made.append(super()._new_session())
        return self.made[-1]


def test_threads_that_ask_first_get_one_session(tmp_path: Path) -> None:
    client = SlowClient(Settings(tmp_path, tmp_path / "s.sock", autostart=False), threads=4)
    threads = [threading.Thread(target=_call_daemon, args=(client,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(client.made) == 1
    client.close()


def _call_daemon(client: Client) -> None:
    with pytest.raises(ConnectionError):
        client.entries()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_lock_that_is_held_during_a_fork_is_free_in_the_child() -> None:
    guard = ForkLock()
    with guard.of_this_process():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if guard.of_this_process().acquire(timeout=5) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert guard.of_this_process().locked()
    assert not guard.of_this_process().locked()
