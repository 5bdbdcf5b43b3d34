"""The fields of a state that came from outside: typed access that trusts nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cachefs.errors import StateError

MOST: Final = 2**48
"""No number in a state is larger, but for the seed: computing with them stays within 64 bits."""
STOP: Final = "stop"
"""The field that says where a pass ends that begins within a batch."""
WORKER: Final = "worker"
"""The field with one DataLoader worker's own position."""
SEEDS: Final = range(-(2**63), 2**64)


class Fields:
    """See the module's text. All raise StateError."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def _wrong(self, name: str, wanted: str) -> StateError:
        return StateError(f"the loader state's field {name!r} is not {wanted}", hint="the state is damaged")

    def text(self, name: str) -> str:
        value = self._raw.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._raw.get(name)
        if not isinstance(value, bool):
            raise self._wrong(name, "a boolean")
        return value

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in options:
            raise self._wrong(name, f"one of {', '.join(options)}")
        return value

    def integer(self, name: str, least: int = 0) -> int:
        value = self._raw.get(name)
        if not _is_integer(value, least):
            raise self._wrong(name, f"an integer from {least} to 2**48")
        return int(value)  # type: ignore[arg-type]

    def seed(self, name: str) -> int:
        value = self._raw.get(name)
        if not is_seed(value):
            raise self._wrong(name, "an integer of 64 bits")
        return int(value)  # type: ignore[arg-type]

    def _list(self, name: str) -> list[Any]:
        value = self._raw.get(name)
        if not isinstance(value, list | tuple):
            raise self._wrong(name, "a list")
        return list(value)

    def pairs(self, name: str) -> tuple[tuple[int, int], ...]:
        out = []
        for pair in self._list(name):
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(_is_integer(value) for value in pair)):
                raise self._wrong(name, "a list of pairs of integers")
            out.append((pair[0], pair[1]))
        return tuple(out)

    def lists(self, name: str) -> tuple[tuple[int, ...], ...]:
        lists = self._list(name)
        if not all(isinstance(one, list | tuple) and one and all(map(_is_integer, one)) for one in lists):
            raise self._wrong(name, "a list of lists of integers")
        return tuple(tuple(one) for one in lists)

    def table(self, names: str, places: str) -> tuple[str, ...]:
        nodes, table = self._list(names), self._list(places)
        if not all(isinstance(node, str) for node in nodes):
            raise self._wrong(names, "a list of strings")
        if not all(_is_integer(place) and place < len(nodes) for place in table):
            raise self._wrong(places, f"a list of places in {names!r}")
        return tuple(nodes[place] for place in table)


def is_seed(value: object) -> bool:
    """Whether it can seed an order: an integer of 64 bits, signed or not."""
    return isinstance(value, int) and not isinstance(value, bool) and value in SEEDS


def _is_integer(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST
