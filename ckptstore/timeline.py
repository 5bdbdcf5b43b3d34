"""Which checkpoints count, and in which order.

Generations form timelines, as PostgreSQL uses the word: each starts from a checkpoint of an older one, or from
nothing. The live timeline is that of the newest generation that has a start record: its own steps, then those of its
parent up to the step it started from, and so on. So a generation that has committed nothing yet is at the step it
started from, and what a zombie of an older one commits afterwards is on another timeline. Going back on purpose is a
new generation with an older start.

:func:`walk` decides that, as a pure function of the listing and the start records; the rest reads. Reading claims
nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from cachefs.errors import CheckpointConflict, CheckpointDamaged, CheckpointNotFound, NotFound

from .layout import GENERATIONS, StepRef, parse_start, parse_step, start_name
from .manifest import decode_start
from .parallel import run_bounded
from .storage import TRIES, Storage
from .verify import Damage, is_committed, verify_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeline:
    """``live``: the checkpoints of the live timeline, newest first. ``others``: those of all other timelines, newest
    generation first. ``head``: the generation that decides; ``None`` in an empty store."""

    head: int | None
    live: tuple[StepRef, ...]
    others: tuple[StepRef, ...]


@dataclass(frozen=True)
class _Listing:
    """What one look at the store shows: step folders (committed or not), and which generations have a start."""

    steps: tuple[StepRef, ...]
    started: frozenset[int]

    @property
    def head(self) -> int | None:
        return max(self.started, default=None)


def walk(steps: Iterable[StepRef], head: int | None, start_of: Callable[[int], StepRef | None]) -> Iterator[StepRef]:
    """The checkpoints among ``steps`` on the timeline of generation ``head``, newest first.

    ``start_of`` gives what a generation started from; it is asked only for generations that are reached. A start
    that is not older than its generation ends the timeline (no honest writer makes one).
    """
    owned: dict[int, list[int]] = {}
    for ref in steps:
        owned.setdefault(ref.generation, []).append(ref.step)
    generation, limit = head, None
    while generation is not None:
        for step in sorted(owned.get(generation, ()), reverse=True):
            if limit is None or step <= limit:
                yield StepRef(step, generation)
        start = start_of(generation)
        if start is None or start.generation >= generation:
            return
        generation, limit = start.generation, start.step


def build_timeline(
    steps: Collection[StepRef], started: Collection[int], start_of: Callable[[int], StepRef | None]
) -> Timeline:
    """Sort committed steps into the live timeline and the others.

    The head is the newest generation that has a start record or has committed anything (the second matters only
    where start records were lost, for example by copying step folders alone).
    """
    head = max({ref.generation for ref in steps} | set(started), default=None)
    live = tuple(walk(steps, head, start_of))
    others = sorted(set(steps) - set(live), key=lambda ref: (ref.generation, ref.step), reverse=True)
    return Timeline(head, live, tuple(others))


def read_timeline(storage: Storage, *, before: int | None = None) -> Timeline:
    """All checkpoints of the store. ``before``: as if only generations older than that one existed.

    Costs one small read per step folder. An empty or absent store gives an empty timeline.
    """
    for listing in _settled(storage, before):
        committed = run_bounded(lambda ref: is_committed(storage, ref), listing.steps)
        steps = [ref for ref, there in zip(listing.steps, committed, strict=True) if there]
        timeline = build_timeline(steps, listing.started, _starts(storage, listing))
    return timeline


def committed_steps(storage: Storage) -> list[StepRef]:
    """The checkpoints of the live timeline, newest first; see :func:`read_timeline`."""
    return list(read_timeline(storage).live)


def latest_ref(
    storage: Storage,
    *,
    verify: bool = True,
    before: int | None = None,
    on_damage: Callable[[StepRef, list[Damage]], None] | None = None,
) -> StepRef | None:
    """The newest checkpoint of the live timeline; ``None`` if nothing was ever committed.

    With ``verify`` its root, its parts (size and digest) and the sizes of its segments are checked; a damaged step is
    reported (logged, and given to ``on_damage``) and the one before it is taken. Raises :class:`CheckpointDamaged` if
    there are checkpoints and none is sound: to start from nothing then is a person's decision. Raises
    :class:`CheckpointUnsupported` if a newer version wrote the newest one.
    """
    for listing in _settled(storage, before):
        found, damaged = _newest_sound(storage, listing, verify)
    for ref, damages in damaged:
        logger.warning("%s: %s is damaged and passed over: %s", storage.url, ref, damages[0])
        if on_damage is not None:
            on_damage(ref, damages)
    if found is None and damaged:
        raise CheckpointDamaged(
            f"no checkpoint is sound; the newest, {damaged[0][0]}: {damaged[0][1][0]}",
            url=storage.url,
            hint="look with 'ckptstore verify', or start again in an empty folder",
        )
    return found


def find_step(storage: Storage, step: int, generation: int | None = None) -> StepRef:
    """The checkpoint of ``step`` on the live timeline, or of one named generation on any.

    Raises :class:`CheckpointNotFound` with a list of what there is.
    """
    if generation is not None:
        ref = StepRef(step, generation)
        if is_committed(storage, ref):
            return ref
    timeline = read_timeline(storage)
    for ref in timeline.live:
        if ref.step == step and generation in {None, ref.generation}:
            return ref
    raise not_found(
        storage, timeline, f"there is no step {step}" + (f" of generation {generation}" if generation else "")
    )


def not_found(storage: Storage, timeline: Timeline, what: str) -> CheckpointNotFound:
    """The error for something that is not there, with a hint that lists what is."""
    if not timeline.live and not timeline.others:
        there = "the store is empty" if storage.exists() else "there is no such folder"
    else:
        shown = [str(ref.step) for ref in timeline.live[:20]]
        shown += ["..."] if len(timeline.live) > 20 else []
        shown += [f"{ref.step}@g{ref.generation}" for ref in timeline.others[:10]]
        there = f"there are {', '.join(shown)}"
    return CheckpointNotFound(what, url=storage.url, hint=there)


def _settled(storage: Storage, before: int | None) -> Iterator[_Listing]:
    """Look at the store, and again for as long as a generation started while the caller worked on the last look.

    What is found committed after a look is then known to have been so while that look's head was the newest: a
    zombie's step that came into place behind it is not taken for the head's. Gives up on a store that never rests.
    """
    for _ in range(TRIES):
        limit = before if before is not None else float("inf")
        folders = (parse_step(folder) for folder in storage.folders())
        steps = tuple(sorted(ref for ref in folders if ref is not None and ref.generation < limit))
        started = _started(storage, limit)
        yield _Listing(steps, started)
        if _started(storage, limit) == started:
            return
    raise CheckpointConflict("generations start faster than the store can be read", url=storage.url)


def _started(storage: Storage, limit: float) -> frozenset[int]:
    found = (parse_start(info.name) for info in storage.list(f"{GENERATIONS}/"))
    return frozenset(generation for generation in found if generation is not None and generation < limit)


def _newest_sound(
    storage: Storage, listing: _Listing, verify: bool
) -> tuple[StepRef | None, list[tuple[StepRef, list[Damage]]]]:
    """The newest checkpoint that is sound (or, without ``verify``, committed), and the damaged ones before it."""
    damaged: list[tuple[StepRef, list[Damage]]] = []
    for ref in _candidates(storage, listing):
        if not verify:
            if is_committed(storage, ref):
                return ref, damaged
            continue
        try:
            damages = verify_step(storage, ref, deep=False)
        except CheckpointNotFound:  # never committed, or deleted
            continue
        if not damages:
            return ref, damaged
        damaged.append((ref, damages))
    return None, damaged


def _candidates(storage: Storage, listing: _Listing) -> Iterator[StepRef]:
    """The live timeline over step folders of which it is not known yet whether they are committed."""
    lost = [ref for ref in listing.steps if ref.generation > (listing.head or 0)]
    head = max((ref.generation for ref in lost if is_committed(storage, ref)), default=listing.head)
    return walk(listing.steps, head, _starts(storage, listing))


def _starts(storage: Storage, listing: _Listing) -> Callable[[int], StepRef | None]:
    def start_of(generation: int) -> StepRef | None:
        if generation not in listing.started:
            return None
        name = start_name(generation)
        try:
            return decode_start(storage.read(name), url=storage.describe(name)).ref
        except NotFound as e:
            raise CheckpointDamaged("the start record has vanished", url=storage.describe(name)) from e

    return start_of
