"""From where the user is to a state and back: what ``state_dict`` and its relatives compute. No reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cachefs.errors import StateError

from .epochcell import Base, Start
from .passes import PassPlan
from .plannable import Plannable
from .sample import Stamp
from .state import passed
from .statefields import MOST
from .statefields import WORKER as WORKER
from .workers import Worker


@dataclass
class Progress:
    """How far the pass that this process reads has been handed out: whole batches, and samples of the next one."""

    start: Start
    plan: PassPlan[Any]
    batches: int = 0
    samples: int = 0


def base_from_dict(definition: Plannable, raw: Mapping[str, Any]) -> Base:
    """The base that a state names, checked against the data. Raises ``StateError``."""
    # with another batch size the rest of the epoch may be too short for a batch: then go on in the next one
    return after_batches(definition, Start(0, 0, definition.base(raw)), 0)


def after_batches(definition: Plannable, start: Start, batches: int) -> Base:
    """Where a run goes on that has used ``batches`` whole batches since ``start``, over the ends of epochs."""
    if batches < 0:
        raise StateError(f"state_at({batches}): a number of batches cannot be negative")
    settings = start.base.settings
    epoch, position = start.epoch, start.position
    rule = definition.rule
    if start.stop is not None and rule.place.world == 1:  # many ranks end where batches do
        plan = definition.plan(start)
        if plan.has(batches):
            return Base(epoch, position + batches * rule.global_batch, settings, start.stop)
        epoch, position, batches = epoch + 1, 0, batches - plan.batches
    ahead = (batches + 1) * rule.global_batch
    order = definition.order(settings, epoch, first=position, upto=position + ahead)
    if order.complete and position >= order.total:
        epoch, position = epoch + 1, 0
        order = definition.order(settings, epoch, upto=ahead)
    epochs, position = passed(
        order,
        position,
        batches,
        rule.global_batch,
        world=rule.place.world,
        drop_last=rule.drop_last,
        pad=rule.pad,
        usual=lambda: definition.usual_total(order),
    )
    return Base(epoch + epochs, position, settings)


def after_progress(definition: Plannable, progress: Progress) -> Base:
    """Where a run goes on that has used what ``progress`` says. Raises ``StateError`` within a batch of many ranks."""
    plan = progress.plan
    if progress.samples == 0:
        return after_batches(definition, progress.start, progress.batches)
    if plan.rule.place.world > 1:
        raise StateError(
            f"a state between two samples of one batch cannot be shared by {plan.rule.place.world} ranks",
            hint="save after a whole number of batches",
        )
    position = progress.start.position + progress.batches * plan.rule.global_batch + progress.samples
    if not plan.latest.complete and plan.stop is None:
        raise StateError(
            "a state between two samples of one batch has to say where the epoch's last batch ends, and not all shards "
            "are counted yet",
            hint="save after a whole number of batches, or call count() before",
        )
    if position >= plan.end:
        return Base(plan.order.epoch + 1, 0, progress.start.base.settings)
    return Base(plan.order.epoch, position, progress.start.base.settings, plan.end)


def after_stamp(definition: Plannable, base: Base, stamp: Stamp) -> Base:
    """Where a run goes on that has used the batch with this stamp."""
    if stamp.stop is not None:
        over = stamp.end >= stamp.stop
        return Base(stamp.epoch + over, 0 if over else stamp.end, base.settings, None if over else stamp.stop)
    order = definition.order(base.settings, stamp.epoch, first=stamp.end, upto=stamp.end + 1)
    if order.complete and stamp.end >= order.total:
        return Base(stamp.epoch + 1, 0, base.settings)
    return after_batches(definition, Start(0, 0, Base(stamp.epoch, stamp.end, base.settings)), 0)


@dataclass(frozen=True)
class WorkerPart:
    """What a state says of one DataLoader worker: the batch of its pass that it reads next, or one of another's before.

    ``size``: samples in a global batch.
    """

    index: int
    count: int
    batch: int
    size: int

    @property
    def used(self) -> int:
        """How many batches of its share lie before that."""
        return -(-max(self.batch - self.index, 0) // self.count)


def worker_to_dict(definition: Plannable, progress: Progress, worker: Worker) -> dict[str, Any]:
    """One worker's own position: the pass it reads and the batch of it that it reads next.

    Raises ``StateError`` within a batch: then DataLoader deals other batches than the data set.
    """
    if progress.samples:
        raise StateError(
            f"a DataLoader worker's state after {progress.samples} sample(s) of a batch",
            hint="give DataLoader the data set's batch_size, or use DataLoader(dataset.batched(), batch_size=None)",
        )
    start = progress.start
    base = Base(start.epoch, start.position, start.base.settings, start.stop)
    out = definition.state(base)
    size = progress.plan.rule.global_batch
    out[WORKER] = {"index": worker.index, "count": worker.count, "batch": progress.batches, "size": size}
    return out


def worker_part(raw: Mapping[str, Any]) -> WorkerPart:
    """The worker's position in its state. Raises ``StateError``."""
    part = raw.get(WORKER)
    values = [part.get(name) if isinstance(part, Mapping) else None for name in ("index", "count", "batch", "size")]
    numbers = [value for value in values if isinstance(value, int) and 0 <= value <= MOST]
    if len(numbers) < len(values) or numbers[0] >= numbers[1] or not numbers[3]:
        raise StateError("the loader state's field 'worker' is not a worker's position")
    return WorkerPart(*numbers)


def worker_from_dict(definition: Plannable, raw: Mapping[str, Any], worker: Worker | None) -> int:
    """The batch at which this worker goes on; 0 for a state that is no worker's. Raises ``StateError``."""
    if raw.get(WORKER) is None:
        return 0
    if worker is None:
        raise StateError(
            "this is the state of one DataLoader worker",
            hint="load it where it was saved, or make a state that loads anywhere with state_from or state_after",
        )
    part = worker_part(raw)
    if (part.index, part.count) != (worker.index, worker.count):
        raise StateError(
            f"the state of worker {part.index} of {part.count} cannot be loaded in worker {worker.index} of "
            f"{worker.count}",
            hint="keep num_workers, or load dataset.state_from(state) into the data set: it fits any number",
        )
    size = definition.rule.global_batch
    if part.size != size:
        raise StateError(
            f"the state of a worker that read batches of {part.size} samples cannot be loaded where they have {size}",
            hint="keep batch_size and world size, or load dataset.state_from(state) into the data set",
        )
    return part.batch
