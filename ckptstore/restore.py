"""Loads a step: bytes from segments straight into the tensors they belong to, every digest checked.

:func:`load_step` is one rank's work on one step. :func:`load_together` is the ranks' agreement on which step that is:
the coordinator names one, all try, and a step that turns out to be damaged on any rank is given up by all together
for the one before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct

from cachefs.errors import CheckpointDamaged, CheckpointMismatch, NotFound, RankFailed
from cachefs.hashing import tensor_digest

from .bind import ABSENT, Binder, Fill
from .boxes import byte_range
from .catalog import read_catalog
from .dtypes import itemsize
from .layout import StepRef
from .parallel import WORKERS, run_bounded
from .ranks import EVERYBODY, Meeting, Round, leave
from .reads import ChunkRead, Group, plan_reads
from .records import Done, Failure, failure_of
from .storage import Storage
from .structure import Selector, children

logger = logging.getLogger(__name__)

TRIES = 8
"""How many steps are tried, each but the last found damaged, before a load gives up."""


@dataclass(frozen=True)
class LoadOptions:
    """What of a step is loaded, and how strictly."""

    selected: Selector
    strict: bool = True
    allow_pickle: bool = False
    parallel: int = WORKERS


def load_step(
    storage: Storage, ref: StepRef, rank: int, template: dict[Any, Any] | None, options: LoadOptions
) -> dict[Any, Any]:
    """Load one step on this rank into ``template`` (``None``: everything is made anew); returns the state.

    Everything that does not fit is found before a byte is written to the caller's memory; a wrong digest is found
    after, so then what was to be filled is undefined. Raises :class:`CheckpointMismatch`,
    :class:`CheckpointDamaged` that names tensor, file and byte, or the storage's error.
    """
    catalog = read_catalog(storage, ref)
    binder = Binder(catalog, rank, options.selected, strict=options.strict, allow_pickle=options.allow_pickle)
    state: dict[Any, Any] = binder.bind(ABSENT if template is None else template)
    binder.check()
    if not options.selected.all and not state:
        there = ", ".join(child.name for child in children(catalog.structure, "") or ())
        raise CheckpointMismatch(f"only={options.selected.patterns} names nothing in {ref}", hint=f"there are {there}")
    if binder.taken_over:
        logger.warning(
            "%s: rank %d takes over from rank %d, of %d that saved: %s",
            ref,
            rank,
            catalog.source_rank(rank),
            catalog.root.world_size,
            ", ".join(binder.taken_over[:8]),
        )
    fill(storage, binder.fills, parallel=options.parallel)
    binder.finish()
    return state


def fill(storage: Storage, fills: list[Fill], *, parallel: int = WORKERS) -> None:
    """Read all that is asked for, a few groups of chunks at a time, and check every digest."""
    groups = plan_reads([(f.stored, f.view.box) for f in fills])
    with torch.no_grad():
        for _ in run_bounded(lambda group: _read_group(storage, group, fills), groups, workers=parallel):
            pass


def _read_group(storage: Storage, group: Group, fills: list[Fill]) -> None:
    try:
        if len(group.reads) == 1:
            read = group.reads[0]
            place = _in_place(read, fills)
            if place is not None:
                storage.read_into(group.file, group.start, place)
                _check(storage, read, place)
                return
        data = memoryview(storage.read_range(group.file, group.start, group.end)).cast("B")
    except NotFound as e:
        raise CheckpointDamaged(
            "the segment is missing", url=storage.describe(group.file), hint=f"tensor {group.reads[0].name!r}"
        ) from e
    for read in group.reads:
        piece = data[read.chunk.start - group.start : read.chunk.end - group.start]
        _check(storage, read, piece)
        _scatter(read, piece, fills)


def _check(storage: Storage, read: ChunkRead, data: memoryview) -> None:
    if tensor_digest(data) != read.chunk.digest:
        raise CheckpointDamaged(
            f"the digest of tensor {read.name!r} is wrong",
            url=storage.describe(read.chunk.file),
            offset=read.chunk.start,
        )


def _in_place(read: ChunkRead, fills: list[Fill]) -> memoryview | None:
    """The target's own memory, where a chunk goes there whole, once, and in one run of bytes."""
    if len(read.uses) != 1 or read.uses[0].region != read.chunk.box:
        return None
    view = fills[read.uses[0].target].view
    local = view.local
    run = byte_range(read.chunk.box, view.box, itemsize(read.dtype))
    if run is None:
        return None
    flat: Any
    if isinstance(local, np.ndarray):
        if not local.flags.c_contiguous:
            return None
        flat = local.reshape(-1).view(np.uint8)
    else:
        if not _is_plain(local) or not local.is_contiguous():
            return None
        flat = local.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)[run[0] : run[1]]


