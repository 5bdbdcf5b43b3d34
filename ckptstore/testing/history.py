"""What happened in a run of several attempts, and the promises that must hold of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cachefs.errors import CheckpointConflict, Unavailable

from ..claims import Claim, claim_generation
from ..layout import StepRef, parse_start
from ..storage import Storage
from ..timeline import latest_ref
from .model import ModelStore
from .saving import InstantClock, require_sound, save_step


def age(ref: StepRef | None) -> tuple[int, int]:
    """Orders checkpoints as a run sees them: a newer generation counts more than a later step."""
    return (0, -1) if ref is None else (ref.generation, ref.step)


@dataclass
class History:
    """Acknowledged steps and finished claims, in order. Programs of one run add to it, one at a time."""

    model: ModelStore = field(default_factory=ModelStore)
    acknowledged: list[StepRef] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def claim(self, storage: Storage, attempt: str) -> Claim:
        """Claim, and note it."""
        claim = claim_generation(storage, attempt, clock=InstantClock())
        self.claims.append(claim)
        return claim

    def save(self, storage: Storage, claim: Claim, step: int, *, nodes: int = 1) -> bool:
        """Save, and note it if it is acknowledged; ``False`` if the attempt was told that it may not, or not surely."""
        try:
            ref = save_step(storage, claim, step, nodes=nodes, clock=InstantClock())
        except (CheckpointConflict, Unavailable):
            return False
        self.acknowledged.append(ref)
        return True

    def read(self, storage: Storage) -> StepRef | None:
        """``latest()``, with the promises to a reader checked.

        It is sound, not older than what was acknowledged when the reader began, and not a step that came into place
        after a newer generation had started.
        """
        promised = max(self.acknowledged, key=age, default=None)
        found = latest_ref(storage)
        assert age(found) >= age(promised), f"latest() is {found}, but {promised} was acknowledged"
        if found is not None:
            assert not self.is_zombie(found), f"latest() is {found}, a zombie's"
            require_sound(self.model.storage(), found)
        return found

    def is_zombie(self, ref: StepRef) -> bool:
        """Whether a step came into place after a newer generation had its start record."""
        started = False
        for request in self.model.log:
            if request.op == "put":
                name = request.key.partition("/")[2]
                started = started or (parse_start(name) or 0) > ref.generation
                if name == ref.manifest:
                    return started
        return False

    def check(self, storage: Storage) -> None:
        """The promises at the end of a run: those to a reader, that every acknowledged step is sound, and that each
        generation resumes from no less than what older ones were promised."""
        self.read(storage)
        for ref in self.acknowledged:
            require_sound(storage, ref)
            for claim in self.claims:
                if claim.generation > ref.generation:
                    assert age(claim.resume) >= age(ref), f"{ref} was acknowledged and is lost to {claim}"
        assert len(set(self.acknowledged)) == len(self.acknowledged), "a step was acknowledged twice"
        numbers = [claim.generation for claim in self.claims]
        assert len(set(numbers)) == len(numbers), "a generation was claimed twice"
