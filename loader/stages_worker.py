"""What a stage's function is called with, here or in a process of its own."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from cachefs.errors import ConfigError

from .stages_channel import Channel, Closed


class Failure(NamedTuple):
    """A function that raised. ``at``: the sample, among those given; ``None`` where it was given all of them.
    ``trace``: where it was raised in another process."""

    at: int | None
    error: BaseException
    trace: str = ""


def apply(function: Callable[[Any], Any], samples: list[Any], *, batched: bool) -> list[Any] | Failure:
    """What the function makes of each sample, or of all of them together."""
    at = None
    try:
        if batched:
            results = list(function(samples))
            if len(results) != len(samples):
                raise ConfigError(f"{len(results)} results for {len(samples)} samples")
            return results
        results = []
        for at, sample in enumerate(samples):  # noqa: B007 - says which one it was
            results.append(function(sample))
    except Exception as e:  # noqa: BLE001 - it is the user's, and may raise whatever it likes
        return Failure(at, e)
    return results


class Truth:
    """Whether a predicate holds, as ``bool``: what else it returns may be none, and is told where it was returned."""

    def __init__(self, predicate: Callable[[Any], Any], *, batched: bool) -> None:
        self._predicate = predicate
        self._batched = batched

    def __call__(self, given: Any) -> Any:
        result = self._predicate(given)
        return [bool(value) for value in result] if self._batched else bool(result)


READY = "ready"
"""What a process says first."""
_LOOK = 5.0
"""Seconds between two looks at whether the process that it works for is still there."""


def work(end: socket.socket, function: Callable[[Any], Any], batched: bool, parent: int) -> None:
    """The life of a stage's process: answers until the other side hangs up. ``parent``: the process it works for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that it works for ends it
    threading.Thread(target=outlive, args=(parent,), name="nearflash-parent", daemon=True).start()
    use_one_thread()
    serve(Channel(end), function, batched=batched)


def serve(channel: Channel, function: Callable[[Any], Any], *, batched: bool) -> None:
    """Say that it begins, then answer each list of samples, until the other side hangs up."""
    try:
        channel.send(READY)
        while True:
            try:
                samples = channel.receive()
            except Closed:
                raise
            except Exception as e:  # noqa: BLE001 - whatever unpickling raises: the message was read to its end
                e.add_note("the samples cannot be unpickled in the stage's process")
                channel.send(_portable(Failure(None, e)))
                continue
            answer = apply(function, samples, batched=batched)
            if isinstance(answer, Failure):
                channel.send(_portable(answer))
                continue
            try:
                channel.send(answer)
            except Closed:
                raise
            except Exception as e:  # noqa: BLE001 - whatever pickling raises: nothing has been sent yet
                e.add_note("what the function made cannot be sent back")
                channel.send(_portable(Failure(None, e)))
    except Closed:
        pass


def outlive(
    parent: int,
    *,
    parent_now: Callable[[], int] = os.getppid,
    pause: Callable[[float], object] = time.sleep,
    leave: Callable[[int], object] = os._exit,
) -> None:
    """End this process once the one that it works for is gone: whatever the function does, and also where others that
    were forked from that one hold the other end of the socket."""
    while parent_now() == parent:
        pause(_LOOK)
    leave(1)


def use_one_thread() -> None:
    """Let torch use one thread: there are as many processes as are wanted. ``OMP_NUM_THREADS`` says otherwise."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that the function imports
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _portable(failure: Failure) -> Failure:
    """One whose error survives pickling, as its text if not otherwise."""
    error = failure.error
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an error's own pickling may raise anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(failure.error, "__notes__", ()):
        if note not in getattr(error, "__notes__", ()):  # which pickling may have lost
            error.add_note(note)
    return Failure(failure.at, error.with_traceback(None), trace)
