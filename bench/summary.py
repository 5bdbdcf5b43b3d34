"""From timings to ratios: pure arithmetic on one figure's rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .figure import Role
from .runner import Measured


@dataclass(frozen=True)
class Spread:
    """Median, least and most of the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One case: its rate in the figure's unit, and rate and CPU per work as multiples of the baseline's.

    Ratios are made within each round and then summarised, so what slows a whole round down cancels out.
    """

    case: str
    role: Role
    rate: Spread
    ratio: Spread
    cpu_ratio: Spread | None
    """``None`` where the baseline used less CPU than the clock can tell."""


@dataclass(frozen=True)
class Summary:
    """A figure's rows in the order of its cases."""

    name: str
    title: str
    unit: str
    baseline: str
    repeats: int
    rows: tuple[Row, ...]
    skipped: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


CPU_TICK = 0.02
"""Two ticks of the kernel's CPU clock (seconds): less than that cannot be divided by."""


def summarise(measured: Measured) -> Summary:
    """Rates and ratios of every case. Raises ``ValueError`` without a round."""
    figure, timings = measured.figure, measured.timings
    base = timings[figure.baseline]
    if not base:
        raise ValueError(f"figure {figure.name} was not measured")
    rows = []
    for case in figure.cases:
        own = timings[case.name]
        speed = [t.work / t.seconds for t in own]
        ratios = [s / (b.work / b.seconds) for s, b in zip(speed, base, strict=True)]
        cpu = None
        if min(b.cpu for b in base) >= CPU_TICK:
            cpu = Spread.of([(t.cpu / t.work) / (b.cpu / b.work) for t, b in zip(own, base, strict=True)])
        rate = Spread.of([s * figure.scale for s in speed])
        rows.append(Row(case.name, case.role, rate, Spread.of(ratios), cpu))
    return Summary(figure.name, figure.title, figure.unit, figure.baseline, len(base), tuple(rows), figure.skipped)