def _scatter(read: ChunkRead, data: memoryview, fills: list[Fill]) -> None:
    chunk = read.chunk.box
    raw = _raw_type(itemsize(read.dtype))
    source = np.frombuffer(data, raw).reshape(chunk.shape)
    for use in read.uses:
        view = fills[use.target].view
        inside, outside = use.region.relative_to(chunk).slices(), use.region.relative_to(view.box).slices()
        if isinstance(view.local, np.ndarray):
            view.local.view(raw)[outside] = source[inside]
        elif _is_plain(view.local):
            view.local.view(_RAW_TORCH[raw.itemsize]).numpy().view(raw)[outside] = source[inside]
        else:
            bytes_ = torch.from_numpy(source[inside].copy().reshape(-1).view(np.uint8))
            view.local[outside].copy_(bytes_.view(view.local.dtype).view(use.region.shape))


# Elements are moved as integers of their size: numpy has no bfloat16 or float8, and a NaN must keep its bits.
_RAW_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _raw_type(size: int) -> np.dtype[Any]:
    return np.dtype(f"i{size}") if size in (1, 2, 4, 8) else np.dtype(f"V{size}")


def _is_plain(local: torch.Tensor) -> bool:
    """Whether a tensor's memory is what its elements are, in reach of this process."""
    return local.device.type == "cpu" and not local.is_conj() and not local.is_neg()


class _Pick(Struct, frozen=True, tag=True):
    step: int
    generation: int


def load_together(
    meeting: Meeting,
    conversation: Round,
    candidates: Callable[[], Iterator[StepRef]],
    load: Callable[[StepRef], Any],
    *,
    fallback: bool,
) -> tuple[StepRef | None, Any]:
    """Load the first of the coordinator's ``candidates`` that is sound on every rank; returns it and this rank's state.

    ``candidates`` is called on the coordinator only, and raises what is to be raised everywhere; if it offers nothing,
    the result is ``(None, None)``. Without ``fallback`` the first one must do. The coordinator says which step; every
    rank says how that went; and so on, until it says that all is done, or what the matter is.
    """
    picks = _Picks(candidates, fallback)
    error: BaseException | None = None
    state: Any = None
    ref: StepRef | None = None
    try:
        for turn in range(TRIES + 1):
            if meeting.coordinator:
                heard = [_decode(data) for data in conversation.hear(f"got{turn - 1}")] if turn else []
                conversation.say(f"pick{turn}", EVERYBODY, msgspec.msgpack.encode(picks.next(heard, error)))
            answer = _decode(conversation.read(f"pick{turn}", EVERYBODY))
            if isinstance(answer, Done):
                return ref, state
            if isinstance(answer, Failure):
                raise error or answer.error()
            ref, error = StepRef(answer.step, answer.generation), None
            outcome: Done | Failure = Done()
            try:
                state = load(ref)
            except Exception as e:  # noqa: BLE001 - the other ranks must hear of it first; then it is raised
                error, outcome = e, failure_of(e)
            conversation.tell(f"got{turn}", msgspec.msgpack.encode(outcome))
        raise error or RankFailed("the ranks did not agree on a step")
    finally:
        leave(conversation, [f"got{i}" for i in range(TRIES + 1)], [f"pick{i}" for i in range(TRIES + 1)])


class _Picks:
    """The coordinator's side: which step next, or what to say instead."""

    def __init__(self, candidates: Callable[[], Iterator[StepRef]], fallback: bool) -> None:
        self._candidates = candidates
        self._fallback = fallback
        self._offered: Iterator[StepRef] | None = None
        self._turns = 0

    def next(self, heard: list[Any], own: BaseException | None) -> _Pick | Done | Failure:
        failed = [(rank, answer) for rank, answer in enumerate(heard) if isinstance(answer, Failure)]
        if heard and not failed:
            return Done()
        if failed:
            rank, failure = failed[0]
            damaged = all(answer.kind == CheckpointDamaged.__name__ for _, answer in failed)
            if len(heard) > 1 and not damaged:
                failure = failure_of(RankFailed(f"rank {rank}: {failure.kind}: {failure.error()}"))
            if not (damaged and self._fallback and self._turns < TRIES):
                return failure
            logger.warning("damaged, trying the checkpoint before it: %s", failure.error())
        self._turns += 1
        try:
            self._offered = self._candidates() if self._offered is None else self._offered
            ref = next(self._offered, None)
        except Exception as e:  # noqa: BLE001 - the other ranks must hear of it; it is raised here as there
            return failure_of(e)
        if ref is not None:
            return _Pick(ref.step, ref.generation)
        return failed[0][1] if failed else Done()


def _decode(data: bytes) -> _Pick | Done | Failure:
    answer: _Pick | Done | Failure = msgspec.msgpack.decode(data, type=_Pick | Done | Failure)
    return answer
