"""Where in an arena the next tensor goes: which stretches are in use, and which of them can be used again.

Pure: whether a stretch is still in use is asked of a function, since other processes decide it too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

_ALIGNMENT = 64
_STEPS = 8
"""Sizes between two powers of two: batches that differ a little use the same stretches."""


class Block(NamedTuple):
    """A stretch of the arena, and the number under which its uses are counted."""

    offset: int
    size: int
    slot: int


def rounded(nbytes: int) -> int:
    """The size of a stretch for so many bytes: at most an eighth more, and aligned."""
    step = max(_ALIGNMENT, (1 << max(nbytes - 1, 1).bit_length()) // (2 * _STEPS))
    return -(-max(nbytes, 1) // step) * step


class Space:
    """Deals stretches of ``size`` bytes, at most ``slots`` of them at once. For one thread at a time.

    ``busy(slot)``: whether anybody still uses the stretch that was dealt as ``slot``. What is free is used again from
    the lowest place on, so that no more memory is touched than is in use at once.
    """

    def __init__(self, size: int, slots: int, busy: Callable[[int], bool]) -> None:
        self._size = size
        self._busy = busy
        self._slots = list(range(slots - 1, -1, -1))
        self._blocks: list[Block] = []  # sorted by offset
        self._by_size: dict[int, list[Block]] = {}

    def take(self, nbytes: int) -> Block | None:
        """A stretch of at least so many bytes that nobody uses, aligned to 64; ``None`` if there is none."""
        size = rounded(nbytes)
        for block in self._by_size.get(size, ()):
            if not self._busy(block.slot):
                return block
        self._sweep()
        offset = self._gap(size)
        if offset is None or not self._slots:
            return None
        block = Block(offset, size, self._slots.pop())
        at = bisect_left(self._blocks, block)
        self._blocks.insert(at, block)
        same = self._by_size.setdefault(size, [])
        same.insert(bisect_left(same, block), block)
        return block

    def at(self, offset: int) -> Block | None:
        """The stretch that begins there, which may be free by now."""
        at = bisect_left(self._blocks, (offset,))
        found = self._blocks[at] if at < len(self._blocks) else None
        return found if found is not None and found.offset == offset else None

    def _sweep(self) -> None:
        """Forget the stretches that nobody uses, so that others can be laid over them."""
        kept = [block for block in self._blocks if self._busy(block.slot)]
        if len(kept) == len(self._blocks):
            return
        used = {block.slot for block in kept}
        self._slots += [block.slot for block in self._blocks if block.slot not in used]
        self._blocks, self._by_size = kept, {}
        for block in kept:
            self._by_size.setdefault(block.size, []).append(block)

    def _gap(self, size: int) -> int | None:
        end = 0
        for block in self._blocks:
            if block.offset - end >= size:
                return end
            end = block.offset + block.size
        return end if self._size - end >= size else None
