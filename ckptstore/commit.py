"""Saving one step: files first, then one atomic act that makes them a checkpoint, then the right to say so.

The order of :meth:`StepWriter.commit` is the contract: every file is there with its size; no newer claim; the
manifest is in place (learned by reading back where the answer was unclear); it survives a power cut; **still** no
newer claim. Only then the step is acknowledged, that is, ``commit`` returns. What it has committed may nevertheless
become visible when it raises: a checkpoint that is whole, but that nobody was promised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import (
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointError,
    CheckpointUnsupported,
    ConfigError,
    NearflashError,
    NotFound,
)

from .claims import create_record, newest_claim, overtaken, read_claim
from .layout import StepRef
from .manifest import FileRef, Root, Tombstone, check_root, decode_root, encode_sealed
from .storage import TRIES, UNCLEAR, Storage, pause

if TYPE_CHECKING:
    from typing_extensions import Buffer


class StepWriter:
    """One process's hand in one save. Made by :func:`begin_step`; ends with :meth:`commit` or :meth:`abort`.

    Thread-safe for concurrent :meth:`write`; the rest is one thread's.
    """

    def __init__(self, storage: Storage, ref: StepRef, attempt: str, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.ref = ref
        self.attempt = attempt
        self._storage = storage
        self._clock = clock
        self._sent = False
        self._committed = False
        self._stage = storage.stage(ref, attempt)

    @property
    def manifest_sent(self) -> bool:
        """Whether :meth:`commit` went as far as sending the manifest, so that it may be, or come, into place."""
        return self._sent

    def write(self, file: str, buffers: Iterable[Buffer]) -> int:
        """Write one part or segment under its name of :mod:`.layout`; durable on return. Returns its bytes.

        The buffers are C-contiguous, stay the caller's, and must not change until this returns. Raises
        :class:`CheckpointConflict` if a file of that name with other content is there, :class:`CheckpointError` or a
        store's error, each naming the file.
        """
        return self._stage.write(file, buffers)

    def commit(self, root: Root, files: Sequence[FileRef]) -> None:
        """Make everything written a checkpoint. Coordinator only, once, after all ranks' writes have returned.

        ``files`` are the segments of all ranks with their sizes; the parts in ``root`` are checked likewise. Returns
        when the step is acknowledged. Raises :class:`CheckpointConflict` if this generation is not the attempt's, is
        no longer the newest, or has this step already; :class:`CheckpointError` (a file is missing or of another
        size, the disk failed) or the store's error otherwise. After an error call :meth:`abort`.
        """
        if self._sent:
            raise CheckpointError(
                f"{self.ref} was committed, or tried to, by this writer before", url=self._storage.url
            )
        if root.ref != self.ref or root.attempt != self.attempt:
            raise ConfigError(f"the manifest is of {root.ref} by {root.attempt!r}, the writer of {self.ref}")
        check_root(root, url=self._storage.describe(self.ref.manifest))
        self._check_owner()
        self._stage.check([*files, *(FileRef(part.file, part.size) for part in root.parts)])
        data = encode_sealed(root)
        self._sent = True
        self._publish(data)
        self._committed = True
        self._stage.settle()
        if newest_claim(self._storage) > self.ref.generation:
            raise overtaken(self._storage, self.ref.generation)

    def abort(self, *, manifest_sent: bool = True) -> list[NearflashError]:
        """Give up: remove what this process wrote. Never touches a committed step. Idempotent.

        On an object store a tombstone first takes the manifest's place, so that a manifest still under way cannot
        make a step of what is being deleted; the step can then not be saved again in this generation. Give
        ``manifest_sent=False`` only if it is certain that the coordinator never sent it: then no tombstone is left.

        Returns what went wrong (leftovers stay, and are no checkpoint) instead of raising: this runs while another
        error is on its way.
        """
        if self._committed:
            return []
        try:
            if self._stage.needs_tombstone and self._stands(bury=self._sent or manifest_sent):
                return []
            return list(self._stage.discard())
        except NearflashError as e:
            return [e]

    def _check_owner(self) -> None:
        generation = self.ref.generation
        claim = read_claim(self._storage, generation)
        if claim is None or claim.attempt != self.attempt:
            owner = "nobody" if claim is None else f"attempt {claim.attempt!r}"
            raise CheckpointConflict(
                f"generation {generation} belongs to {owner}, not to attempt {self.attempt!r}",
                url=self._storage.url,
                hint="claim one with claim_generation",
            )
        if newest_claim(self._storage) > generation:
            raise overtaken(self._storage, generation)

    def _publish(self, data: bytes) -> None:
        """Put the manifest in place, or raise; an unclear outcome is settled by reading back, a bounded time."""
        error: NearflashError | None = None
        for attempt in range(TRIES):
            pause(attempt, self._clock)
            try:
                if self._stage.publish(data):
                    return
                error = None
            except NearflashError as e:  # whatever it says: the manifest may be in place
                error = e
            try:
                found = self._storage.read(self.ref.manifest)
            except NotFound:
                if error is not None and not isinstance(error, UNCLEAR):
                    raise error from None
                continue
            except UNCLEAR as e:
                error = e
                continue
            if found == data:
                return
            raise taken(self._storage, self.ref, found) from error
        raise CheckpointError(
            f"whether {self.ref} was committed could not be learned: {error or 'its name is neither free nor taken'}",
            url=self._storage.describe(self.ref.manifest),
        ) from error

    def _stands(self, *, bury: bool) -> bool:
        """Whether the step is committed after all. If not, ``bury`` sees to it, with a tombstone, that it stays so."""
        url = self._storage.describe(self.ref.manifest)
        if bury:
            tombstone = Tombstone(
                step=self.ref.step,
                generation=self.ref.generation,
                attempt=self.attempt,
                created=self._clock.time(),
                reason="the save was given up",
            )
            found = create_record(self._storage, self.ref.manifest, encode_sealed(tombstone), self._clock)
        else:
            try:
                found = self._storage.read(self.ref.manifest)
            except NotFound:
                return False
        return not isinstance(decode_root(found, self.ref, url=url), Tombstone)


def begin_step(
    storage: Storage, step: int, generation: int, attempt: str, *, clock: Clock = SYSTEM_CLOCK
) -> StepWriter:
    """Begin to write a step of a claimed generation. Every process that writes calls this, the coordinator too.

    Raises :class:`CheckpointConflict` if this generation has committed (or given up) that step already, and the
    storage's errors.
    """
    ref = StepRef(step, generation)
    try:
        found = storage.read(ref.manifest)
    except NotFound:
        return StepWriter(storage, ref, attempt, clock=clock)
    raise taken(storage, ref, found)


def taken(storage: Storage, ref: StepRef, found: bytes) -> CheckpointConflict:
    """The error for a step whose manifest is in place already, saying what it is."""
    url = storage.describe(ref.manifest)
    try:
        record = decode_root(found, ref, url=url)
    except (CheckpointDamaged, CheckpointUnsupported) as e:
        what = f"is committed already, by a manifest that cannot be read ({e.what})"
    else:
        if isinstance(record, Tombstone):
            what = f"was given up or deleted ({record.reason}) and cannot be saved again in this generation"
        else:
            what = f"is committed already, by attempt {record.attempt!r}"
    return CheckpointConflict(f"{ref} {what}", url=url, hint="save another step")
