"""States of torchdata's ``StatefulDataLoader`` as states of a data set: ``dataset.state_from``. No reading.

What is read here is what torchdata 0.8 to 0.11 saves. Without workers: the data set's own state under
``_dataset_state``. With workers: a *snapshot* of the state of each, taken when the loop had seen ``_snapshot_step``
batches, and how many it has seen since. Worker w of n has read batches w, w + n, ... of the pass; the loop takes them
in turn, so the workers' positions together say how many batches were used, and that it did take them in turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from cachefs.errors import StateError

from .epochcell import Base
from .plannable import Plannable
from .progress import WORKER, after_stamp, base_from_dict, worker_part
from .sample import Stamp

_SNAPSHOT: Final = "_snapshot"
_ALONE: Final = "_num_yielded"  # only in states that were saved without workers


def state_from(definition: Plannable, raw: Mapping[str, Any]) -> dict[str, Any]:
    """The plain state for what a ``StatefulDataLoader`` saved; a plain state is checked and given back.

    Raises ``StateError`` for anything else, and where the workers' positions do not fit together.
    """
    if isinstance(raw, Mapping) and _SNAPSHOT in raw:
        return definition.state(_joined(definition, raw))
    if isinstance(raw, Mapping) and _ALONE in raw:
        raw = _saved_by_dataset(raw)
    if isinstance(raw, Mapping) and WORKER in raw:
        raise StateError(
            "this is the state of one DataLoader worker", hint="pass the whole state that StatefulDataLoader saved"
        )
    return definition.state(base_from_dict(definition, raw))


def _joined(definition: Plannable, raw: Mapping[str, Any]) -> Base:
    """Where the run goes on that all workers' positions describe."""
    snapshot = _mapping(raw, _SNAPSHOT)
    workers = _mapping(snapshot, "_worker_snapshots")
    states = [_saved_by_dataset(_mapping(workers, f"worker_{number}")) for number in range(len(workers))]
    if not states:
        raise _unlike("without workers")
    start = {name: value for name, value in states[0].items() if name != WORKER}
    parts = [worker_part(state) for state in states]
    if any({name: value for name, value in state.items() if name != WORKER} != start for state in states) or any(
        (part.index, part.count, part.size) != (number, len(states), parts[0].size) for number, part in enumerate(parts)
    ):
        raise _unlike("whose workers read different passes")
    used = _number(snapshot, "_snapshot_step")
    if [part.used for part in parts] != [len(range(number, used, len(states))) for number in range(len(states))]:
        raise StateError(
            f"after {used} batches of the DataLoader its workers stand at batches {[part.batch for part in parts]}",
            hint="give DataLoader the data set's batch_size (or batched() and batch_size=None), and in_order=True",
        )
    base = base_from_dict(definition, start)
    end = base.position + (used + _number(raw, "_steps_since_snapshot")) * parts[0].size
    return after_stamp(definition, base, Stamp(base.epoch, end, parts[0].size, base.stop))


def _saved_by_dataset(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data set's state within the one that was saved without workers, or within one worker's."""
    state = raw.get("dataset_state", raw.get("_dataset_state"))
    if not isinstance(state, Mapping):
        raise _unlike("without a state of the data set")
    return state


def _mapping(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    if not isinstance(value, Mapping):
        raise _unlike(f"without {name!r}")
    return value


def _number(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _unlike(f"whose {name!r} is no number")
    return value


def _unlike(what: str) -> StateError:
    return StateError(
        f"this is a StatefulDataLoader's state {what}",
        hint="pass what StatefulDataLoader(dataset or dataset.batched()).state_dict() returned",
    )
