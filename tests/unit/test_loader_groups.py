"""Batches that one thread makes together: how many, and what comes before an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cachefs.clock import SystemClock
from loader.groups import Groups, group_bytes
from loader.sample import Stamp
from loader.slots import Slots

ROOM = 8 << 20


class Ticking(SystemClock):
    """Goes on by ``step`` with each batch that is made."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def items(count: int) -> Iterator[Any]:
    return iter([(number, Stamp(0, number + 1, 1), None) for number in range(count)])


def groups(step: float, nbytes: int, *, bad: int | None = None) -> Groups:
    clock = Ticking()

    def make(number: int, stamp: Stamp, places: Any) -> Any:
        if number == bad:
            raise ValueError(f"batch {number}")
        clock.now += step
        return {"x": torch.zeros(nbytes, dtype=torch.uint8)}

    return Groups(make, Slots(most=1 << 20), None, ROOM, clock)


def sizes(made: Groups, count: int) -> list[int]:
    out = []
    for group in made.of(items(count)):
        out.append(len(group))
        assert len(list(made(group))) == len(group)
    return out


def test_quick_batches_are_made_together_more_and_more_of_them() -> None:
    assert sizes(groups(2**-13, 10), 40) == [1, 2, 4, 8, 8, 8, 8, 1]


def test_a_batch_that_takes_long_is_a_group_by_itself() -> None:
    assert sizes(groups(5e-3, 10), 4) == [1, 1, 1, 1]


def test_a_group_takes_a_small_part_of_the_room() -> None:
    assert sizes(groups(1e-5, 1 << 19), 9) == [1, 2, 2, 2, 2]


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_an_error_comes_after_the_batches_before_it(bad: int) -> None:
    made = groups(1e-4, 10, bad=bad)
    got: list[int] = []
    with pytest.raises(ValueError, match=f"batch {bad}"):
        for group in made.of(items(10)):
            many = made(group)
            group_bytes(many)
            for _, (number, _) in many:
                got.append(number)
    assert got == list(range(bad))


def test_an_error_of_the_plan_comes_after_what_was_planned() -> None:
    def broken() -> Iterator[Any]:
        yield from items(6)
        raise ValueError("plan")

    made = groups(1e-4, 10)
    got: list[int] = []
    with pytest.raises(ValueError, match="plan"):
        for group in made.of(broken()):
            got += [number for _, (number, _) in made(group)]
    assert got == list(range(6))
