"""The names of a job's nodes, agreed through its key-value store: once, with a deadline, by no collective call.

A name only says which lanes a node had in an earlier run (``loader.nodes``). But ranks that had different names for one
node would repair a state's table differently, hence read samples twice and others not at all. So no rank ever goes on
with a guess of its own: the first rank of each node tells its name; whoever has them all, or has waited long enough,
proposes (names, or numbers in their place); the first proposal is the decision, by the store's compare-and-set, and all
read that one. A rank that cannot read it raises.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Final, Protocol

from cachefs.clock import SYSTEM_CLOCK, Clock
from cachefs.errors import NearflashError

from .nodes import told_apart, unnamed

WAIT: Final = 60.0
"""Seconds to wait for the other nodes' names: their first ranks may still be loading a model."""
_LEAST_PAUSE: Final = 0.01
_MOST_PAUSE: Final = 0.5
_DECISION: Final = "names"
_LONGEST: Final = 255


class Keys(Protocol):
    """What is used of a ``torch.distributed`` store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """What is there afterwards; an empty ``expected`` stands for nothing."""


def job_store() -> object | None:
    """Where the ranks of this job meet: the store that ``torch.distributed`` was initialised with, if it is a TCPStore.

    The same object until the process group is made anew.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    store: Any = distributed.distributed_c10d._get_default_store()
    base = getattr(store, "_underlying_non_prefix_store", store)
    return store if isinstance(base, distributed.TCPStore) else None


def job_keys(world: int, nodes: int) -> Keys | None:
    """The part of :func:`job_store` in which names are agreed.

    By a connection of its own where that can be made, so as not to wait for what others ask.
    """
    store: Any = job_store()
    if store is None:
        return None
    keys: Keys = sys.modules["torch.distributed"].PrefixStore(
        f"nearflash/loader/nodes/{world}/{nodes}", _connected(store)
    )
    return keys


def _connected(store: Any) -> Any:
    """The store by a connection of its own, or itself where it makes none: if it answers nobody, asking it tells."""
    if not hasattr(store, "clone"):
        return store
    try:
        return store.clone()
    except RuntimeError:
        return store


def tell(keys: Keys, number: int, name: str) -> None:
    """Say the name of node ``number``; for the first rank on it. Does not wait. Raises ``NearflashError``."""
    try:
        keys.set(f"node/{number}", name[:_LONGEST])
    except RuntimeError as e:
        raise _silent(e) from e


def agree(keys: Keys, nodes: int, *, wait: float = WAIT, clock: Clock = SYSTEM_CLOCK) -> tuple[str, ...]:
    """The names of all nodes, the same on all ranks. Waits for those that are to come.

    Raises ``NearflashError`` if the store does not answer.
    """
    wanted = [f"node/{number}" for number in range(nodes)]
    deadline, pause = clock.monotonic() + wait, _LEAST_PAUSE
    try:
        while not keys.check([_DECISION]):
            left = deadline - clock.monotonic()
            if keys.check(wanted):
                names = told_apart([bytes(keys.get(key)).decode() for key in wanted])
                return _decided(keys.compare_set(_DECISION, "", json.dumps(names)))
            if left <= 0:
                return _decided(keys.compare_set(_DECISION, "", json.dumps(unnamed(nodes))))
            clock.sleep(min(left, pause))
            pause = min(2 * pause, _MOST_PAUSE)  # thousands of ranks ask
        return _decided(keys.get(_DECISION))
    except RuntimeError as e:
        raise _silent(e) from e


def _decided(value: bytes) -> tuple[str, ...]:
    names: Sequence[str] = json.loads(bytes(value))
    return tuple(names)


def _silent(error: RuntimeError) -> NearflashError:
    return NearflashError(
        f"the names of the job's nodes cannot be agreed: its key-value store does not answer ({type(error).__name__})",
        hint="give them: ShardDataset(nodes=[the node's name of each rank])",
    )
