"""Processes of stages, with fakes in their place: who gets one, what errors say, and deadlines."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cachefs.errors import ConfigError, DeadlineExceeded, NearflashError
from loader.stages_channel import Channel, Closed
from loader.stages_pool import ProcessPool
from loader.stages_process import GRACE, START, Line, NotStarted, Unreadable, Unsendable, _ended
from loader.stages_worker import READY, Failure, outlive, serve, use_one_thread

SOON = 60.0


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    pause = threading.Event()
    for _ in range(int(SOON / 0.002)):
        if holds():
            return
        pause.wait(0.002)
    raise AssertionError("it never came")


class FakeProcess:
    """One whose answers, and ends, a test decides."""

    pid: int | None = 77
    fate = "was killed by SIGKILL"

    def __init__(self, answer: Callable[[list[Any]], Any], *, began: bool = True) -> None:
        self._answer = answer
        self.began = began
        self.hung_up = False
        self.cut = threading.Event()
        self.ends: list[float] = []

    def ask(self, samples: list[Any], timeout: float) -> Any:
        return self._answer(samples)

    def hang_up(self) -> None:
        self.hung_up = True
        self.cut.set()

    def end(self, grace: float = GRACE) -> None:
        self.ends.append(grace)


def pool_of(*processes: FakeProcess, most: int = 1, timeout: float = 0.25) -> ProcessPool:
    left = list(processes)
    return ProcessPool(
        len, batched=True, processes=most, what="in stage 1", timeout=timeout, start=lambda *_: left.pop(0)
    )


def raising(error: BaseException, *, began: bool = True) -> FakeProcess:
    def answer(samples: list[Any]) -> Any:
        raise error

    return FakeProcess(answer, began=began)


class TestTurns:
    def test_in_the_order_in_which_they_asked(self) -> None:
        """Whoever comes back at once does not overtake those that wait."""
        order: list[str] = []
        go = threading.Event()

        def answer(samples: list[Any]) -> Any:
            order.append(samples[0])
            if samples[0] == "a0":
                assert go.wait(SOON)
            return samples

        pool = pool_of(FakeProcess(answer))

        def first() -> None:
            for k in range(20):
                pool.call([f"a{k}"])

        threads = [threading.Thread(target=first)]
        threads[0].start()
        until(lambda: order == ["a0"])
        for k, name in enumerate("bcd", 1):
            threads.append(threading.Thread(target=pool.call, args=([name],)))
            threads[-1].start()
            until(lambda k=k: pool.waiting == k)  # type: ignore[misc]
        go.set()
        for thread in threads:
            thread.join(SOON)
        assert order == ["a0", "b", "c", "d", *(f"a{k}" for k in range(1, 20))]
        assert pool.waiting == 0

    def test_no_more_than_there_may_be(self) -> None:
        everybody = threading.Barrier(2, timeout=SOON)

        def answer(samples: list[Any]) -> Any:
            everybody.wait()
            return samples

        pool = pool_of(FakeProcess(answer), FakeProcess(answer), most=2)
        threads = [threading.Thread(target=pool.call, args=([k],)) for k in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert not any(thread.is_alive() for thread in threads)

    @pytest.mark.parametrize("how", ["close", "interrupt"])
    def test_those_that_wait_and_those_at_work_are_told_that_it_was_closed(self, how: str) -> None:
        begun = threading.Event()

        def cut(samples: list[Any]) -> Any:
            begun.set()
            assert process.cut.wait(SOON)
            raise Closed("gone")

        process = FakeProcess(cut)
        pool = pool_of(process, FakeProcess(list))
        errors: list[BaseException] = []

        def call() -> None:
            try:
                pool.call([1])
            except NearflashError as e:
                errors.append(e)

        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert begun.wait(SOON)
        until(lambda: pool.waiting == 2)
        getattr(pool, how)()
        for thread in threads:
            thread.join(SOON)
        assert ["the loader was closed" in str(error) for error in errors] == [True] * 3
        with pytest.raises(NearflashError, match="closed"):
            pool.call([1])  # by a thread that comes late
        pool.open()
        assert pool.call([1, 2]) == [1, 2]

    def test_an_interruption_keeps_those_without_work(self) -> None:
        process = FakeProcess(list)
        pool = pool_of(process)
        assert pool.call([1]) == [1]
        pool.interrupt()
        pool.open()
        assert pool.call([2]) == [2] and not process.hung_up and not process.ends


class TestWhatErrorsSay:
    @pytest.mark.parametrize(
        ("process", "kind", "text"),
        [
            (raising(Closed("x")), NearflashError, "process 77 was killed by SIGKILL in stage 1$"),
            (raising(Closed("x"), began=False), NearflashError, "(?s)was killed.*__main__"),
            (raising(TimeoutError()), DeadlineExceeded, r"more than 0\.25 s in stage 1"),
            (raising(NotStarted(), began=False), DeadlineExceeded, "not begun after 120 s in stage 1"),
            (raising(Unsendable("a lock")), ConfigError, "samples cannot be sent .*: a lock"),
            (raising(Unreadable("a lock")), ConfigError, "what the function made cannot be unpickled.*: a lock"),
        ],
    )
    def test_each(self, process: FakeProcess, kind: type[BaseException], text: str) -> None:
        with pytest.raises(kind, match=text) as caught:
            pool_of(process).call([1])
        assert caught.value.__cause__ is not None
        assert len(process.ends) == 1

    def test_others_are_raised_as_they_are(self) -> None:
        error = MemoryError("no room")
        with pytest.raises(MemoryError) as caught:
            pool_of(raising(error)).call([1])
        assert caught.value is error and error.__cause__ is None


class Clock:
    """One that goes on by a step with each look."""

    def __init__(self, step: float = 0.0) -> None:
        self.now = 0.0
        self.step = step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now

    def time(self) -> float:
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        raise NotImplementedError

    async def asleep(self, seconds: float) -> None:
        raise NotImplementedError


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


Ends = tuple[socket.socket, socket.socket]


class Bad:
    """What cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> Any:
    raise ValueError("not here")


