"""How the ranks of a job meet: over a key-value store, never over the user's process group, never by a collective.

A :class:`Meeting` is one rank's end. A :class:`Round` is one conversation: ranks *tell* the coordinator (rank 0)
something each, the coordinator *hears* them all, decides, and *says* it; the others *read* it. Nobody blocks inside
the store: waiting is asking "is the key there?" with growing, jittered pauses, so the main thread's own use of the
same store goes on, and every wait has a deadline that names the ranks it waited for.

Under ``torch.distributed`` the keys lie in the job's own c10d store under a prefix of their own; without it the one
process talks to itself. Environment variables such as ``RANK`` decide nothing.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import RankFailed
from cachefs.hashing import name_digest

from .records import ranks_text

logger = logging.getLogger(__name__)

VALUE_BYTES = 4 << 20
"""Most bytes under one key; c10d's TCPStore cuts a connection that sends more than 8 MiB at once."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
EVERYBODY = "all"


class Keys(Protocol):
    """What is asked of a key-value store: the part of c10d's ``Store`` that never waits."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there; returns at once."""
        ...

    def add(self, key: str, amount: int) -> int: ...

    def delete_key(self, key: str) -> bool: ...


class LocalKeys:
    """A key-value store in this process; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            return total

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def __len__(self) -> int:
        return len(self._values)


class Meeting:
    """One rank's end of the conversations of one checkpoint store.

    ``node``: any text that tells machines apart. Thread-safe as far as ``keys`` is.
    """

    def __init__(self, keys: Keys, rank: int, world: int, *, node: str = "", clock: Clock = SYSTEM_CLOCK) -> None:
        self.rank = rank
        self.world = world
        self.node = node
        self.clock = clock
        self._keys = keys
        self._prefix: str | None = None
        self._last: Round | None = None

    @property
    def coordinator(self) -> bool:
        """Whether this rank decides."""
        return self.rank == 0

    def round(self, name: str, timeout: float) -> Round:
        """Take part in the conversation ``name``, which all ranks must call alike, and only once.

        ``timeout`` (s) bounds the coordinator's wait for the ranks, each time; theirs for it are twice as long.
        """
        if self._prefix is None:
            # Every store that this rank opens under the same keys gets a number of its own; as all ranks open stores
            # in the same order they get the same, and no store sees what an earlier one left behind.
            self._prefix = f"{self._keys.add(f'opened/{self.rank}', 1)}"
        self._last = Round(self, self._keys, f"{self._prefix}/{name}", timeout)
        return self._last

    def farewell(self, timeout: float) -> bool:
        """On the coordinator, wait up to ``timeout`` s until all ranks have left the last conversation.

        Its process may serve the keys, and should not end while others still read in them.
        """
        return not self.coordinator or self._last is None or self._last.settled(timeout)


class Round:
    """One conversation; see the module's text. Ends with :meth:`leave`, also after a failure.

    Errors of the key-value store, and deadlines, are :class:`RankFailed`.
    """

    def __init__(self, meeting: Meeting, keys: Keys, name: str, timeout: float) -> None:
        self._meeting = meeting
        self._keys = keys
        self._name = name
        self._timeout = timeout

    def tell(self, stage: str, data: bytes) -> None:
        """Give the coordinator this rank's part of ``stage``."""
        self._set(self._key(stage, self._meeting.rank), data)

    def hear(self, stage: str) -> list[bytes]:
        """Every rank's part, in rank order. Raises :class:`RankFailed` that names the ranks not heard of."""
        keys = [self._key(stage, rank) for rank in range(self._meeting.world)]
        missing = self._wait(keys, self._timeout)
        if missing:
            raise RankFailed(
                f"{ranks_text(missing)} of {self._meeting.world} not heard of for {self._timeout:g} s",
                hint="all ranks must make the same calls; look for a rank that died or hangs",
            )
        return [self._get(key) for key in keys]

    def say(self, stage: str, slot: int | str, data: bytes) -> None:
        """Coordinator: publish something under a slot: a node's leader, or :data:`EVERYBODY`."""
        self._set(self._key(stage, slot), data)

    def read(self, stage: str, slot: int | str) -> bytes:
        """What the coordinator says. Raises :class:`RankFailed` if it says nothing in time.

        That is twice as long as it waits itself, so that it is the one to find out, and can say, who is missing.
        """
        key = self._key(stage, slot)
        timeout = 2 * self._timeout
        if self._wait([key], timeout):
            raise RankFailed(
                f"rank 0, which coordinates, not heard of for {timeout:g} s",
                hint="all ranks must make the same calls; look for a rank that died or hangs",
            )
        return self._get(key)

    def leave(self, told: Sequence[str], said: Sequence[str]) -> None:
        """This rank needs nothing of this conversation any more; the last rank to leave removes its keys.

        ``told`` and ``said``: the stages it may have had, the same on all ranks.
        """
        left = f"{self._name}/left"
        try:
            if self._keys.add(left, 1) < self._meeting.world:
                return
            ranks = range(self._meeting.world)
            for key in [self._key(s, r) for s in told for r in ranks]:
                self._delete(key)
            for key in [self._key(s, slot) for s in said for slot in (EVERYBODY, *ranks)]:
                self._delete(key)
            self._keys.delete_key(left)
        except _STORE_ERRORS as e:
            raise _store_failed(e) from e

    def settled(self, timeout: float) -> bool:
        """Whether all ranks leave within ``timeout`` s."""
        left = f"{self._name}/left"
        clock = self._meeting.clock
        end = clock.monotonic() + timeout
        try:
            while self._keys.check([left]):
                if clock.monotonic() >= end:
                    return False
                clock.sleep(_LONGEST_PAUSE / 4)
        except _STORE_ERRORS:
            return False  # the store is gone, and so is everybody who could be waiting
        return True

    def _key(self, stage: str, slot: int | str) -> str:
        return f"{self._name}/{stage}/{slot}"

    def _wait(self, keys: list[str], timeout: float) -> list[int]:
        """Wait until all keys are there; the indices of those that are not, at the deadline."""
        clock = self._meeting.clock
        end = clock.monotonic() + timeout
        pause = _FIRST_PAUSE
        try:
            while not self._keys.check(keys):
                left = end - clock.monotonic()
                if left <= 0:
                    return [i for i, key in enumerate(keys) if not self._keys.check([key])]
                clock.sleep(min(left, pause * random.uniform(0.5, 1.0)))
                pause = min(pause * 1.5, _LONGEST_PAUSE)
        except _STORE_ERRORS as e:
            raise _store_failed(e) from e
        return []

    def _set(self, key: str, data: bytes) -> None:
        """Store a value, a large one in pieces. The key itself comes last, so that all is there when it is."""
        pieces = range(VALUE_BYTES, len(data), VALUE_BYTES)
        try:
            for number, start in enumerate(pieces, 1):
                self._keys.set(f"{key}.{number}", data[start : start + VALUE_BYTES])
            if pieces:
                self._keys.set(f"{key}.pieces", str(len(pieces)).encode())
            self._keys.set(key, data[:VALUE_BYTES])
        except _STORE_ERRORS as e:
            raise _store_failed(e) from e

    def _get(self, key: str) -> bytes:
        try:
            first = bytes(self._keys.get(key))
            if len(first) < VALUE_BYTES:
                return first
            return b"".join([first, *(bytes(self._keys.get(k)) for k in self._piece_keys(key))])
        except _STORE_ERRORS as e:
            raise _store_failed(e) from e

    def _piece_keys(self, key: str) -> list[str]:
        count = f"{key}.pieces"
        pieces = int(self._keys.get(count)) if self._keys.check([count]) else 0
        return [f"{key}.{number}" for number in range(1, pieces + 1)]

    def _delete(self, key: str) -> None:
        pieces = self._piece_keys(key)
        # What delete_key returns says nothing: FileStore claims to have deleted keys that never were.
        for name in (key, *pieces, *([f"{key}.pieces"] if pieces else [])):
            self._keys.delete_key(name)


