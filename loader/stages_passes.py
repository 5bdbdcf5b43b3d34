"""Passes whose batches a filter stage fills up: two pipelines, one that reads and one that makes batches.

The first reads batches of the plan, and runs the stages; its results are dealt into batches in order
(:mod:`loader.stages_filter`), which the second puts together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cachefs.errors import ConfigError, CountsUnknown, NearflashError

from .collation import allocating, collate
from .epochcell import Base, Start
from .mixturereader import MixtureReader
from .pipeline import Pipeline, StageTimes, Window, close_all
from .sample import Sample, Stamp
from .samples import REPEAT, Places
from .slots import Slots
from .stages import Stages
from .stages_filter import Full, Kept, Part, Point, Refill, parts
from .stages_state import FIELD, point_from_dict, point_to_dict
from .transfer import Sent, Transfer, tensor_bytes

if TYPE_CHECKING:
    from .planned import PlannedDataset
    from .reading import Reading

CUT_OFF = "this pass was ended by close(), load_state_dict() or another iter() of its Loader"
_JOINERS = 2
"""Threads that put batches together: that is copying, next to reading."""
_READY = 8


@dataclass(frozen=True)
class Making:
    """How batches are made. ``room``: bytes that may be ready ahead."""

    threads: int
    room: int
    collate: Callable[[Sequence[Any]], Any] | None
    slots: Slots
    transfer: Transfer | None


class Staged:
    """Samples of batches of the plan, behind the stages."""

    def __init__(self, reading: Reading, stages: Stages) -> None:
        self._reading = reading
        self._stages = stages

    def samples(self, batch: int, stamp: Stamp, places: Places) -> tuple[list[Any], list[int]]:
        """What the stages leave of a batch, and which of its samples each was."""
        samples = self._reading.samples(batch, stamp, places)
        return self._stages.run(samples, lambda at: self._where(places, at))

    def _where(self, places: Places, at: int) -> str:
        shard, row, reader = int(places.shard[at]), int(places.row[at]), self._reading.reader
        if isinstance(reader, MixtureReader):
            assert places.origin is not None
            url = reader.sources[int(places.origin.source[at])].definition.listing.stat(shard).url
        else:
            url = reader.pool.url(shard)
        return f"sample {row} of shard {shard}: {url}"


class FilteredPasses:
    """The passes of a Loader with filter stages, and where its rank is."""

    def __init__(self, dataset: PlannedDataset, stages: Stages, steps: int | None, making: Making) -> None:
        self._dataset = dataset
        self._stages = stages
        self._steps = steps
        self._making = making
        self._loaded: tuple[Base, Point] | None = None
        self._at: tuple[Start, Point | None] | None = None  # of the pass begun last
        self._running: tuple[Pipeline[Any, Any], Pipeline[Any, Any]] | None = None
        self._read_times, self._made_times = StageTimes(), StageTimes()

    def __len__(self) -> int:
        if self._steps is None:
            raise CountsUnknown("how many batches filter stages leave is not known", hint="Loader(steps=N) fixes it")
        return self._steps

    def check(self) -> None:
        """Raise ``ConfigError`` where ranks would differ in the number of their batches."""
        world = self._dataset.rule.place.world
        if world > 1 and self._steps is None:
            raise ConfigError(
                f"filter stages leave each of the {world} ranks another number of batches",
                hint="Loader(steps=N) gives all of them N an epoch; ShardDataset(where=...) filters without that",
            )

    def read(self, claim: Start | None) -> Iterator[Any]:
        """This rank's batches of the pass."""
        transfer = self._making.transfer
        self._stages.open()
        with self._dataset.begin_pass(claim, threads=self._making.threads) as reading:
            start = reading.progress.start
            point = self._taken(start)
            self._at = (start, point)
            first, second = self._running = self._pipelines(reading, point)
            self._read_times, self._made_times = first.times, second.times
            over = False
            try:
                for made in second:
                    if isinstance(made, _Ended):
                        raise made.error
                    over = made.then is None
                    self._hand_out(reading, made.then)
                    yield made.batch if transfer is None else transfer.receive(made.batch)
                    del made
                if second.cut_off and not over:
                    raise NearflashError(CUT_OFF, hint="go on with the iterator that was made last")
                self._at = (start, None)
                reading.finished()
            finally:
                close_all(first, second)
                if self._running is not None and self._running[0] is first:
                    self._running = None
                if transfer is not None:
                    transfer.close()

    def _hand_out(self, reading: Reading, then: Point | None) -> None:
        """The user is about to get a batch, and is then at that point."""
        self._at = (reading.progress.start, then)
        if then is not None and then.round == 0 and then.batch > 0:
            reading.handed_out(then.batch - 1, 1, 1)

    def _pipelines(self, reading: Reading, point: Point) -> tuple[Pipeline[Any, Any], Pipeline[Any, Any]]:
        rule, plan, making = self._dataset.rule, reading.plan, self._making
        room = max(making.room // 2, 1)
        first: Pipeline[Part, Kept] = Pipeline(
            parts(reading, point, rounds=self._steps is not None or rule.pad),
            _Reader(Staged(reading, self._stages), marks=self._steps is not None or rule.pad),
            threads=making.threads,
            window=Window(4 * making.threads, room),
            cost=lambda kept: tensor_bytes(kept.samples),
            interrupt=self._stages.interrupt,
        )
        refill = Refill(
            _uncut(first),
            point,
            whole=point == Point() and plan.position == 0,
            earlier=plan.earlier,
            size=rule.share,
            steps=self._steps,
            short=not rule.drop_last and not rule.pad,
            fill=rule.pad,
        )
        second: Pipeline[Full | _Ended, _Made | _Ended] = Pipeline(
            _with_end(refill),
            _Joiner(making),
            threads=_JOINERS,
            window=Window(_READY, room),
            cost=_cost,
            interrupt=first.close,
        )
        return first, second

    def _taken(self, start: Start) -> Point:
        """The point that was loaded for this pass; used once."""
        loaded, self._loaded = self._loaded, None
        return loaded[1] if loaded is not None and (start.base, start.number) == (loaded[0], 0) else Point()

    def stop(self) -> None:
        """Let a pass that is under way hand out nothing more, without waiting. Idempotent."""
        for pipeline in self._running or ():
            pipeline.stop()

    def close(self) -> None:
        """Stop a pass that is under way. Idempotent."""
        running, self._running = self._running, None
        if running is not None:
            close_all(*running)

    @property
    def times(self) -> StageTimes:
        read, made = self._read_times, self._made_times
        return StageTimes(read.planning, read.working + made.working, read.full, made.empty)

    # --- where the rank is ---

    def state_dict(self) -> dict[str, Any]:
        """See :mod:`loader.stages_filter`."""
        dataset, at, loaded = self._dataset, self._at, self._loaded
        point = Point()
        if at is not None and dataset.is_latest(at[0]):
            start, then = at
            settings = start.base.settings
            if then is None:
                base = Base(start.epoch + 1, 0, settings)
            else:
                point = then
                position = start.position + then.batch * dataset.rule.global_batch
                base = Base(start.epoch, position, settings, start.stop)
            state = dataset.definition.state(base)
        else:
            state = dataset.state_dict()
            following = dataset.next_start
            if loaded is not None and (following.base, following.number) == (loaded[0], 0):
                point = loaded[1]
        return {**state, FIELD: point_to_dict(point, dataset.rule)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        dataset = self._dataset
        own = dict(state)
        raw = own.pop(FIELD, None)
        point = Point() if raw is None else point_from_dict(raw, dataset.rule)
        if self._steps is not None and point.given >= self._steps:  # it has them all: the next epoch comes
            base = dataset.definition.base(own)
            own, point = dataset.definition.state(Base(base.epoch + 1, 0, base.settings)), Point()
        dataset.load_state_dict(own)
        self._at = None
        base = dataset.next_start.base
        # with another batch size the rest of the epoch may be too short for a batch: then the next one begins
        stays = dataset.definition.base(own) == base
        self._loaded = (base, point) if stays else None


@dataclass(frozen=True)
class _Made:
    batch: Any
    then: Point | None


@dataclass(frozen=True)
class _Ended:
    """The error that comes in place of the next batch."""

    error: BaseException


class _Reader:
    """Reads a part; any number of threads at once. ``marks``: whether samples say if they are repeats."""

    def __init__(self, staged: Staged, *, marks: bool) -> None:
        self._staged = staged
        self._marks = marks

    def __call__(self, part: Part) -> Kept:
        samples, numbers = self._staged.samples(part.batch, part.stamp, part.places)
        for sample in samples:
            if isinstance(sample, Sample):
                sample.stamp = None  # they come in other batches than the plan's
        if self._marks:
            repeat = part.places.repeat
            repeats = np.zeros(len(numbers), np.bool_) if repeat is None else repeat[numbers]
            for sample, marked in zip(samples, repeats.tolist(), strict=True):
                if isinstance(sample, dict):
                    sample[REPEAT] = marked
        return Kept(part.round, part.batch, part.last, samples)


class _Joiner:
    """Makes a batch; any number of threads at once."""

    def __init__(self, making: Making) -> None:
        self._making = making
        self._collate = making.collate or collate

    def __call__(self, full: Full | _Ended) -> _Made | _Ended:
        if isinstance(full, _Ended):
            return full
        with allocating(self._making.slots.allocate):
            batch = self._collate(full.samples)
        transfer = self._making.transfer
        return _Made(batch if transfer is None else transfer.send(batch), full.then)


def _uncut(kept: Pipeline[Part, Kept]) -> Iterator[Kept]:
    """What a pipeline gives, and an error if it was stopped: what came until then is not all there is."""
    yield from kept
    if kept.cut_off:
        raise NearflashError(CUT_OFF)


def _with_end(refill: Refill) -> Iterator[Full | _Ended]:
    """The batches, and the error that ends them as the last item: it has said where it was raised already."""
    try:
        yield from refill
    except GeneratorExit:
        raise
    except BaseException as e:  # noqa: BLE001 - whatever it is, it is raised to the consumer
        yield _Ended(e)


def _cost(made: _Made | _Ended) -> int:
    if isinstance(made, _Ended):
        return 0
    return tensor_bytes(made.batch.source if isinstance(made.batch, Sent) else made.batch)
