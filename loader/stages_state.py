"""States of a rank whose batches a filter stage fills up (:mod:`loader.stages_filter`)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from cachefs.errors import StateError

from .passes import BatchRule
from .reader import DataWarning
from .stages_filter import Point
from .statefields import MOST

FIELD: Final = "filter"
"""What a state says of it, beside what the data set's own says: that of the batch of the plan that is used next."""
_NUMBERS: Final = ("kept", "given", "round", "rank", "world", "batch")
_SHOWN: Final = 8
"""Ranks that an error names at most."""
_ANY: Final = 0
"""The world of a state that is every rank's."""


def point_to_dict(point: Point, rule: BatchRule) -> dict[str, int]:
    """What a state says of a point whose batch is where it goes on."""
    numbers = (point.kept, point.given, point.round, rule.run, rule.place.world, rule.global_batch)
    return dict(zip(_NUMBERS, numbers, strict=True))


def point_from_dict(raw: Any, rule: BatchRule) -> Point:
    """Where a rank goes on in the pass that begins at the state's position.

    Raises ``StateError`` for what is no such state, and for another rank's; warns where samples come again.
    """
    kept, given, number, rank, world, batch = _numbers(raw)
    place = rule.place
    if world == _ANY or (world, batch) != (place.world, rule.global_batch):
        if kept:
            warnings.warn(
                f"the state of rank {rank} of {world} with batches of {batch} samples, loaded by rank {rule.run} of "
                f"{place.world} with {rule.global_batch}: up to {kept} samples that it had used come again",
                DataWarning,
                stacklevel=4,
            )
        return Point(0, 0, given, number)
    if rank != rule.run:
        raise StateError(
            f"the state of rank {rank} loaded by rank {rule.run}: a filter stage leaves each rank at another place",
            hint="let each rank save and load its own, or give all of them Loader.common_state(all states)",
        )
    return Point(0, kept, given, number)


def common_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state for any number of ranks, from those that all ranks saved after the same number of batches.

    It goes on where the rank is that used least of the data: of the others' samples, those behind that come again.
    Raises ``StateError`` where they are not of one moment, or not one of each rank.
    """
    if not states:
        raise StateError("there is no state to make one of")
    numbers = [_numbers(state.get(FIELD)) for state in states]
    _check_complete(numbers)
    moments = {
        (state.get("epoch"), state.get("data"), given) for state, (_, given, *_) in zip(states, numbers, strict=True)
    }
    if len(moments) > 1:
        raise StateError("these states are not of the same epoch, data and number of batches")
    least = min(range(len(states)), key=lambda k: (numbers[k][2], states[k]["position"]))
    _, given, number, *_ = numbers[least]
    shared = dict(zip(_NUMBERS, (0, given, number, 0, _ANY, 0), strict=True))
    return {**states[least], FIELD: shared}


def refuse_points(state: Mapping[str, Any]) -> None:
    """Raise ``StateError`` for a state that only a Loader with filter stages can go on from."""
    raw = state.get(FIELD)
    if raw is None:
        return
    kept, _, number, *_ = _numbers(raw)
    if kept or number:
        raise StateError("this is the state of a Loader with filter stages", hint="give this one the same stages")


def _check_complete(numbers: Sequence[tuple[int, ...]]) -> None:
    """Raise ``StateError`` unless there is one of each rank: the one that used least may be the one that is missing."""
    made_with = {(world, batch) for *_, world, batch in numbers}
    if len(made_with) > 1:
        raise StateError("these states were saved with different numbers of ranks or batch sizes")
    [(world, _)] = made_with
    ranks = [rank for _, _, _, rank, _, _ in numbers]
    if world == _ANY:
        raise StateError("a common state was given as a rank's own", hint="load it as it is: it is for every rank")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise StateError(f"there are several states of rank {_listed(twice)}")
    beyond = sorted(rank for rank in ranks if rank >= world)
    if beyond:
        raise StateError(f"there are states of rank {_listed(beyond)} among {world} ranks")
    if len(ranks) < world:
        missing = (rank for rank in range(world) if rank not in ranks)
        shown = _listed(list(islice(missing, _SHOWN + 1)))
        raise StateError(f"there is no state of rank {shown} of {world}", hint="give the states that all ranks saved")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")


def _numbers(raw: Any) -> tuple[int, ...]:
    values = [raw.get(name) if isinstance(raw, Mapping) else None for name in _NUMBERS]
    numbers = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if len(numbers) < len(values) or not all(0 <= number <= MOST for number in numbers):
        raise StateError(f"the loader state's field {FIELD!r} does not say where a rank goes on")
    return tuple(numbers)
