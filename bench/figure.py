"""What a page of the bench is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil

from cachefs.clock import SYSTEM_CLOCK, Clock

Role = Literal["limit", "ours", "peer"]


@dataclass(frozen=True)
class Timing:
    """One repetition: wall seconds, CPU seconds of every process that took part, and how much work was done."""

    seconds: float
    cpu: float
    work: float


@dataclass(frozen=True)
class Case:
    """One way to do a figure's work. ``run`` does it once, from the same beginning every time."""

    name: str
    role: Role
    run: Callable[[], Timing]


@dataclass(frozen=True)
class Figure:
    """Cases that do the same work. ``baseline`` names the case that the others are divided by.

    ``unit`` is what a second is full of (``"MB/s"``); ``scale`` turns work into it. ``skipped`` says what was left out
    and why.
    """

    name: str
    title: str
    unit: str
    scale: float
    baseline: str
    cases: tuple[Case, ...]
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        if len(set(names)) != len(names) or self.baseline not in names:
            raise ValueError(f"figure {self.name}: cases {names} are not unique or lack the baseline {self.baseline!r}")


class Stopwatch:
    """Filled when the ``with`` block ends; see :func:`stopwatch`."""

    seconds: float = 0.0
    cpu: float = 0.0

    def timing(self, work: float) -> Timing:
        return Timing(self.seconds, self.cpu, work)


@contextmanager
def stopwatch(*others: psutil.Process, clock: Clock = SYSTEM_CLOCK) -> Iterator[Stopwatch]:
    """Wall and CPU time of a block: this process, its children that end within it, and ``others`` (a daemon)."""
    watch = Stopwatch()
    cpu, start = _cpu(others), clock.monotonic()
    yield watch
    watch.seconds = clock.monotonic() - start
    watch.cpu = _cpu(others) - cpu


def _cpu(others: tuple[psutil.Process, ...]) -> float:
    own = psutil.Process().cpu_times()
    total = own.user + own.system + own.children_user + own.children_system
    for process in others:
        times = process.cpu_times()
        total += times.user + times.system
    return float(total)
