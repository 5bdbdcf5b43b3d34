"""The facade: a store of checkpoints at one URL, as a training script sees it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import CheckpointError, ConfigError, NearflashError

from .choose import Step, candidates, older_than
from .layout import StepRef
from .ownership import Ownership
from .ranks import Meeting, find_meeting
from .restore import LoadOptions, load_step, load_together
from .saver import Saver
from .saving import Background, Save
from .staging import Device, find_device
from .storage import Storage, open_storage
from .structure import Selector
from .timeline import committed_steps, latest_ref
from .upload import SaveOptions, Uploader
from .verify import Damage, verify_step

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from cachefs.config import Origin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Timeouts:
    """Deadlines in seconds. ``rank``: each single wait of rank 0 for the other ranks, so longer than a rank needs to
    write its share (they wait twice as long for it). ``save``: how long a call waits for the save before it.
    ``farewell``: how long rank 0 stays at the end until the others know the outcome."""

    rank: float = 1800.0
    save: float = 3600.0
    farewell: float = 10.0


@dataclass(frozen=True)
class Backing:
    """What a store stands on, where it is not to be found by itself: for tests, and for jobs with other plumbing."""

    storage: Storage | None = None
    meeting: Meeting | None = None
    device: Device | None = None
    clock: Clock = SYSTEM_CLOCK


class CheckpointStore:
    """Checkpoints under one URL: ``s3://bucket/prefix``, or a path (resolved now, once).

    Opening reads and claims nothing. Under an initialised ``torch.distributed`` all ranks make the same calls of
    ``save``, ``save_async``, ``load``, ``resume_or_init`` and ``close`` in the same order, and succeed or fail
    together; everything else is each rank's own affair. Without it, one process is all there is.

    The first save (or ``resume_or_init``) claims a new generation: from then on an older run that is still alive can
    commit nothing that counts. It goes on from what this store loaded last as a whole, else from the newest step.
    ``attempt`` names this run in the store (default: the scheduler's id); a random part makes it one start's own.
    ``allow_pickle``: save and load other Python objects by pickle; a pickle from outside can run any code.

    Calls belong to one thread; only :class:`Save` may be handed around. Use it as a context manager or call
    :meth:`close`: a program that just ends waits for its save, but a failure then is only logged.

    Where ranks should not meet, say for one that reads alone: ``backing=Backing(meeting=ckptstore.ranks.alone())``.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        origin: Origin | None = None,
        attempt: str | None = None,
        allow_pickle: bool = False,
        timeouts: Timeouts | None = None,
        save_options: SaveOptions | None = None,
        backing: Backing | None = None,
    ) -> None:
        backing = backing or Backing()
        self._timeouts = timeouts or Timeouts()
        self._storage = backing.storage or open_storage(url, origin)
        self._clock = backing.clock
        self._allow_pickle = allow_pickle
        self._ownership = Ownership(self._storage, attempt, backing.clock)
        self._meeting = backing.meeting
        self._device = backing.device
        self._save_options = save_options or SaveOptions()
        self._saver: Saver | None = None
        self._background = Background(self._timeouts.save)
        self._loads = 0
        self._closed = False

    @property
    def url(self) -> str:
        """The store's root, as messages show it."""
        return self._storage.url

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: dict[str, Any], *, per_rank: bool | str | Iterable[str] = False) -> StepRef:
        """Save and wait until the step is durable. Arguments and errors as :meth:`save_async`."""
        return self.save_async(step, state, per_rank=per_rank).result()

    def save_async(self, step: int, state: dict[str, Any], *, per_rank: bool | str | Iterable[str] = False) -> Save:
        """Copy the state and return; the rest happens in the background. At most one save is under way.

        ``state``: a dict, nested at will, of tensors, DTensors, :class:`Sharded` parts, numpy arrays, modules,
        optimizers, objects with ``state_dict``, and plain values (:mod:`ckptstore.structure` lists them). It is saved
        as it is at this moment, whatever is changed or freed afterwards.

        Plain tensors and values of one name must be equal on all ranks, and are stored once. ``per_rank``: names
        (globs) under which each rank keeps its own, or ``True`` for wherever they differ.

        If the save before is still running, it is waited for first; if it failed and nobody was told, that is raised
        here, on every rank, and nothing is saved. Raises :class:`ConfigError` for a step that cannot be,
        :class:`CheckpointMismatch` for what cannot be saved, naming it.
        """
        self._check_open()
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step {step!r} is not a whole number from 0 on")
        self.wait()
        may_differ = Selector(None if per_rank is True else () if per_rank is False else per_rank)
        return self._open_saver().start(step, state, may_differ)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until no save is under way. Raises what the last one failed with, unless that was told already."""
        self._background.wait(self._timeouts.save if timeout is None else timeout)
        error = self._background.take_error()
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save that is under way and give everything back; rank 0 lets the others go first. Idempotent.

        Raises what the last save failed with if nobody was told yet (then the store is closed all the same), and
        :class:`DeadlineExceeded` if it does not end (then it is not).
        """
        if self._closed:
            return
        self._background.wait(self._timeouts.save)
        self._closed = True
        try:
            if self._saver is not None:
                self._saver.close()
            if self._meeting is not None:
                self._meeting.farewell(self._timeouts.farewell)
        finally:
            self._storage.close()
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except NearflashError as e:  # the error that is on its way matters more
            logger.error("while closing after another error: %s", e)

    # --- reading ----------------------------------------------------------------------------------------------------

    def latest(self) -> int | None:
        """The newest step that counts and is there in full (its bytes are not read); ``None`` in an empty store."""
        self._check_open()
        ref = latest_ref(self._storage)
        return ref.step if ref is not None else None

    def steps(self) -> list[int]:
        """All steps that count, oldest first; see :mod:`ckptstore.timeline`."""
        self._check_open()
        return sorted({ref.step for ref in committed_steps(self._storage)})

    def verify(self, step: Step = "latest") -> list[Damage]:
        """Read a step's every byte; all that is wrong with it (nothing: an empty list)."""
        self._check_open()
        return verify_step(self._storage, next(candidates(self._storage, step)))

    def load(
        self,
        state: dict[str, Any] | None = None,
        step: Step = "latest",
        only: str | Iterable[str] | None = None,
        *,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Load a step; returns the state as a dict.

        ``state``: what to load into. Its tensors, arrays, DTensors and :class:`Sharded` parts are filled in place,
        modules, optimizers and objects with ``load_state_dict`` too; other values are returned in the dict, and so is
        what was saved besides. Without it everything is made anew, on the CPU. The number of ranks and the sharding
        may differ from when it was saved. Every byte used is checked against its digest.

        ``only``: names or globs; the rest is neither read nor touched. ``strict=False``: names in ``state`` or in a
        module that are not in the checkpoint, and the other way round, are no error; dtype and shape always are.

        With ``"latest"``, a step that turns out to be damaged is reported, and the sound one before it is taken, by
        all ranks together. Raises :class:`CheckpointNotFound` that lists what there is, :class:`CheckpointMismatch`
        that names what does not fit (before anything is touched), :class:`CheckpointDamaged` that names tensor, file
        and byte (then the tensors of ``state`` are undefined).
        """
        ref, loaded = self._load(
            lambda: candidates(self._storage, step), state, only, strict, fallback=step == "latest"
        )
        if ref is None:  # cannot be: candidates raise instead
            raise CheckpointError("nothing was loaded", url=self.url)
        if only is None:  # a look at some tensors of an older step is no wish to go back to it
            self._ownership.start_from(ref)
        return dict(loaded)

    def resume_or_init(self, state: dict[str, Any], *, strict: bool = True) -> dict[str, Any] | None:
        """Claim the store for this run, then load where the last one got to; ``None``: start from the beginning.

        From here on no older run can commit anything that counts, so what is loaded is what stays. It comes before
        the first save of this store object, which is where the claim is made else; after that it is a
        :class:`ConfigError`, on every rank.
        """
        if self._saver is not None:
            what = "resume_or_init() comes too late: this store object has saved already"
            raise ConfigError(what, url=self.url, hint="call it before the first save; load() reads what was saved")

        def resume_points() -> Iterator[StepRef]:
            resume = self._ownership.claim().resume
            if resume is not None:
                yield resume
                yield from older_than(self._storage, resume)

        ref, loaded = self._load(resume_points, state, None, strict, fallback=True)
        return None if ref is None else dict(loaded)

    def _load(
        self,
        offered: Callable[[], Iterator[StepRef]],
        state: dict[str, Any] | None,
        only: str | Iterable[str] | None,
        strict: bool,
        *,
        fallback: bool,
    ) -> tuple[StepRef | None, Any]:
        self._check_open()
        self._loads += 1
        options = LoadOptions(Selector(only), strict=strict, allow_pickle=self._allow_pickle)
        meeting = self.meeting
        return load_together(
            meeting,
            meeting.round(f"load/{self._loads}", self._timeouts.rank),
            offered,
            lambda ref: load_step(self._storage, ref, meeting.rank, state, options),
            fallback=fallback,
        )

    def _open_saver(self) -> Saver:
        if self._saver is None:
            uploader = Uploader(
                self._storage,
                self.meeting,
                self._ownership.claim,
                self._save_options,
                self._timeouts.rank,
                self._clock,
            )
            device = self._device or find_device()
            self._saver = Saver(uploader, self.meeting, self._background, device, allow_pickle=self._allow_pickle)
        return self._saver

    @property
    def meeting(self) -> Meeting:
        """How this rank meets the others; found at the first use."""
        if self._meeting is None:
            self._meeting = find_meeting(self.url, self._clock)
        return self._meeting

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError("the store is closed", url=self.url)
