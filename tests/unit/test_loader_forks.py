"""What forked children may still see of an arena is not used again, and is when they are gone."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from loader.arena import Arena
from loader.arenaview import Views
from loader.forks import FORKS

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="arenas are Linux's")
SIZE = 1 << 20


@pytest.fixture(autouse=True)
def nothing_before() -> None:
    gc.collect()
    FORKS.settle()


def arrived(arena: Arena, views: Views) -> torch.Tensor:
    tensor = arena.take(1000)
    assert tensor is not None
    arena._map.adopt()  # its file need not be sent along
    sent = arena.send(tensor.untyped_storage())
    assert sent is not None
    return torch.empty(0, dtype=torch.uint8).set_(views.storage(sent._replace(handle=None)))


@contextmanager
def child(*, also_forks: bool = False) -> Iterator[int]:
    """A forked process that lives as long as the context; with ``also_forks`` what it forks lives instead of it."""
    done, come = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            os.close(done[1])
            if also_forks and os.fork() != 0:
                os._exit(0)
            os.write(come[1], b"x")
            os.read(done[0], 1)
        finally:
            os._exit(0)
    os.close(come[1])
    os.read(come[0], 1)
    try:
        if also_forks:
            os.waitpid(pid, 0)
        yield pid
    finally:
        os.close(done[1])
        os.read(come[0], 1)  # until the last of them has ended
        for fd in (done[0], come[0]):
            os.close(fd)
        if not also_forks:
            os.waitpid(pid, 0)


def is_empty(arena: Arena) -> bool:
    gc.collect()
    return arena.take(SIZE) is not None


def test_an_arena_is_empty_again_after_a_hundred_forks() -> None:
    arena, views = Arena(SIZE), Views()
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        held, there = arena.take(100), arrived(arena, views)
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            os._exit(0)
        os.waitpid(pid, 0)
        del held, there
    FORKS.settle()
    assert len(FORKS) == 0 and not FORKS.live
    assert is_empty(arena)
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("also_forks", [False, True])
def test_it_is_kept_as_long_as_a_child_or_its_child_lives(also_forks: bool) -> None:
    arena, views = Arena(SIZE), Views()
    for sent in (False, True):
        tensor = arrived(arena, views) if sent else arena.take(1000)
        with child(also_forks=also_forks):
            del tensor
            assert not is_empty(arena)
            with child():  # sees nothing of it any more
                pass
            assert not is_empty(arena) and len(FORKS) == 1
        assert is_empty(arena) and len(FORKS) == 0


def test_it_is_kept_here_when_the_child_is_gone_before() -> None:
    arena, views = Arena(SIZE), Views()
    tensor = arrived(arena, views)
    for _ in range(3):
        with child():
            pass
    assert not is_empty(arena) and len(FORKS) == 0
    del tensor
    assert is_empty(arena)


def test_two_children_of_different_ages() -> None:
    arena, views = Arena(SIZE), Views()
    first = arrived(arena, views)
    with child():
        second = arrived(arena, views)
        with child():
            del first
            assert not is_empty(arena)
        assert not is_empty(arena)
        del second
    assert is_empty(arena)


def test_a_child_that_is_killed() -> None:
    arena, views = Arena(SIZE), Views()
    tensor = arrived(arena, views)
    with child() as pid:
        os.kill(pid, signal.SIGKILL)
        del tensor
    assert is_empty(arena)


def test_a_child_gives_nothing_back() -> None:
    arena, views = Arena(SIZE), Views()
    tensor = arrived(arena, views)
    pid = os.fork()
    if pid == 0:  # pragma: no cover
        try:
            del tensor
            gc.collect()
        finally:
            os._exit(0 if len(FORKS) == 0 and not FORKS.live else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not is_empty(arena)
    assert tensor.shape == (1000,)


def test_where_no_pipe_is_to_be_had_it_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> tuple[int, int]:
        raise OSError("too many open files")

    arena, views = Arena(SIZE), Views()
    tensor = arrived(arena, views)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", refused)
        pid = os.fork()
        if pid == 0:  # pragma: no cover
            os._exit(0)
    os.waitpid(pid, 0)
    del tensor
    assert not is_empty(arena)
    for use in FORKS.live:  # for the tests that follow
        use.forget()
    FORKS.live.clear()


def test_threads_that_fork_and_drop_side_by_side() -> None:
    arena, views = Arena(SIZE), Views()

    def run() -> None:
        for _ in range(15):
            tensor = arena.take(1000)
            pid = os.fork()
            if pid == 0:  # pragma: no cover
                os._exit(0)
            del tensor
            os.waitpid(pid, 0)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        arrived(arena, views)
    for thread in threads:
        thread.join(60)
    FORKS.settle()
    assert len(FORKS) == 0 and is_empty(arena)