def leave(conversation: Round, told: Sequence[str], said: Sequence[str]) -> None:
    """:meth:`Round.leave` at the end of a conversation whose outcome stands: its own trouble is only logged."""
    try:
        conversation.leave(told, said)
    except RankFailed as e:  # all that is lost is tidiness
        logger.warning("keys stay in the job's store: %s", e)


_STORE_ERRORS = (RuntimeError, OSError, KeyError)
"""What c10d's stores raise (``DistError`` is a RuntimeError) when their server is gone."""


def _store_failed(error: BaseException) -> RankFailed:
    first = (str(error).splitlines() or [""])[0]
    return RankFailed(f"the job's key-value store does not answer: {type(error).__name__}: {first}")


def alone(clock: Clock = SYSTEM_CLOCK) -> Meeting:
    """The meeting of a single process."""
    return Meeting(LocalKeys(), 0, 1, node=socket.gethostname(), clock=clock)


def find_meeting(url: str, clock: Clock = SYSTEM_CLOCK) -> Meeting:
    """The meeting for the store at ``url``: this job's ranks if ``torch.distributed`` is initialised, else alone.

    Makes a connection of its own to the job's store where that can be cloned (torch ≥ 2.8 or so), so that a
    blocking call of the main thread on it does not hold up a save.
    """
    import torch.distributed as dist  # not at the top: the command line does without torch

    if not (dist.is_available() and dist.is_initialized()):
        return alone(clock)
    store: Any = dist.distributed_c10d._get_default_store()
    if hasattr(store, "clone"):
        store = store.clone()
    prefix = f"nearflash/ckptstore/{name_digest(url)[:16]}"
    keys: Any = dist.distributed_c10d.PrefixStore(prefix, store)
    return Meeting(keys, dist.get_rank(), dist.get_world_size(), node=socket.gethostname(), clock=clock)
