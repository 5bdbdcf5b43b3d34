"""Functions that tests run in processes of their own: in a module that takes no time to import."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any


def number(sample: Any) -> int:
    """Which sample of the data set it is."""
    return int(bytes(sample["bin"][:4]).partition(b":")[0])


def doubled(sample: Any) -> Any:
    return {"bin": sample["bin"], "twice": 2 * number(sample), "cls": sample["cls"]}


def kept(sample: Any) -> bool:
    return number(sample) % 3 != 0


def all_kept(samples: Sequence[Any]) -> list[bool]:
    return [kept(sample) for sample in samples]


def with_array(sample: Any) -> Any:
    import numpy as np

    sample["array"] = np.full((3, 1000), number(sample))
    sample["pid"] = os.getpid()
    return sample


def fails_at_seven(sample: Any) -> Any:
    if number(sample) == 7:
        raise KeyError("lost")
    return sample


def kills_itself(sample: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class Unportable(Exception):
    """One that is made with two values and pickled with one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def raises_unportable(sample: Any) -> Any:
    raise Unportable(1, 2)


def never_ends(sample: Any) -> Any:
    threading.Event().wait(600)


def never_ends_at_four(sample: Any) -> Any:
    if number(sample) >= 4:
        never_ends(sample)
    return sample


def fails_then_never_ends(sample: Any) -> Any:
    if number(sample) in (4, 5):
        raise KeyError("lost")
    if number(sample) > 5:
        never_ends(sample)
    return sample
