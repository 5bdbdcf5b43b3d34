"""Stages: what a :class:`loader.Loader` does with each sample before it makes batches of them.

``Loader(dataset, stages=[Map(resize), Filter(is_sharp), ...])`` calls them one after the other, in the order of the
data set, in the Loader's threads; with ``processes=N`` a stage runs in N processes of its own, for functions in pure
Python, which threads do not speed up. A stage gets samples as the data set gives them (decoded, transformed), and may
change them in place; of what it returns, a ``dict`` becomes a sample again.

An exception is raised where the batch would have come, with a note of the stage and the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import compress
from typing import Any, ClassVar

from cachefs.errors import ConfigError

from .sample import Sample
from .stages_pool import ProcessPool
from .stages_worker import Failure, Truth, apply

TIMEOUT = 600.0
"""Seconds that one batch may take in a stage's process."""
LONGEST = 7 * 86400.0
"""The longest such time: nothing waits for ever."""


@dataclass(frozen=True)
class Stage:
    """What :class:`Map` and :class:`Filter` have in common. ``processes``: how many of its own it runs in, 0: in the
    Loader's threads; for processes the function must be importable. ``timeout``: seconds that one batch may take there.
    """

    kind: ClassVar[str]
    function: Callable[[Any], Any]
    _: KW_ONLY
    processes: int = 0
    batched: bool = False
    timeout: float = TIMEOUT

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not callable(self.function):
            raise ConfigError(f"{name}({self.function!r}) is not given a function")
        if isinstance(self.processes, bool) or not isinstance(self.processes, int) or self.processes < 0:
            raise ConfigError(f"{name}(processes={self.processes!r}) is not a number of processes")
        numeric = isinstance(self.timeout, int | float) and not isinstance(self.timeout, bool)
        if not numeric or not 0 < self.timeout <= LONGEST:
            raise ConfigError(f"{name}(timeout={self.timeout!r}) is not a time in seconds, at most {LONGEST:g}")


class Map(Stage):
    """``function(sample)`` in place of each sample; with ``batched`` ``function(samples)``, a list of some samples that
    come one after the other, which returns as many.

    Whatever random numbers it draws do not come again when a run is resumed: for augmentation that does, see
    ``ShardDataset(transform=...)``.
    """

    kind = "map"


class Filter(Stage):
    """Keeps the samples for which ``function(sample)`` holds; with ``batched`` ``function(samples)`` returns as many
    booleans. It has to say the same of a sample each time. See :mod:`loader.stages_filter` for what batches and states
    are then; where the decision needs but a field that is stored, ``ShardDataset(where=...)`` does without such limits.
    """

    kind = "filter"


class Stages:
    """Some stages as a :class:`loader.Loader` runs them; any number of threads may :meth:`run` at once.

    :meth:`close` ends their processes; after :meth:`open` they are started again when they are needed.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        if isinstance(stages, Stage):
            raise ConfigError("stages= is one stage", hint="write stages=[stage]")
        for stage in stages:
            if not isinstance(stage, Map | Filter):
                raise ConfigError(f"{stage!r} is no stage", hint="stages=[loader.Map(f), loader.Filter(g)]")
        self._steps = [_Step(stage, _what(stage, number)) for number, stage in enumerate(stages, 1)]
        self.filters = any(isinstance(stage, Filter) for stage in stages)
        self.processes = max((stage.processes for stage in stages), default=0)
        """Processes of the stage that has most."""

    def __len__(self) -> int:
        return len(self._steps)

    def run(self, samples: list[Any], where: Callable[[int], str]) -> tuple[list[Any], list[int]]:
        """The samples behind the last stage, and which of those given each was. ``where(k)`` names sample k."""
        numbers = list(range(len(samples)))
        for step in self._steps:
            if not samples:
                break
            results = step.results(samples, numbers, where)
            if step.keeps:
                samples = list(compress(samples, results))
                numbers = list(compress(numbers, results))
            else:
                samples = [_sample(result, of) for result, of in zip(results, samples, strict=True)]
        return samples, numbers

    def open(self) -> None:
        """A pass begins: let them run, also after :meth:`interrupt` and :meth:`close`."""
        for pool in self._pools():
            pool.open()

    def interrupt(self) -> None:
        """Let nobody wait for a process any more, until the next pass; those at work are ended. Idempotent."""
        for pool in self._pools():
            pool.interrupt()

    def close(self) -> None:
        """End the processes; whoever waits for one gets an error. Idempotent."""
        self.interrupt()  # of all stages, before any is waited for
        for pool in self._pools():
            pool.close()

    def _pools(self) -> list[ProcessPool]:
        return [step.pool for step in self._steps if step.pool is not None]


class _Step:
    """One stage with its processes. ``what``: how it is called in messages."""

    def __init__(self, stage: Stage, what: str) -> None:
        self._batched = stage.batched
        self._what = what
        self.keeps = isinstance(stage, Filter)
        self._function = Truth(stage.function, batched=stage.batched) if self.keeps else stage.function
        self.pool: ProcessPool | None = None
        if stage.processes:
            self.pool = ProcessPool(
                self._function, batched=stage.batched, processes=stage.processes, what=what, timeout=stage.timeout
            )

    def results(self, samples: list[Any], numbers: Sequence[int], where: Callable[[int], str]) -> list[Any]:
        """What the function makes of each sample; they are told by these numbers."""
        if self.pool is None:
            answer = apply(self._function, samples, batched=self._batched)
        else:
            answer = self.pool.call(samples)
        if isinstance(answer, Failure):
            which = where(numbers[answer.at or 0])
            if answer.at is None:
                which = f"{len(samples)} samples, the first {which}"
            raise _noted(answer, f"{self._what} of {which}")
        return answer


def _noted(failure: Failure, note: str) -> BaseException:
    error = failure.error
    if failure.trace:
        error.__cause__ = _Elsewhere(failure.trace)
    if isinstance(error, StopIteration):  # which would end the epoch of whoever iterates, without a word
        wrapped = RuntimeError(f"StopIteration {note}")
        wrapped.__cause__ = error
        return wrapped
    error.add_note(note)
    return error


class _Elsewhere(Exception):
    """The traceback of an exception in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _what(stage: Stage, number: int) -> str:
    called = getattr(stage.function, "__qualname__", None) or type(stage.function).__name__
    return f"in the {stage.kind} stage {number} (function {called})"


def _sample(result: Any, before: Any) -> Any:
    """What a function made, as a sample of the same batch if it is a mapping."""
    if isinstance(result, Sample):
        sample = result
    elif type(result) is dict:
        sample = Sample(result)
    else:
        return result
    sample.stamp = before.stamp if isinstance(before, Sample) else None
    return sample
