"""Batches that are made together by one thread of a :class:`loader.Loader`.

A batch of views takes less time than handing it from thread to thread, so some are made at a time: as many as take
about a millisecond, and no more than a small part of what may be ready. A batch that takes longer is a group by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from cachefs.clock import SYSTEM_CLOCK, Clock

from .collation import allocating
from .slots import Slots
from .transfer import Sent, Transfer, tensor_bytes

GROUP_SECONDS = 1e-3
"""What making a group of batches may take: longer than handing it on, and short enough to be ready soon."""
GROUPS_READY = 8
"""Groups that what may be ready has room for."""

Many = Iterable[Any]
"""Some batches that were made together, each with its number and size."""


class Groups:
    """Makes batches, a group at a time; several threads may do so at once. ``room``: bytes that may be ready."""

    def __init__(
        self,
        whole: Callable[..., Any],
        slots: Slots,
        transfer: Transfer | None,
        room: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._whole = whole
        self._slots = slots
        self._transfer = transfer
        self._room = room // GROUPS_READY
        self._clock = clock
        self._size = 1  # how many batches the next group has; any thread may set it

    def of(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """The batches in groups. What comes before an error is a group of its own, and the error follows it."""
        return gradually(batches, lambda: self._size)

    def __call__(self, group: list[Any]) -> Many:
        made: list[Any] = []
        began = self._clock.monotonic()
        for number, stamp, places in group:
            try:
                with allocating(self._slots.allocate):
                    batch = self._whole(number, stamp, places)
            except Exception as e:  # whatever it is, the consumer gets the batches before it first
                if not made:
                    raise
                e.add_note("in the loader's reading stage")
                return CutOff(made, e)
            made.append((batch if self._transfer is None else self._transfer.send(batch), (number, stamp.size)))
        took, held = self._clock.monotonic() - began, group_bytes(made)
        soon = int(GROUP_SECONDS * len(made) / max(took, 1e-6))
        fitting = self._room * len(made) // max(held, 1)
        self._size = max(1, min(soon, fitting, 2 * len(made)))
        return made


def gradually(batches: Iterator[Any], size: Callable[[], int]) -> Iterator[list[Any]]:
    """The batches in groups of as many as ``size`` says when one is added. What comes before an error is a group of its
    own, and the error follows it."""
    group: list[Any] = []
    try:
        for item in batches:
            group.append(item)
            if len(group) >= size():
                yield group
                group = []
    except Exception:
        if group:
            yield group
        raise
    if group:
        yield group


class CutOff:
    """Batches, and the error that came instead of the next one."""

    def __init__(self, made: list[Any], error: Exception) -> None:
        self.made = made
        self._error = error

    def __iter__(self) -> Iterator[Any]:
        yield from self.made
        raise self._error


def group_bytes(many: Many) -> int:
    """What the batches of a group take."""
    made = many.made if isinstance(many, CutOff) else many
    return sum(tensor_bytes(batch.source if isinstance(batch, Sent) else batch) for batch, _ in made)
