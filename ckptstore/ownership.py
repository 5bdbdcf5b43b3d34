"""A run's right to commit, claimed when it is first needed."""

from __future__ import annotations

import logging
import secrets
import threading
from typing import Literal

from cachefs.clock import Clock
from cachefs.config import job_environment

from .claims import Claim, claim_generation, default_attempt_id
from .layout import StepRef
from .storage import Storage

logger = logging.getLogger(__name__)


class Ownership:
    """One run's claim on a store, made once, by the coordinator. Thread-safe.

    Every start of a program is an attempt of its own: the id that the launcher or the caller gives may come again
    when the same command is run anew, so a random part always follows it.
    """

    def __init__(self, storage: Storage, attempt: str | None, clock: Clock) -> None:
        self._storage = storage
        self._attempt = attempt
        self._clock = clock
        self._lock = threading.Lock()
        self._start: StepRef | Literal["latest"] = "latest"
        self._claim: Claim | None = None

    def start_from(self, ref: StepRef) -> None:
        """What was loaded is what the claim, if it is still to be made, resumes from."""
        self._start = ref

    def claim(self, first_step: int | None = None) -> Claim:
        """The claim. Raises as :func:`.claims.claim_generation`; then the next call tries again.

        ``first_step``: the step for whose save it is made, if it is yet to be made. A step below the newest one by a
        run that loaded nothing is more often a mistake than a wish to start over, so it is said.
        """
        with self._lock:
            if self._claim is None:
                nonce = secrets.token_hex(4)
                given = self._attempt
                attempt = f"{given}.{nonce}" if given else default_attempt_id(job_environment(), nonce=nonce)
                self._claim = claim_generation(self._storage, attempt, start=self._start, clock=self._clock)
                if self._start == "latest" and first_step is not None:
                    self._warn_of_a_step_back(first_step, self._claim.resume_step)
            return self._claim

    def _warn_of_a_step_back(self, step: int, newest: int | None) -> None:
        if newest is not None and step <= newest:
            logger.warning(
                "%s: the newest step here is %d and was not loaded; step %d becomes the latest "
                "(resume_or_init() goes on from what is there)",
                self._storage.url,
                newest,
                step,
            )
