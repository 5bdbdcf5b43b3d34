"""The arguments of a mixture, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError

from .mixing import Weight, as_written, tempered
from .statefields import MOST, is_seed

Weights = Mapping[str, float] | Sequence[float] | npt.NDArray[Any]
Stop = Literal["all", "first"]
_STOPS: Final = ("all", "first")


@dataclass(frozen=True)
class MixtureOptions:
    """The arguments of :class:`loader.Mixture`, checked. ``weights`` and ``repeat`` are in the order of ``names``."""

    names: tuple[str, ...]
    weights: tuple[float, ...] | None
    repeat: tuple[float, ...] | None
    temperature: float | None
    stop: Stop | None
    samples: int | None
    within: Literal["any", "batch"]
    batch_size: int | None
    global_batch_size: int | None
    seed: int
    drop_last: bool
    pad: bool
    ids: bool
    rank: int | None
    world_size: int | None
    mesh: Any

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("a mixture of no sources")
        if (self.batch_size is None) == (self.global_batch_size is None):
            raise ConfigError("give batch_size (samples per rank) or global_batch_size, one of them")
        for name in ("batch_size", "global_batch_size", "samples"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST):
                raise ConfigError(f"{name}={value!r} is not a positive number")
        if not is_seed(self.seed):
            raise ConfigError(f"seed={self.seed!r} is not an integer of 64 bits")
        if self.weights is not None and self.repeat is not None:
            raise ConfigError("give weights or repeat: both say how often a source is read")
        if self.stop is not None and self.stop not in _STOPS:
            raise ConfigError(f"stop={self.stop!r} is neither 'all' nor 'first'")
        ends = {"stop": self.stop, "samples": self.samples, "repeat": self.repeat}
        given = [name for name, value in ends.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} each say where an epoch ends: give one of them")
        if self.temperature is not None and self.repeat is not None:
            raise ConfigError("give temperature or repeat: both say how often a source is read")
        if self.within not in ("any", "batch"):
            raise ConfigError(f"within={self.within!r} is neither 'any' nor 'batch'")
        for name, numbers in (("weights", self.weights), ("repeat", self.repeat)):
            if numbers is not None:
                _check_numbers(name, self.names, numbers)
        if self.temperature is not None:
            tempered([1.0], self.temperature)

    @property
    def read(self) -> tuple[int, ...]:
        """Which of the sources are read at all: not those whose weight is 0."""
        given = self.weights if self.weights is not None else self.repeat
        return tuple(at for at in range(len(self.names)) if given is None or given[at])

    def weights_of(self, sizes: Sequence[int]) -> tuple[Weight, ...]:
        """The weights of the sources that are read, which have so many samples."""
        if self.repeat is not None:
            return self._repeated(sizes)
        weights = tuple(sizes) if self.weights is None else tuple(self.weights[at] for at in self.read)
        return weights if self.temperature is None else tempered(weights, self.temperature)

    def _repeated(self, sizes: Sequence[int]) -> tuple[Fraction, ...]:
        """How many samples of each source that is read an epoch with ``repeat`` has."""
        assert self.repeat is not None  # the caller looked
        return tuple(as_written(self.repeat[at]) * size for at, size in zip(self.read, sizes, strict=True))

    def length(self, sizes: Sequence[int], reached: Sequence[int]) -> int:
        """Positions in an epoch, before it is cut into batches.

        ``reached``: after how many positions each source that is read has been read once.
        """
        if self.samples is not None:
            return self.samples
        if self.repeat is not None:
            return math.ceil(sum(self._repeated(sizes)))
        return min(reached) if self.stop == "first" else max(reached)

    @property
    def whole(self) -> Literal["up", "down"] | None:
        """How the length is rounded to whole batches."""
        if self.within == "any" and (self.pad or not self.drop_last):
            return None
        return "down" if self.samples is not None or self.stop == "first" else "up"


def by_name(argument: str, names: Sequence[str], values: Weights | None) -> tuple[float, ...] | None:
    """One number for each source, in their order. Raises ``ConfigError``."""
    if values is None:
        return None
    if isinstance(values, Mapping):
        unlike = sorted(map(str, set(names) ^ set(values)))
        if unlike:
            raise ConfigError(
                f"{argument} and sources differ in {', '.join(unlike)}",
                hint="name each source in both; 0 leaves it out",
            )
        return tuple(_plain(values[name]) for name in names)
    listed = values.ndim == 1 if isinstance(values, np.ndarray) else isinstance(values, Sequence)
    if not listed or isinstance(values, str | bytes) or len(values) != len(names):
        raise ConfigError(f"{argument}={values!r} is not one number for each of {len(names)} sources")
    return tuple(map(_plain, values))


def _plain(value: Any) -> Any:
    """A number of numpy's as Python's that is written alike; anything else as it is, to be refused."""
    if isinstance(value, np.integer):
        return int(value)
    return float(str(value)) if isinstance(value, np.floating) else value


def _check_numbers(argument: str, names: Sequence[str], numbers: Sequence[float]) -> None:
    for name, number in zip(names, numbers, strict=True):
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not math.isfinite(number) or number < 0:
            raise ConfigError(f"{argument}: {number!r} of source {name!r} is not a number from 0 on")
    if not any(numbers):
        raise ConfigError(f"{argument}: no source has one above 0")
