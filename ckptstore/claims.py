"""Who owns the store: generations, claimed once per attempt by a conditional create.

A claim is three acts, and their order is what makes it safe: (1) create ``generations/N.json``: from now on no older
generation acknowledges a step, because every commit looks for newer claims after its manifest is in place; (2) list:
whatever an older one acknowledged is seen; (3) create ``generations/N.start.json`` with the step to resume from,
which all ranks read. A step that an older generation commits after (2) is not in N's timeline.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import (
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointError,
    ConfigError,
    NearflashError,
    NotFound,
)

from .layout import GENERATIONS, StepRef, claim_name, parse_claim, parse_start, start_name
from .manifest import ClaimRecord, StartRecord, decode_claim, decode_start, encode_sealed
from .parallel import run_bounded
from .storage import TRIES, UNCLEAR, Storage, pause
from .timeline import find_step, latest_ref

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Claim:
    """An attempt's right to commit. ``parent`` and ``resume_step`` name the checkpoint that it resumes from (both
    ``None``: from nothing)."""

    generation: int
    attempt: str
    parent: int | None
    resume_step: int | None

    @property
    def resume(self) -> StepRef | None:
        """The checkpoint to load before the first step."""
        if self.parent is None or self.resume_step is None:
            return None
        return StepRef(self.resume_step, self.parent)


def default_attempt_id(
    environ: Mapping[str, str], *, nonce: str = "", draw: Callable[[], str] = lambda: secrets.token_hex(8)
) -> str:
    """The attempt id that a job's environment tells: equal on all its ranks, and on nobody else.

    ``TORCHELASTIC_RUN_ID`` with ``TORCHELASTIC_RESTART_COUNT``, else ``SLURM_JOB_ID`` with ``SLURM_RESTART_COUNT``
    and ``SLURM_STEP_ID``, else ``draw()``. torchrun without ``--rdzv-id`` says ``none``, which many runs share and
    which therefore counts as no id; and a fixed ``--rdzv-id`` is the same again when the job is started anew. So a
    job whose ranks can talk to each other lets one of them draw a ``nonce`` and hands the finished id round.
    """
    run, job = environ.get("TORCHELASTIC_RUN_ID", ""), environ.get("SLURM_JOB_ID", "")
    if run and run != "none":
        parts = ["torchelastic", run, environ.get("TORCHELASTIC_RESTART_COUNT", "0")]
    elif job:
        parts = ["slurm", job, environ.get("SLURM_RESTART_COUNT", "0"), environ.get("SLURM_STEP_ID", "")]
    else:
        parts = ["run", nonce or draw()]
        nonce = ""
    return ".".join(part for part in (*parts, nonce) if part)


def claim_generation(
    storage: Storage,
    attempt: str,
    *,
    start: StepRef | Literal["latest", "nothing"] = "latest",
    clock: Clock = SYSTEM_CLOCK,
) -> Claim:
    """Claim the next generation for ``attempt``, or find the claim it has.

    ``start`` is what the new generation resumes from: the newest verified checkpoint, a given one (to roll back on
    purpose), or nothing. It only counts for a new claim. One process per attempt claims; the others are told the
    result or use :func:`find_claim`. An attempt id must be of one run only: a second run with the same id would get
    the first one's claim, with the first one's start, and share its file names.

    Raises :class:`CheckpointConflict` if another attempt claims meanwhile or does not let up,
    :class:`CheckpointDamaged` if there are checkpoints and none verifies, and the storage's errors. All waits are
    bounded.
    """
    found = _find(storage, attempt)
    if found is None and isinstance(start, StepRef):
        find_step(storage, start.step, start.generation)  # before a generation is spent
    generation = found if found is not None else _claim_next(storage, attempt, clock)
    record = read_start(storage, generation)
    if record is None:
        parent = _choose_start(storage, generation, start)
        newest = newest_claim(storage)
        if newest > generation:
            raise overtaken(storage, generation)
        if newest < generation:
            raise CheckpointError(
                "the store does not list what was just written to it, so nothing can be known of earlier runs",
                url=storage.describe(claim_name(generation)),
                hint="some servers take // for /: write the URL without",
            )
        wanted = StartRecord(
            generation=generation,
            attempt=attempt,
            parent=parent.generation if parent else None,
            step=parent.step if parent else None,
        )
        name = start_name(generation)
        record = decode_start(create_record(storage, name, encode_sealed(wanted), clock), url=storage.describe(name))
    return Claim(generation, attempt, record.parent, record.step)


def find_claim(storage: Storage, attempt: str) -> Claim | None:
    """The claim of ``attempt`` once its start record is written, else ``None``. Claims nothing."""
    generation = _find(storage, attempt)
    record = read_start(storage, generation) if generation is not None else None
    return Claim(record.generation, attempt, record.parent, record.step) if record is not None else None


def read_claim(storage: Storage, generation: int) -> ClaimRecord | None:
    """Who claimed a generation; ``None`` if nobody did. Raises :class:`CheckpointDamaged`."""
    name = claim_name(generation)
    try:
        return decode_claim(storage.read(name), url=storage.describe(name))
    except NotFound:
        return None


def read_start(storage: Storage, generation: int) -> StartRecord | None:
    """A generation's start record; ``None`` if it has none (yet). Raises :class:`CheckpointDamaged`."""
    name = start_name(generation)
    try:
        return decode_start(storage.read(name), url=storage.describe(name))
    except NotFound:
        return None


