"""Running a figure: warm-up first, then repetitions in which the cases take turns.

What disturbs the machine for a second (other tenants, writeback, a throttled CPU) then hits all cases alike, and each
round gives a ratio of its own. The order rotates, so no case always follows the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .figure import Case, Figure, Timing


@dataclass(frozen=True)
class Measured:
    """A figure with the timings of its cases: ``timings[case name][round]``."""

    figure: Figure
    timings: dict[str, list[Timing]]


def rounds(cases: tuple[Case, ...], count: int) -> Iterator[tuple[Case, ...]]:
    """The order of the cases in each round: rotated by one each time."""
    for i in range(count):
        k = i % len(cases)
        yield cases[k:] + cases[:k]


def measure(figure: Figure, *, repeats: int, warmup: int, progress: Callable[[str], None]) -> Measured:
    """``warmup`` rounds whose timings are dropped, then ``repeats`` that count. ``progress`` is told of each turn."""
    timings: dict[str, list[Timing]] = {case.name: [] for case in figure.cases}
    for i, order in enumerate(rounds(figure.cases, warmup + repeats)):
        for case in order:
            kind = "warm-up" if i < warmup else f"round {i - warmup + 1} of {repeats}"
            progress(f"{figure.name}: {kind}, {case.name}")
            timing = case.run()
            if i >= warmup:
                timings[case.name].append(timing)
    return Measured(figure, timings)
