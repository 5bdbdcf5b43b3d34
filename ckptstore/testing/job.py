"""The ranks of a job as threads of this process: each with a store of its own, meeting over one key-value store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..ranks import Keys, LocalKeys, Meeting
from ..storage import Storage
from ..store import Backing, CheckpointStore, Timeouts
from ..upload import SaveOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Raised:
    """What a rank ended with instead of a result."""

    error: BaseException


QUICK = Timeouts(rank=20.0, save=60.0, farewell=5.0)


def run_job(
    world: int,
    work: Callable[[CheckpointStore, int], T],
    storage: Callable[[int], Storage],
    *,
    keys: Keys | None = None,
    timeouts: Timeouts = QUICK,
    save_options: SaveOptions | None = None,
    ranks_per_node: int = 2,
    attempt: str | None = None,
) -> list[T | Raised]:
    """Run ``work(store, rank)`` on every rank; what each returned or raised, in rank order.

    ``storage(rank)`` opens a rank's own way to the store. The stores are closed at the end; what closing raises counts.
    """
    keys = keys if keys is not None else LocalKeys()
    results: list[T | Raised | None] = [None] * world

    def run(rank: int) -> None:
        meeting = Meeting(keys, rank, world, node=f"node{rank // ranks_per_node}")
        backing = Backing(storage=storage(rank), meeting=meeting)
        store = CheckpointStore(
            "unused", backing=backing, timeouts=timeouts, save_options=save_options, attempt=attempt
        )
        try:
            with store:
                results[rank] = work(store, rank)
        except BaseException as e:  # noqa: BLE001 - handed to the test, which looks at it
            results[rank] = Raised(e)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeouts.save + timeouts.rank)
        assert not thread.is_alive(), f"{thread.name} hangs"
    return list(results)  # type: ignore[arg-type]


def values(results: Sequence[T | Raised]) -> list[T]:
    """The results of a job in which no rank failed; raises the first error otherwise."""
    for result in results:
        if isinstance(result, Raised):
            raise result.error
    return list(results)  # type: ignore[arg-type]