def bad_if_asked(samples: list[Any]) -> list[Any]:
    return [Bad() if sample == "bad" else sample for sample in samples]


class TestLine:
    @pytest.fixture
    def line(self, ends: Ends) -> Iterator[tuple[Line, Channel]]:
        here = Channel(ends[0])
        options = {"batched": True}
        thread = threading.Thread(target=serve, args=(Channel(ends[1]), bad_if_asked), kwargs=options)
        thread.start()
        yield Line(here), here
        here.close()
        thread.join(SOON)
        assert not thread.is_alive()

    def test_what_cannot_be_unpickled_is_answered(self, line: tuple[Line, Channel]) -> None:
        asked, _ = line
        answer = asked.ask([Bad()], SOON)
        assert isinstance(answer, Failure) and answer.at is None and "not here" in str(answer.error)
        assert any("cannot be unpickled" in note for note in answer.error.__notes__)
        assert asked.began and asked.ask([1], SOON) == [1]

    def test_an_answer_that_cannot_be_unpickled(self, line: tuple[Line, Channel]) -> None:
        asked, _ = line
        with pytest.raises(Unreadable, match="not here"):
            asked.ask(["bad"], SOON)
        assert asked.ask([1], SOON) == [1]

    def test_samples_that_cannot_be_pickled(self, line: tuple[Line, Channel]) -> None:
        asked, _ = line
        with pytest.raises(Unsendable):
            asked.ask([threading.Lock()], SOON)
        assert asked.ask([1], SOON) == [1]

    def test_closed_by_another_thread(self, line: tuple[Line, Channel]) -> None:
        asked, channel = line
        assert asked.ask([1], SOON) == [1]
        channel.close()
        with pytest.raises(Closed):
            asked.ask([1], SOON)

    def test_the_start_has_a_deadline_of_its_own(self, ends: Ends) -> None:
        """A question's time runs from the beginning of the process."""
        clock = Clock()
        here, there = Channel(ends[0], clock), Channel(ends[1])
        asked: list[Any] = []

        def begin_late() -> None:
            clock.now += START / 2
            there.send(READY)
            asked.append(there.receive(SOON))
            there.send("answer")

        thread = threading.Thread(target=begin_late)
        thread.start()
        assert Line(here, START).ask(["question"], SOON / 2) == "answer"
        thread.join(SOON)
        assert asked == [["question"]]

    def test_one_that_never_begins(self, ends: Ends) -> None:
        line = Line(Channel(ends[0]), start=0.01)
        with pytest.raises(NotStarted):
            line.ask([1], SOON)
        assert not line.began


def test_a_timeout_is_for_a_whole_message(ends: Ends) -> None:
    """Not for each of its parts."""
    here, there = Channel(ends[0], Clock(step=1.0)), Channel(ends[1], Clock(step=1.0))
    value = [torch.ones(3) for _ in range(30)]
    with pytest.raises(TimeoutError):
        here.send(value, 20.0)
    one, other = map(Channel, socket.socketpair())
    other = Channel(other._end, Clock(step=1.0))
    one.send(value)
    with pytest.raises(TimeoutError):
        other.receive(20.0)
    for channel in (here, there, one, other):
        channel.close()


def test_a_process_that_cannot_be_ended_is_left() -> None:
    class Stuck:
        exitcode = None
        killed = False

        def __init__(self) -> None:
            self.joined: list[float | None] = []

        def join(self, timeout: float | None = None) -> None:
            assert timeout is not None, "waits for ever"
            self.joined.append(timeout)

        def kill(self) -> None:
            self.killed = True

    stuck = Stuck()
    assert _ended(stuck, 1.5) == "was killed and is still there"
    assert stuck.killed and stuck.joined[0] == 1.5 and len(stuck.joined) == 2


def test_a_process_ends_once_its_parent_is_gone() -> None:
    parents, pauses, left = iter([5, 5, 5, 1]), [], []  # type: ignore[var-annotated]
    outlive(5, parent_now=lambda: next(parents), pause=pauses.append, leave=left.append)
    assert len(pauses) == 3 and left == [1]


def test_torch_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        use_one_thread()
        assert torch.get_num_threads() == 2
        monkeypatch.delenv("OMP_NUM_THREADS")
        use_one_thread()
        assert torch.get_num_threads() == 1 and os.environ["OMP_NUM_THREADS"] == "1"
    finally:
        torch.set_num_threads(threads)
