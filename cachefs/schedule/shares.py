"""How jobs share the cache: what each holds beside its share decides who gives way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .ranks import Ranked


def give_way(
    queues: Mapping[str, Iterator[Ranked]], held: Mapping[str, int], shares: Mapping[str, float], taker: str | None
) -> Iterator[Ranked]:
    """Entries in the order in which they should go: always one of the job that holds most for its share.

    ``held`` is the bytes that each job has, those that the ``taker`` is about to get included; ``queues`` what each may
    lose, best first. Once the taker itself is the one with most and has nothing more to lose, nobody else loses either:
    so every job can have its share, and what others leave of theirs is divided in the same way.
    """
    left = dict(held)
    waiting = dict(queues)
    while waiting:
        job = max(
            waiting if taker is None else {*waiting, taker}, key=lambda job: (left.get(job, 0) / shares[job], job)
        )
        ranked = next(waiting[job], None) if job in waiting else None
        if ranked is None:
            if job == taker:
                return
            del waiting[job]
            continue
        left[job] = left.get(job, 0) - ranked.size
        yield ranked
