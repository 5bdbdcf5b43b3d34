"""What must hold, as pure functions of what was recorded: each gives one named :class:`Check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .plan import EPOCHS, FORMATS, RANKS, Plan
from .record import Step
from .traffic import Get, between, by_key, of_keys, refetched

KILL_GRACE = 2.0
"""Seconds before the kill within which bytes that came may not be on the disk, with their digests, yet."""

Ranks = Sequence[Sequence[Step]]
"""The steps of each rank."""


@dataclass(frozen=True)
class Check:
    """One claim, whether it held, and the figures that show it."""

    name: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Evidence:
    """Everything that the checks look at. Times are seconds since the epoch, sizes bytes."""

    plan: Plan
    shards: Mapping[str, int]
    """Key and size of every shard."""
    first: Ranks
    """The killed attempt."""
    second: Ranks
    """The attempt that resumed."""
    reference: Ranks
    """The uninterrupted run."""
    gets: Sequence[Get]
    """Object bytes that left the origin in both attempts of the killed run."""
    reference_gets: Sequence[Get]
    killed_at: float
    saved_before: int
    """The newest step whose commit record the origin had accepted when the kill came; 0 for none."""
    verified: Sequence[int]
    """Steps of the killed run's store whose every byte was checked at the end and found right."""
    damaged: Sequence[str]
    """What was found wrong with the others."""
    counted: Mapping[str, float]
    """The counters of the uninterrupted run's node daemon."""
    left: int
    """Processes of the uninterrupted run that were still there after it had ended and its daemon had been stopped."""


def resumed_from(second: Ranks) -> int:
    """The step that the second attempt started after."""
    return second[0][0].step - 1 if second and second[0] else 0


def effective(first: Ranks, second: Ranks) -> list[list[Step]]:
    """The stream that trained the model: the first attempt up to the checkpoint, then all of the second."""
    resume = resumed_from(second)
    return [[s for s in a if s.step <= resume] + list(b) for a, b in zip(first, second, strict=True)]


def epoch_two(ranks: Ranks) -> float:
    """When epoch 2 began: as soon as the first rank had finished its last step of epoch 1."""
    return min(max((s.time for s in steps if s.epoch == 0), default=float("inf")) for steps in ranks)


def all_checks(e: Evidence) -> list[Check]:
    """Every check of the demo, in the order of the table."""
    return [*_same_run(e), *_whole_data(e), *_traffic(e), *_aftermath(e)]


def pairs(e: Evidence) -> list[tuple[Step, Step]]:
    """Each step of the killed run's effective stream with the uninterrupted run's, rank after rank."""
    stream = effective(e.first, e.second)
    return [pair for ours, other in zip(stream, e.reference, strict=True) for pair in zip(ours, other, strict=False)]


def complete(e: Evidence) -> bool:
    """Whether both runs made every step once, in order, on every rank."""
    wanted = list(range(1, e.plan.steps + 1))
    return all([s.step for s in steps] == wanted for steps in (*effective(e.first, e.second), *e.reference))


def same_losses(e: Evidence) -> bool:
    """Whether every loss of the killed run is bit-identical to the uninterrupted run's."""
    return complete(e) and all(a.loss == b.loss for a, b in pairs(e))


def _same_run(e: Evidence) -> Iterator[Check]:
    stream, both, whole = effective(e.first, e.second), pairs(e), complete(e)
    counts = f"{len(stream[0])} of {e.plan.steps} steps on each of {RANKS} ranks"
    yield Check("both runs make every step once", whole, counts)
    other = [a.step for a, b in both if a.ids != b.ids]
    ids = sum(len(batch) for a, _ in both for batch in a.ids)
    found = f"{ids:,} ids, rank by rank" + _first(other)
    yield Check("sample ids equal the uninterrupted run's", whole and not other, found)
    found = f"{len(both):,} losses" + _first([a.step for a, b in both if a.loss != b.loss])
    yield Check("losses equal the uninterrupted run's bit for bit", same_losses(e), found)
    thrown_away = [[s for s in steps if s.step > resumed_from(e.second)] for steps in e.first]
    again = [{s.step: s for s in steps} for steps in e.second]
    same = all(
        s.step in new and s.same_work(new[s.step]) for old, new in zip(thrown_away, again, strict=True) for s in old
    )
    count = sum(map(len, thrown_away))
    yield Check("steps done twice repeat exactly", count > 0 and same, f"{count} steps")


