"""The demo's checks can fail: each is shown evidence that is right, then the same evidence with one thing wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cachefs.testing.faults import RequestRecord
from demo.checks import Evidence, all_checks, effective, epoch_two, resumed_from
from demo.plan import FORMATS, RANKS, SMALL
from demo.record import Step
from demo.traffic import Get, committed, gets_of, refetched

PLAN = replace(SMALL, samples=32, shards=2, batch_size=2, save_every=4, kill_at=6, least_bytes=1)
SHARDS = {f"{name}/{i}": 100 for name in FORMATS for i in range(2)}
KILLED_AT = 50.0


def step(rank: int, number: int, start: float) -> Step:
    """A step of a run in which sample ids count up, rank after rank, and turn round in the second epoch."""
    epoch, place = divmod(number - 1, PLAN.steps_per_epoch)
    first = (place * RANKS + rank) * PLAN.batch_size
    ids = tuple(range(first, first + PLAN.batch_size))
    if epoch:
        ids = tuple(PLAN.samples - 1 - i for i in ids)
    return Step(number, epoch, (1.0 / number + rank).hex(), (ids,) * len(FORMATS), start + number)


def ranks(first: int, last: int, start: float) -> list[list[Step]]:
    return [[step(rank, n, start) for n in range(first, last + 1)] for rank in range(RANKS)]


def good() -> Evidence:
    fills = [Get(key, 0, 100, 41.0, 41.0) for key in SHARDS]
    return Evidence(
        plan=PLAN,
        shards=SHARDS,
        first=ranks(1, 6, 42.0),
        second=ranks(5, 16, 60.0),
        reference=ranks(1, 16, 100.0),
        gets=[*fills[:-1], Get("tokens/1", 0, 40, 45.0, 0.0), Get("tokens/1", 0, 100, 61.0, 61.0)],
        reference_gets=[replace(g, time=100.5) for g in fills] + [Get("mds/index.json", 0, 30, 100.2, 100.2)],
        killed_at=KILLED_AT,
        saved_before=4,
        verified=[12, 16],
        damaged=[],
        counted={"origin_get_bytes": 630},
        left=0,
    )


def failed(evidence: Evidence) -> list[str]:
    return [c.name for c in all_checks(evidence) if not c.passed]


def test_right_evidence_passes_every_check() -> None:
    assert failed(good()) == []


def test_resuming_and_the_effective_stream() -> None:
    e = good()
    assert resumed_from(e.second) == 4
    assert [s.step for s in effective(e.first, e.second)[1]] == list(range(1, 17))
    assert epoch_two(e.reference) == 108.0


def altered(steps: Any, rank: int, index: int, **change: Any) -> list[list[Step]]:
    copy = [list(s) for s in steps]
    copy[rank][index] = replace(copy[rank][index], **change)
    return copy


WRONG: dict[str, tuple[Callable[[Evidence], Evidence], set[str]]] = {
    "a step is missing": (
        lambda e: replace(e, second=[s[:-1] for s in e.second]),
        {"every step once", "sample ids", "losses"},
    ),
    "an id differs": (
        lambda e: replace(e, second=altered(e.second, 1, 5, ids=((9, 9),) * 3)),
        {"sample ids"},
    ),
    "a loss differs by one bit": (
        lambda e: replace(e, second=altered(e.second, 0, 5, loss=(1 / 10 + 2**-55).hex())),
        {"losses"},
    ),
    "a redone step gives another loss": (
        lambda e: replace(e, first=altered(e.first, 0, 5, loss=(9.0).hex())),
        {"repeat exactly"},
    ),
    "nothing was redone": (
        lambda e: replace(e, first=[s[:4] for s in e.first]),
        {"repeat exactly", "newest committed"},
    ),
    "a sample comes twice": (
        lambda e: replace(e, reference=altered(e.reference, 0, 1, ids=e.reference[0][0].ids)),
        {"sample ids", "wds:", "mds:", "tokens:"},
    ),
    "a shard is fetched twice": (
        lambda e: replace(e, reference_gets=[*e.reference_gets, Get("wds/0", 0, 100, 101.0, 101.0)]),
        {"bytes once", "proxy counts"},
    ),
    "a shard is fetched in epoch 2": (
        lambda e: replace(e, gets=[*e.gets, Get("wds/0", 0, 100, 70.0, 70.0)]),
        {"killed run", "costs no byte"},
    ),
    "cached bytes are fetched again after the kill": (
        lambda e: replace(e, gets=[*e.gets, Get("wds/0", 50, 10, 61.0, 61.0)]),
        {"costs no byte"},
    ),
    "the daemon counts otherwise": (lambda e: replace(e, counted={"origin_get_bytes": 629}), {"proxy counts"}),
    "an acknowledged step was lost": (lambda e: replace(e, saved_before=5), {"newest committed"}),
    "the kill came in epoch 2": (
        lambda e: replace(e, first=ranks(1, 9, 42.0), second=ranks(5, 16, 60.0)),
        {"newest committed"},
    ),
    "a checkpoint is damaged": (lambda e: replace(e, damaged=["step 12"]), {"verifies"}),
    "the last checkpoint is missing": (lambda e: replace(e, verified=[12]), {"verifies"}),
    "there is too little text": (lambda e: replace(e, plan=replace(e.plan, least_bytes=601)), {"real text"}),
    "a process is left": (lambda e: replace(e, left=1), {"no process"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_evidence_fails_the_checks_that_look_at_it(case: str) -> None:
    change, words = WRONG[case]
    names = failed(change(good()))
    assert all(any(word in name for name in names) for word in words), names
    assert all(any(word in name for word in words) for name in names), names


def test_no_evidence_at_all_fails() -> None:
    e = replace(good(), first=[[], []], second=[[], []], reference=[[], []], gets=[], reference_gets=[], verified=[])
    assert len(failed(e)) >= 8


def test_refetched_looks_at_bytes_not_at_requests() -> None:
    before = [Get("a", 0, 10, 1.0, 1.0), Get("a", 10, 10, 9.5, 9.5)]
    assert refetched([*before, Get("a", 10, 5, 10.0, 10.0)], 10.0, 2.0) == [], "within the grace"
    assert refetched([*before, Get("a", 9, 2, 10.0, 10.0)], 10.0, 2.0) == [Get("a", 9, 2, 10.0, 10.0)]
    assert refetched([Get("a", 0, 10, 1.0, 0.0), Get("a", 0, 10, 10.0, 11.0)], 10.0, 2.0) == [], "it never ended"
    assert refetched([*before, Get("b", 0, 10, 10.0, 10.0)], 10.0, 2.0) == []


def request(method: str, key: str, status: int = 200, **more: Any) -> RequestRecord:
    return RequestRecord(method, "b", key, "", more.pop("range", None), status=status, **more)


def test_gets_and_commits_are_read_off_the_requests() -> None:
    step = "run/step-000000000016-g000001/manifest.json"
    later = "run/step-000000000032-g000001/manifest.json"
    seen = [
        request("GET", "wds/0", 206, range=(8, 16), bytes_sent=8, time=1.0, done=1.5),
        request("GET", "wds/0", 404, bytes_sent=300, time=2.0),
        request("GET", "", bytes_sent=50),
        request("HEAD", "wds/0"),
        request("PUT", step),
        request("PUT", later, 412),
        request("PUT", later.replace("run", "other")),
        request("PUT", "run/step-000000000048-g000001/a-p0000.json"),
    ]
    assert gets_of(seen, "b") == [Get("wds/0", 8, 8, 1.0, 1.5), Get("wds/0", 0, 0, 2.0, 0.0)]
    assert gets_of(seen, "c") == []
    assert committed(seen, "b", "run/") == 16
    assert committed(seen[:4], "b", "run/") == 0
