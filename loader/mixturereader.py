"""Reading the samples of a mixture: each source by its own rules, in each of its epochs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .mixturerows import JointPool, first_shards
from .sample import Sample
from .samples import Places, Recipe, SampleReader

if TYPE_CHECKING:
    from .buffers import ShardPool
    from .definition import Definition
    from .mixtureorder import SourceOrders

SOURCE: Final = "__source__"
_SHORT: Final = 256
"""Samples of a source's epoch from which on it is worth maps of its own; those of a shorter one are copied."""
_IDLE: Final = 2  # epochs of a source whose shards stay open while nobody reads from them


class _Turn:
    """One epoch of a source: its reader, and how many read from it."""

    def __init__(self, reader: SampleReader) -> None:
        self.reader = reader
        self.users = 0


class SourceReader:
    """Reads one source. What somebody writes into a sample is not seen when it comes again in a later epoch.

    Closing is the caller's. With ``shared``, several threads may read.
    """

    def __init__(self, definition: Definition, orders: SourceOrders, recipe: Recipe, *, shared: bool) -> None:
        self.recipe = recipe
        self.definition = definition
        self._orders = orders
        self._shared = shared
        # derived formats may make other samples of the same shards in each epoch
        self._short = orders.total < _SHORT and definition.format.base is definition.format
        self._turns: OrderedDict[int, _Turn] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def read(self, epoch: int, places: Places) -> list[Any]:
        """The finished samples of one of the source's epochs, as :meth:`SampleReader.read` gives them."""
        if self._short:
            return self.read_untouched(epoch, places)
        with self._turn(epoch) as reader:
            return reader.read(places)

    def read_untouched(self, epoch: int, places: Places) -> list[Any]:
        """The same as copies of what is stored."""
        with self._turn(0 if self._short else epoch) as reader:
            return (reader.in_epoch(epoch) if self._short else reader).read_untouched(places)

    @contextmanager
    def _turn(self, epoch: int) -> Iterator[SampleReader]:
        with self._lock:
            turn = self._turns.get(epoch)
            if turn is None:
                reader = self.definition.reader_of(self._orders(epoch), self.recipe, shared=self._shared)
                turn = self._turns[epoch] = _Turn(reader)
            turn.users += 1
            self._turns.move_to_end(epoch)
        try:
            yield turn.reader
        finally:
            with self._lock:
                turn.users -= 1
            self._close_idle()

    def _close_idle(self) -> None:
        with self._lock:
            idle = [number for number, turn in self._turns.items() if not turn.users]
            keep = 0 if self._closed else _IDLE
            done = [self._turns.pop(number) for number in idle[: max(len(idle) - keep, 0)]]
        for turn in done:
            turn.reader.close()

    def pool(self) -> ShardPool:
        """The open shards of one epoch, for who hands out none of them; they stay open if :meth:`read` is not
        called."""
        with self._turn(0) as reader:
            return reader.pool

    def close(self) -> None:
        """Close all open shards: those that a thread still reads from once it has done with them. Idempotent."""
        with self._lock:
            self._closed = True
        self._close_idle()


class MixtureReader:
    """Reads the samples of one pass over a mixture.

    ``ids``: name the source of each in ``__source__``, by these ``numbers``.
    """

    def __init__(self, sources: Sequence[SourceReader], numbers: Sequence[int], *, ids: bool) -> None:
        self.sources = sources
        self.numbers = np.array(numbers, dtype=np.int64)
        self.ids = ids

    def read(self, places: Places) -> list[Any]:
        """The finished samples, in order; errors as :meth:`SampleReader.read` gives them."""
        return self._read(places, SourceReader.read)

    def read_untouched(self, places: Places) -> list[Any]:
        """The same as copies of what is stored."""
        return self._read(places, SourceReader.read_untouched)

    def _read(self, places: Places, read: Callable[[SourceReader, int, Places], list[Any]]) -> list[Any]:
        origin = places.origin
        assert origin is not None  # of a mixture's plan
        order = np.lexsort((origin.epoch, origin.source))
        source, epoch = origin.source[order], origin.epoch[order]
        ends = [*(np.flatnonzero(np.diff(source) | np.diff(epoch)) + 1).tolist(), len(order)]
        shard, row, repeat = places.shard[order], places.row[order], places.repeat
        repeat = repeat if repeat is None else repeat[order]
        read_ones: list[Any] = []
        for first, last in zip([0, *ends], ends, strict=False):
            number, part = int(source[first]), slice(first, last)
            own = Places(shard[part], row[part], None if repeat is None else repeat[part])
            samples = read(self.sources[number], int(epoch[first]), own)
            if self.ids:
                _name(samples, int(self.numbers[number]))
            read_ones += samples
        out: list[Any] = [None] * len(order)
        for at, sample in zip(order.tolist(), read_ones, strict=True):
            out[at] = sample
        return out

    @property
    def recipes(self) -> list[Recipe]:
        """What is done to the samples of each source."""
        return [source.recipe for source in self.sources]

    def joint_pool(self) -> JointPool:
        """The open shards of all sources, as those of one data set."""
        manifests = [source.definition.listing for source in self.sources]
        return JointPool([source.pool() for source in self.sources], first_shards(manifests))

    def close(self) -> None:
        """Close all open shards. Idempotent."""
        for source in self.sources:
            source.close()


def _name(samples: list[Any], source: int) -> None:
    for sample in samples:
        if isinstance(sample, Sample):
            sample[SOURCE] = source