def generations(storage: Storage) -> list[int]:
    """All generations that were ever claimed, oldest first."""
    numbers = {parse_claim(i.name) or parse_start(i.name) for i in storage.list(f"{GENERATIONS}/")}
    return sorted(number for number in numbers if number is not None)


def newest_claim(storage: Storage) -> int:
    """The newest generation claimed; 0 if there is none."""
    return max(generations(storage), default=0)


def overtaken(storage: Storage, generation: int) -> CheckpointConflict:
    """The error for an attempt that is no longer the newest."""
    return CheckpointConflict(
        f"generation {generation} has lost the store to generation {newest_claim(storage)}",
        url=storage.url,
        hint="another run has started on this store; this one must stop",
    )


def create_record(storage: Storage, name: str, data: bytes, clock: Clock = SYSTEM_CLOCK) -> bytes:
    """Create a record once; what stands there afterwards: ``data``, or what somebody else was faster with.

    An error may hide a success (a lost reply), so every outcome but a clear one is settled by reading back; if that
    shows nothing, the same bytes are tried again. Raises the storage's error when :data:`TRIES` are used up.
    """
    error: NearflashError | None = None
    for attempt in range(TRIES):
        pause(attempt, clock)
        try:
            if storage.create(name, data):
                return data
            error = None
        except UNCLEAR as e:
            error = e
        try:
            return storage.read(name)
        except NotFound:
            continue
        except UNCLEAR as e:
            error = e
    raise error or CheckpointError("is neither free nor taken", url=storage.describe(name))


def _claim_next(storage: Storage, attempt: str, clock: Clock) -> int:
    generation = newest_claim(storage)
    for _ in range(1000):  # each turn is lost to another attempt's claim
        generation += 1
        claim = ClaimRecord(generation=generation, attempt=attempt, created=clock.time())
        name = claim_name(generation)
        data = encode_sealed(claim)
        if create_record(storage, name, data, clock) == data:
            return generation
    raise CheckpointConflict("no generation could be claimed: others take every one", url=storage.url)


def _find(storage: Storage, attempt: str) -> int | None:
    """The generation that an attempt claimed, newest first."""
    if not attempt:
        raise ConfigError("an empty attempt id", hint="give a text that no other run of this job has")

    def owner(generation: int) -> str | None:
        try:
            record = read_claim(storage, generation)
        except CheckpointDamaged as e:  # it cannot be told whose it is, and it still counts as a claim
            logger.warning("%s", e)
            return None
        return record.attempt if record is not None else None

    numbers = list(reversed(generations(storage)))
    owners = run_bounded(owner, numbers)
    return next((g for g, name in zip(numbers, owners, strict=True) if name == attempt), None)


def _choose_start(storage: Storage, generation: int, start: StepRef | Literal["latest", "nothing"]) -> StepRef | None:
    if start == "nothing":
        return None
    if start == "latest":
        return latest_ref(storage, before=generation)
    return start
