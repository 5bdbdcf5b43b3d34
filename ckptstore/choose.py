"""Which step is meant: the newest, a number, or one of a certain generation. Reads, and claims nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from cachefs.errors import ConfigError

from .layout import StepRef
from .storage import Storage
from .timeline import committed_steps, find_step, latest_ref, not_found, read_timeline
from .verify import verify_step

Step = int | StepRef | Literal["latest"]
"""A step of the live timeline, a step of any, or the newest that counts."""


def candidates(storage: Storage, step: Step) -> Iterator[StepRef]:
    """The step that is meant; for ``"latest"``, after the newest sound one those before it that are sound.

    Sound as far as manifests and sizes tell. Raises :class:`CheckpointNotFound` that lists what there is.
    """
    if isinstance(step, StepRef):
        yield find_step(storage, step.step, step.generation)
    elif step != "latest":
        if isinstance(step, bool) or not isinstance(step, int):
            raise ConfigError(f"step {step!r} is neither a number nor 'latest'")
        yield find_step(storage, step)
    else:
        newest = latest_ref(storage)
        if newest is None:
            raise not_found(storage, read_timeline(storage), "there is no checkpoint")
        yield newest
        yield from older_than(storage, newest)


def older_than(storage: Storage, ref: StepRef) -> Iterator[StepRef]:
    """The sound steps of the live timeline before ``ref``, newest first."""
    live = committed_steps(storage)
    for older in live[live.index(ref) + 1 :] if ref in live else ():
        if not verify_step(storage, older, deep=False):
            yield older


def named_or_newest(storage: Storage, step: int | None) -> StepRef:
    """A given step, else the newest, damaged or not. Raises :class:`CheckpointNotFound` that lists what there is."""
    timeline = read_timeline(storage)
    for ref in timeline.live:
        if step is None or ref.step == step:
            return ref
    raise not_found(storage, timeline, f"there is no step {step}" if step is not None else "there is no checkpoint")
