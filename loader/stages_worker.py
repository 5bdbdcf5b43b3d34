"""What a stage's function is called with, here or in a process of its own."""

from __future__ import annotations

import pickle
import signal
import socket
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


def work(end: socket.socket, function: Callable[[Any], Any], batched: bool) -> None:
    """The life of a stage's process: answers until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that it works for ends it
    channel = Channel(end)
    try:
        while True:
            answer = apply(function, channel.receive(), batched=batched)
            if isinstance(answer, Failure):
                channel.send(_portable(answer))
                continue
            try:
                channel.send(answer)
            except Closed:
                raise
            except Exception as e:  # noqa: BLE001 - whatever pickling raises: nothing has been sent yet
                channel.send(_portable(Failure(None, e)))
    except Closed:
        pass


def _portable(failure: Failure) -> Failure:
    """One whose error survives pickling, as its text if not otherwise."""
    error = failure.error
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an error's own pickling may raise anything
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return Failure(failure.at, error.with_traceback(None), trace)
