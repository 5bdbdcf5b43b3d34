"""The settings of an order as a fixed number of integers of 64 bits: what fits into memory shared by processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

from .epochs import OrderSettings


class Words(Protocol):
    """How one kind of settings becomes ``count`` signed integers, and they the settings again."""

    @property
    def count(self) -> int: ...

    def pack(self, settings: Any) -> list[int]: ...

    def unpack(self, words: Sequence[int]) -> Any: ...


class OrderWords:
    """:class:`Words` of the settings of one data set's order."""

    count: Final = 5

    def pack(self, settings: OrderSettings) -> list[int]:
        flags = (settings.shuffle, settings.exchange, settings.balance == "samples", settings.cut)
        packed = sum(flag << bit for bit, flag in enumerate(flags))
        return [
            signed(settings.seed),
            settings.lanes,
            settings.block_shards,
            packed | (settings.seed >= 0) << 4,
            settings.table,
        ]

    def unpack(self, words: Sequence[int]) -> OrderSettings:
        seed, lanes, blocks, flags, table = words
        shuffle, exchange, samples, cut, natural = (bool(flags >> bit & 1) for bit in range(5))
        return OrderSettings(
            seed=unsigned(seed) if natural else seed,
            lanes=lanes,
            block_shards=blocks,
            shuffle=shuffle,
            exchange=exchange,
            balance="samples" if samples else "bytes",
            cut=cut,
            table=table,
        )


def signed(value: int) -> int:
    """A number of 64 bits, signed or not, as a signed one."""
    return value - (1 << 64) if value >= 1 << 63 else value


def unsigned(value: int) -> int:
    """The number from 0 on that :func:`signed` made a signed one of."""
    return value + (1 << 64) if value < 0 else value
