"""Data sets that are read by a plan: iterating them, their epochs, and where the user is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import IterableDataset

from cachefs.errors import StateError

from .batched import Batches
from .dealing import check_dealt
from .epochcell import Base, EpochCell, Start
from .passes import BatchRule
from .plannable import Plannable
from .progress import (
    Progress,
    after_batches,
    after_progress,
    after_stamp,
    base_from_dict,
    worker_from_dict,
    worker_to_dict,
)
from .reading import Reading
from .resharding import is_counted_by_accelerate, refuse_resharding
from .rowsamples import sample_lists
from .sample import Sample, Stamp
from .stages_state import refuse_points
from .state import MOST
from .stateful import state_from
from .teams import Team
from .workers import Worker, find_worker


class PlannedDataset(IterableDataset[Any]):
    """What every data set of this package does once it is defined: passes, epochs and states.

    Epochs advance by themselves: every pass is the next epoch, in every worker mode, also after one that was broken
    off. A pass begins where something is read from an iterator for the first time; with DataLoader workers, which read
    at once, where the iterator is made, also if nobody ever reads from it.
    """

    def __init__(self, definition: Plannable) -> None:
        super().__init__()
        self._definition = definition
        self._cell = EpochCell(words=definition.words)
        self.team = Team(self._cell, prepare=definition.workers_start)  #: for DataLoader's workers (loader.teams)
        self._iterations = 0  # how many iterators were made of it here, and where it was copied from
        self._claim: Start | None = None
        self._replaced: Start | None = None  # in a worker: the claim that a state was loaded over
        self._progress: Progress | None = None
        self._worker_first = 0  # loaded in this worker: the batch of its next pass at which it goes on

    # --- reading ---

    def __iter__(self) -> Iterator[Any]:
        """This rank's samples of the next pass (in a DataLoader worker: of the worker's batches)."""
        return self._read(self.claim_pass())

    def _read(self, claim: Start | None) -> Iterator[Any]:
        check_dealt(self._definition.rule, find_worker())
        with self.begin_pass(claim) as reading:
            samples = sample_lists(reading)
            for batch, stamp, places in reading.batches():
                for number, sample in enumerate(samples(batch, stamp, places), 1):
                    reading.handed_out(batch, number, stamp.size)
                    yield sample
            reading.finished()

    def batched(self, collate_fn: Callable[[Sequence[Any]], Any] | None = None) -> Batches:
        """The same pass as whole batches, for ``DataLoader(ds.batched(), batch_size=None)`` or by itself.

        ``collate_fn`` defaults to :func:`loader.collate`. Shares epochs and states with this data set.
        """
        return Batches(self, collate_fn)

    def claim_pass(self) -> Start | None:
        """In a DataLoader worker: the pass that was begun for its team, else the next one, begun as the others of the
        team do, whether or not it is ever read.

        Elsewhere ``None``: the pass begins with the first read. Frameworks make iterators to see whether that works, or
        to load a state into them, and make another one to read.
        """
        refuse_resharding(self._definition.place)
        self._iterations += 1
        worker, sent = self._worker(), self.team.take()
        if worker is None or sent is None:
            return None if worker is None else self._begin()
        self._cell.join(sent, worker)
        self._claim = sent
        return sent

    def _begin(self) -> Start:
        self._cell.own()
        self._claim = self._cell.begin(self._worker())
        return self._claim

    def _worker(self, ahead: int = 0) -> Worker | None:
        worker = find_worker()
        return None if worker is None else worker.in_iteration(self._iterations + ahead)

    def _has_read(self, claim: Start) -> bool:
        return self._progress is not None and self._progress.start == claim

    def begin_pass(self, claim: Start | None = None, *, threads: int = 1) -> Reading:
        """The pass that was claimed, else the next one, to be read by so many threads of this process.

        All of a team read the pass that it claimed, whatever the process that made it sets later; only a state that is
        loaded in the worker itself replaces it.

        What iterating this data set, its batches or a :class:`loader.Loader` uses.
        """
        if claim is None or claim is self._replaced:
            claim = self._begin()
        first, self._worker_first = self._worker_first, 0
        reading = Reading(self._definition, self._cell, claim, worker=find_worker(), first=first, threads=threads)
        self._progress = reading.progress
        return reading

    def __len__(self) -> int:
        """Samples that this rank yields in a whole epoch. Lists the data set if that is still to do.

        Raises ``CountsUnknown``, a ``TypeError``, while a data set that is counted as it is read (``loader.manifest``)
        has shards that are not: see :meth:`count` and :meth:`estimated_len`. The same holds for :attr:`steps`.
        """
        return self._definition.steps.samples(self._definition.rule.run)

    @property
    def total(self) -> int:
        """Samples in an epoch, over all ranks. Raises ``CountsUnknown`` where ``len`` does."""
        return self._definition.total

    @property
    def rule(self) -> BatchRule:
        """How an epoch is cut into batches, and which rank's part of each is read."""
        return self._definition.rule

    @property
    def steps(self) -> int:
        """Batches in a whole epoch, the same for every rank."""
        return self._definition.steps.batches

    def count(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Count all shards that are not yet, which fetches them. ``progress(counted, shards)`` is called now and then.

        Changes nothing of the order."""
        self._definition.count(progress)

    def estimated_len(self) -> int:
        """About how many samples this rank yields in a whole epoch: exact once all shards are counted."""
        definition = self._definition
        return definition.steps_of(definition.estimated_total()).samples(definition.rule.run)

    @property
    def skipped(self) -> int:
        """Damaged samples that were skipped, by this rank and its workers, since the data set was made."""
        return self._cell.bad()

    # --- where the user is ---

    @property
    def definition(self) -> Plannable:
        """What is read, apart from reading it."""
        return self._definition

    @property
    def next_start(self) -> Start:
        """Where the next pass begins."""
        self._cell.own()
        return self._cell.next_pass()

    def is_latest(self, start: Start) -> bool:
        """Whether that pass is the one begun last, and nothing was set since."""
        return self._cell.is_latest(start)

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        self._cell.own()
        return self._cell.next_pass().epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be ``epoch``; reaches persistent workers.

        Within the epoch that comes next anyway the position stays, so a resumed run may call it as a fresh one does.
        A DataLoader's iterator with workers keeps the epoch it was made for: what is set after that holds for the next
        one. To set the very epoch of an iterator that nothing was taken from yet changes nothing.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch <= MOST:
            raise StateError(f"set_epoch({epoch!r}): an epoch is a number from 0 to 2**48")
        refuse_resharding(self._definition.place)
        if is_counted_by_accelerate():
            return
        cell = self._cell
        cell.own()
        start = cell.next_pass()
        if self.team.awaits(epoch):
            return
        if start.epoch == epoch:
            base = Base(epoch, start.position, start.base.settings, start.stop)
        else:
            base = Base(epoch, 0, self._definition.begun(start.base.settings, epoch))
        cell.write(base)

    def state_dict(self) -> dict[str, Any]:
        """Where the user is, as a small JSON-able dict: what was handed out by iterating in this process is used.

        In a DataLoader worker: that worker's own position (StatefulDataLoader's protocol). In the process that owns a
        DataLoader with workers it is not known once they have begun a pass, until the next ``set_epoch`` or
        ``load_state_dict``: then raises ``StateError``; use :meth:`state_after` or :meth:`state_at`.
        """
        definition, cell, worker = self._definition, self._cell, find_worker()
        cell.own()
        progress = self._latest()
        if progress is not None:
            if worker is not None:
                return worker_to_dict(definition, progress, worker)
            return definition.state(after_progress(definition, progress))
        start = cell.next_pass()
        if start.number:
            raise StateError(
                "DataLoader workers read ahead, so this process does not know where the user is",
                hint="use state_after(batch) with collate_fn=loader.collate, or state_at(batches)",
            )
        return definition.state(after_batches(definition, start, 0))

    def _latest(self) -> Progress | None:
        """How far this process is in the pass begun last; ``None`` if that is not this process's."""
        claim, progress = self._claim, self._progress
        if claim is None or not (find_worker() is not None or self._cell.is_latest(claim)):
            return None
        if progress is not None and progress.start == claim:
            return progress
        return Progress(claim, self._definition.plan(claim), self._worker_first)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on where a state says, at any number of ranks and workers and any batch size.

        The state also says how the order is made (seed, lanes, shuffle ...), whatever this object was given. Raises
        ``StateError`` for the state of another data set. A DataLoader's iterator with workers that was made before is
        not the next pass.
        """
        refuse_points(state)
        worker = find_worker()
        first = worker_from_dict(self._definition, state, worker)
        base = base_from_dict(self._definition, state)
        cell = self._cell
        if worker is not None:
            self._adopt(base)
            self._worker_first = first
        else:
            cell.own()
            cell.write(base)
        self._progress = None

    def _adopt(self, base: Base) -> None:
        """In a DataLoader worker: the state counts for the pass it has begun and not read from, else for its next."""
        now, then, claim = self._worker(), self._worker(1), self._claim
        assert now is not None and then is not None
        self.team.take()
        if claim is not None and not self._has_read(claim) and self._cell.has_begun(claim, now):
            self._cell.adopt(base, now, claim)
            self._replaced = claim
        else:
            self._cell.adopt(base, then, None)

    def state_at(self, batches: int) -> dict[str, Any]:
        """The state after ``batches`` batches, counted over epochs from the last ``load_state_dict`` or ``set_epoch``
        (else from the beginning). Depends on nothing else, so it is right whatever workers have read ahead."""
        self._cell.own()
        start = Start(0, 0, self._cell.base())
        return self._definition.state(after_batches(self._definition, start, batches))

    def state_after(self, batch: Any) -> dict[str, Any]:
        """The state after a batch that ``loader.collate`` or :meth:`batched` made: the user has used that one."""
        of = batch[0] if isinstance(batch, list | tuple) and batch else batch
        stamp = getattr(of, "stamp", None)
        if stamp is None or not _is_batch(batch, stamp):
            raise StateError(
                "this batch does not say where it is from",
                hint="use DataLoader(collate_fn=loader.collate) or batched(), and transforms that return a dict; "
                "or state_at(batches)",
            )
        self._cell.own()
        return self._definition.state(after_stamp(self._definition, self._cell.base(), stamp))

    def state_from(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What a ``StatefulDataLoader`` over this data set saved, as a state that loads at any number of ranks and
        workers: pass it to :meth:`load_state_dict`, and none to the DataLoader."""
        return state_from(self._definition, state)

    # --- between processes ---

    def __getstate__(self) -> dict[str, Any]:
        team = Team(self._cell, prepare=self._definition.workers_start)
        if get_spawning_popen() is not None:
            self._definition.settle()
            team = self.team.copy_for(self._cell)
        return {**self.__dict__, "team": team, "_claim": None, "_progress": None}


def _is_batch(value: Any, stamp: Stamp) -> bool:
    """Whether this is a whole batch: torch's own collate makes one that keeps its first sample's type and stamp."""
    if isinstance(value, list | tuple) and value and isinstance(value[0], Sample):
        return len(value) == stamp.size
    if not isinstance(value, Sample):
        return True
    sizes = {len(part) for part in value.values() if isinstance(part, list) or getattr(part, "ndim", 0) > 0}
    return stamp.size == 1 or sizes == {stamp.size}
