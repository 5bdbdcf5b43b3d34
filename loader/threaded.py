"""Whole batches without worker processes: :class:`Loader`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cachefs.errors import ConfigError, NearflashError

from .batched import RUN_BYTES, TokenGather, batch_reader, token_gather
from .collation import allocating, collate
from .columnruns import ColumnRuns, Cut, Memory, OneByOne, reads_runs
from .gathered import GatheredRun
from .groups import Groups, Many, group_bytes
from .pipeline import Pipeline, StageTimes, Window
from .sample import Stamp
from .slots import Slots
from .stages import Stage, Stages
from .stages_passes import CUT_OFF, FilteredPasses, Making, Staged
from .stages_state import common_state
from .transfer import SideStream, Transfer, tensor_bytes

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from .batched import Batches
    from .epochcell import Start
    from .passes import Run
    from .planned import PlannedDataset
    from .reading import Reading
    from .samples import Places

PREFETCH_BYTES = 128 << 20
_MOST_THREADS = 8
_RUNS_AHEAD = 3
"""Runs that are ready or in work: few, so that their buffers stay in the processor's cache."""


class Loader:
    """Iterates the batches of a data set, made ahead by threads: no worker processes, no copies between processes.

    ``dataset``: a :class:`loader.ShardDataset`, whose batch size, order, epochs and states hold here as well.
    ``threads``: how many read, decode and transform side by side (default: the cores, at most 8; token files are
    gathered by one). Image decoders and numpy release the interpreter's lock, so they scale; a transform in pure
    Python does not: use ``torch.utils.data.DataLoader`` with workers for that. ``prefetch``: bytes of batches that may
    be ready ahead. ``device``: a CUDA device to which batches are copied on a stream of their own; ``pin_memory``
    (implied by it) makes them in page-locked memory. ``collate_fn``: as in :meth:`ShardDataset.batched`. ``stages``:
    what is done with each sample before batches are made (:mod:`loader.stages`); with a :class:`loader.Filter` among
    them, ``steps`` is how many batches an epoch has (:mod:`loader.stages_filter`).

    Batches come in the data set's order, in buffers that are used again once nothing refers to a batch any more. An
    exception from reading or a transform is raised where its batch would have come, with a note of the stage. Leaving
    the loop early stops the threads; :meth:`close` does so too.

    A loader is iterated by one thread at a time. :meth:`state_dict` says where the *user* is: what was made ahead and
    not handed out is not counted.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        *,
        threads: int | None = None,
        prefetch: int = PREFETCH_BYTES,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        transfer: Transfer | None = None,
        stages: Sequence[Stage] = (),
        steps: int | None = None,
    ) -> None:
        for name, value in (("threads", threads), ("prefetch", prefetch), ("steps", steps)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"Loader({name}={value!r}) is not a positive number")
        self.dataset = dataset
        self._threads = threads if threads is not None else min(os.cpu_count() or 1, _MOST_THREADS)
        self._prefetch = prefetch
        self._collate = collate_fn
        self._transfer = transfer if transfer is not None else _transfer_to(device)
        pin = (pin_memory or device is not None) and torch.cuda.is_available()
        self._slots = Slots(most=prefetch, pin=pin)
        self._stages = Stages(stages)
        if steps is not None and not self._stages.filters:
            raise ConfigError(f"Loader(steps={steps}) without a filter stage", hint="its batches are the data set's")
        making = Making(self._readers, prefetch, collate_fn, self._slots, self._transfer)
        self._filtered = FilteredPasses(dataset, self._stages, steps, making) if self._stages.filters else None
        self._running: Pipeline[Any, Many] | None = None
        self._times = StageTimes()

    def __len__(self) -> int:
        """Batches in a whole epoch: the same for every rank. Raises ``CountsUnknown`` where filter stages decide it."""
        return self.dataset.steps if self._filtered is None else len(self._filtered)

    @property
    def filters(self) -> bool:
        """Whether it has filter stages, so that its batches are not the data set's."""
        return self._filtered is not None

    @property
    def _readers(self) -> int:
        """Threads that read: some more where they wait for processes."""
        return self._threads + self._stages.processes

    def batched(self) -> Batches:
        """The same batches as a data set, for code that wants a ``DataLoader`` of one. Without stages only."""
        if len(self._stages):
            raise ConfigError("batched() would leave out the stages", hint="iterate the Loader itself")
        return self.dataset.batched(self._collate)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches of the next pass."""
        self._stop()
        if self._filtered is not None:
            self._filtered.check()
            return self._filtered.read(self.dataset.claim_pass())
        return self._read(self.dataset.claim_pass())

    def _read(self, claim: Start | None) -> Iterator[Any]:
        self._stages.open()
        with self.dataset.begin_pass(claim, threads=self._readers) as reading:
            pipeline = self._pipeline(reading)
            self._running, self._times = pipeline, pipeline.times
            try:
                for many in pipeline:
                    for batch, (number, size) in many:
                        reading.handed_out(number, size, size)
                        yield batch if self._transfer is None else self._transfer.receive(batch)
                    del many, batch
                if pipeline.cut_off and not reading.plan.is_over(reading.progress.batches):
                    raise NearflashError(
                        CUT_OFF,
                        hint="go on with the iterator that was made last",
                    )
                reading.finished()
            finally:
                pipeline.close()
                if self._running is pipeline:
                    self._running = None
                if self._transfer is not None:
                    self._transfer.close()

    def _pipeline(self, reading: Reading) -> Pipeline[Any, Many]:
        if len(self._stages):
            return self._grouped(reading, self._staged(reading))
        gather = token_gather(reading, self._collate)
        if gather is None and self._collate is None and reads_runs(reading):
            columns = _TableRun(reading, self._slots, self._transfer)
            return Pipeline(
                columns.planned(),
                columns,
                threads=self._threads,
                window=Window(4 * self._threads, self._prefetch),
                cost=_cost,
            )
        if gather is None:
            return self._grouped(reading, batch_reader(reading, self._collate))
        return Pipeline(
            reading.runs(max(1, RUN_BYTES // max(gather.sample_bytes, 1))),
            _TokenRun(gather, self._slots, self._transfer),
            threads=2,  # one gathers, which is bound by memory; the other decides meanwhile what comes next
            window=Window(_RUNS_AHEAD, self._prefetch),
            cost=_cost,
        )

    def _staged(self, reading: Reading) -> Callable[..., Any]:
        """What makes one batch of a pass, behind the stages."""
        staged, joined = Staged(reading, self._stages), self._collate or collate
        return lambda batch, stamp, places: joined(staged.samples(batch, stamp, places)[0])

    def _grouped(self, reading: Reading, whole: Callable[..., Any]) -> Pipeline[Any, Many]:
        groups, threads = Groups(whole, self._slots, self._transfer, self._prefetch), self._readers
        window = Window(4 * threads, self._prefetch)
        return Pipeline(
            groups.of(reading.batches()),
            groups,
            threads=threads,
            window=window,
            cost=_cost,
            interrupt=self._stages.interrupt if self._stages.processes else None,
        )

    def close(self) -> None:
        """Stop the threads of a pass that is under way, and the stages' processes. Idempotent; the loader can be
        iterated again."""
        if self._filtered is not None:
            self._filtered.stop()
        elif self._running is not None:
            self._running.stop()
        self._stages.close()  # before threads are waited for: they may wait for the processes
        self._stop()

    def _stop(self) -> None:
        if self._filtered is not None:
            self._filtered.close()
        running, self._running = self._running, None
        if running is not None:
            running.close()

    @property
    def times(self) -> StageTimes:
        """Where the time of the latest pass went."""
        return self._times if self._filtered is None else self._filtered.times

    # --- where the user is: the data set's own ---

    def set_epoch(self, epoch: int) -> None:
        """As :meth:`ShardDataset.set_epoch`."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`ShardDataset.state_dict`: the batches handed out so far are used. With filter stages it is this
        rank's own (:mod:`loader.stages_filter`)."""
        return self.dataset.state_dict() if self._filtered is None else self._filtered.state_dict()

    @staticmethod
    def common_state(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One state for all ranks, of any number, from those of all ranks of a Loader with filter stages."""
        return common_state(states)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As :meth:`ShardDataset.load_state_dict`; a pass that is under way ends."""
        self._stop()
        if self._filtered is not None:
            self._filtered.load_state_dict(state)
            return
        self.dataset.load_state_dict(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Loader of {self.dataset!r}, {self._threads} thread(s)>"


def _transfer_to(device: torch.device | str | None) -> Transfer | None:
    if device is None:
        return None
    place = torch.device(device)
    if place.type == "cpu":
        return None
    if place.type != "cuda":
        raise ConfigError(f"Loader(device={str(place)!r}) is neither a CPU nor a CUDA device")
    return SideStream(place)


def _cost(many: Many) -> int:
    if isinstance(many, GatheredRun):
        return tensor_bytes(many.whole)
    return many.nbytes if isinstance(many, Cut | OneByOne | _SentRun) else group_bytes(many)


class _TokenRun:
    """Gathers a run of batches in one call."""

    def __init__(self, gather: TokenGather, slots: Slots, transfer: Transfer | None) -> None:
        self._gather = gather
        self._slots = slots
        self._transfer = transfer

    def __call__(self, run: Run) -> Many:
        gathered = GatheredRun(self._gather.gather(run.places, self._slots.allocate), run)
        if self._transfer is None:
            return gathered  # cut by the consumer, while the next run is being gathered
        send = self._transfer.send
        return [(send(batch), of) for batch, of in gathered]


class _TableRun:
    """Reads a run of batches column by column."""

    def __init__(self, reading: Reading, slots: Slots, transfer: Transfer | None) -> None:
        self._one = batch_reader(reading, None)
        self._slots = slots
        self._transfer = transfer
        self._runs = ColumnRuns(reading, self._whole, Memory(run=slots.allocate))
        self.planned = self._runs.planned

    def __call__(self, run: Run) -> Many:
        with allocating(self._slots.allocate):
            made = self._runs(run)
        return made if self._transfer is None else _SentRun(made, self._transfer)

    def _whole(self, number: int, stamp: Stamp, places: Places) -> Any:
        """A batch that is made by the consumer."""
        try:
            with allocating(self._slots.allocate):
                return self._one(number, stamp, places)
        except Exception as e:  # whatever it is, it is told as if a thread had made the batch ahead
            e.add_note("in the loader's reading stage")
            raise


class _SentRun:
    """A run of batches on their way to a device; those that are made later are sent later."""

    def __init__(self, made: Cut | OneByOne, transfer: Transfer) -> None:
        self.nbytes = made.nbytes
        sent = ((transfer.send(batch), of) for batch, of in made)
        self._sent: Many = list(sent) if isinstance(made, Cut) else sent

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sent)