def _first(steps: Sequence[int]) -> str:
    return f", first difference at step {min(steps)}" if steps else ""


def _whole_data(e: Evidence) -> Iterator[Check]:
    total, least = sum(e.shards.values()), e.plan.least_bytes
    sizes = f"{len(e.shards)} shards, {total / 1e6:.1f} MB"
    yield Check(f"three data sets of real text, {least / 1e6:.0f} MB or more", total >= least, sizes)
    for k, name in enumerate(FORMATS):
        seen = [[i for rank in e.reference for s in rank if s.epoch == n for i in s.ids[k]] for n in range(EPOCHS)]
        whole = all(len(ids) == e.plan.samples == len(set(ids)) for ids in seen)
        fresh = seen[0] != seen[1] and set(seen[0]) == set(seen[1])
        yield Check(
            f"{name}: an epoch is every sample once",
            whole and fresh,
            f"{len(set(seen[0])):,} samples, in another order each epoch",
        )


def _traffic(e: Evidence) -> Iterator[Check]:
    total = sum(e.shards.values())
    start = epoch_two(e.reference)
    gets = of_keys(e.reference_gets, e.shards)
    fetched = by_key(between(gets, 0, start))
    wrong = [k for k, size in e.shards.items() if fetched.get(k) != size]
    readers = RANKS * len(FORMATS)
    yield Check(
        "epoch 1 fetches each shard's bytes once",
        not wrong,
        f"{sum(fetched.values()):,} of {total:,} bytes, for {readers} readers"
        + (f", not so: {wrong[0]}" if wrong else ""),
    )
    for name, ranks, seen in (
        ("uninterrupted", e.reference, gets),
        ("killed", e.second, of_keys(e.gets, e.shards)),
    ):
        late = between(seen, epoch_two(ranks), float("inf"))
        yield Check(f"epoch 2 makes 0 origin GETs, {name} run", not late, f"{len(late)} GETs")
    again = refetched(of_keys(e.gets, e.shards), e.killed_at, KILL_GRACE)
    before = sum(g.size for g in between(of_keys(e.gets, e.shards), 0, e.killed_at))
    after = sum(g.size for g in between(of_keys(e.gets, e.shards), e.killed_at, float("inf")))
    yield Check(
        "the kill costs no byte that was cached",
        not again,
        f"{before:,} bytes before, {after:,} after, {sum(g.size for g in again):,} of them again",
    )
    referee = sum(g.size for g in e.reference_gets)
    own = int(e.counted.get("origin_get_bytes", 0))
    yield Check("the daemon counts what the proxy counts", own == referee > 0, f"{own:,} and {referee:,} bytes")


def _aftermath(e: Evidence) -> Iterator[Check]:
    resume = resumed_from(e.second)
    killed = max((s.step for rank in e.first for s in rank), default=0)
    yield Check(
        "resumes from the newest committed step",
        0 < e.saved_before <= resume < killed <= e.plan.steps_per_epoch,
        f"committed {e.saved_before}, resumed from {resume}, killed after {killed}",
    )
    newest = max(e.verified, default=0)
    yield Check(
        "every byte of every checkpoint verifies",
        not e.damaged and newest == e.plan.steps,
        f"{len(e.verified)} steps, newest {newest}" + (f", damaged: {e.damaged[0]}" if e.damaged else ""),
    )
    yield Check("an ended job and a stopped daemon leave no process", e.left == 0, f"{e.left} left")
