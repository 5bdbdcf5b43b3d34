"""One bad reply at any request of a claim and a save on an object store: settled by reading back, within bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachefs.errors import CheckpointConflict, CheckpointError, NearflashError, Unavailable
from ckptstore.claims import TRIES, Claim, claim_generation
from ckptstore.commit import begin_step
from ckptstore.layout import StepRef
from ckptstore.testing.model import Fault, ModelStore, Request
from ckptstore.testing.saving import InstantClock, require_sound, root_of, save_step, write_node
from ckptstore.timeline import latest_ref

REF = StepRef(10, 1)


def once(fault: Fault, wanted: Callable[[int, Request], bool]) -> Callable[[Request], Fault]:
    """A hook that orders ``fault`` for the first request that is wanted; ``number`` counts the writes."""
    count = 0
    done = False

    def hook(request: Request) -> Fault:
        nonlocal count, done
        number = count
        count += request.writes
        if not done and request.writes and wanted(number, request):
            done = True
            return fault
        return Fault.NONE

    return hook


def writes_of_a_run() -> list[Request]:
    model = ModelStore()
    storage = model.storage()
    save_step(storage, claim_generation(storage, "a"), 10, nodes=2)
    return [request for request in model.log if request.writes]


WRITES = writes_of_a_run()


def test_a_run_writes_what_is_expected() -> None:
    assert [request.key.rpartition("/")[2] for request in WRITES] == [
        "000001.json",
        "000001.start.json",
        "a-r00000-0000.safetensors",
        "a-p0000.json",
        "a-r00001-0000.safetensors",
        "a-p0001.json",
        "manifest.json",
    ]


@pytest.mark.parametrize("fault", [Fault.REPLY_LOST, Fault.REFUSED, Fault.TWICE, Fault.LATE])
@pytest.mark.parametrize("number", range(len(WRITES)))
def test_one_bad_reply_at_any_write_costs_nothing(number: int, fault: Fault) -> None:
    model = ModelStore()
    storage = model.storage(hook=once(fault, lambda n, request: n == number))
    claim = claim_generation(storage, "a", clock=InstantClock())
    assert save_step(storage, claim, 10, nodes=2, clock=InstantClock()) == REF
    before = dict(model.objects)
    while model.late:
        model.deliver()
    assert model.objects == before
    assert latest_ref(model.storage()) == REF
    require_sound(model.storage(), REF)


@pytest.mark.parametrize("name", [request.key.rpartition("/")[2] for request in WRITES])
@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.REPLY_LOST])
def test_a_store_that_stays_silent_is_given_up_after_a_few_tries(name: str, fault: Fault) -> None:
    model = ModelStore()

    def hook(request: Request) -> Fault:
        tries.extend([1] * (request.writes and request.key.endswith(name)))
        if fault is Fault.REPLY_LOST and not request.writes and request.key.endswith(name):
            return Fault.REFUSED  # nothing can be read back either
        return fault if request.key.endswith(name) and request.writes else Fault.NONE

    tries: list[int] = []
    storage = model.storage(hook=hook)
    with pytest.raises(NearflashError) as caught:
        save_step(storage, claim_generation(storage, "a", clock=InstantClock()), 10, nodes=2, clock=InstantClock())
    assert isinstance(caught.value, Unavailable | CheckpointError)
    assert name in str(caught.value)
    assert len(tries) <= TRIES


def failing_commit(model: ModelStore, fault: Fault) -> tuple[Claim, CheckpointError]:
    """A save whose manifest always meets ``fault``, then its abort."""
    claim = claim_generation(model.storage(), "a")
    storage = model.storage(
        hook=lambda r: fault if r.op == "put" and r.key.endswith("manifest.json") and not giving_up else Fault.NONE
    )
    giving_up: list[bool] = []
    writer = begin_step(storage, 10, claim.generation, claim.attempt, clock=InstantClock())
    node = write_node(writer, 0, [b"x"])
    with pytest.raises(CheckpointError, match=r"whether step 10 .* could not be learned") as caught:
        writer.commit(root_of(writer, [node]), node.files)
    giving_up.append(True)
    assert writer.abort() == []
    return claim, caught.value


def test_a_manifest_that_arrives_after_the_save_was_given_up_revives_nothing() -> None:
    model = ModelStore()
    claim, error = failing_commit(model, Fault.LATE)
    assert "manifest.json" in str(error)
    assert len(model.late) == TRIES
    while model.late:
        model.deliver()
    assert latest_ref(model.storage()) is None
    assert not any(key.endswith(".safetensors") for key in model.objects)
    with pytest.raises(CheckpointConflict, match="was given up or deleted"):
        save_step(model.storage(), claim, 10)
    save_step(model.storage(), claim, 20)
    assert latest_ref(model.storage()) == StepRef(20, 1)


def test_an_abort_that_cannot_leave_a_tombstone_deletes_nothing() -> None:
    model = ModelStore()
    claim = claim_generation(model.storage(), "a")
    silent = model.storage(hook=lambda r: Fault.REFUSED if r.key.endswith("manifest.json") and r.writes else Fault.NONE)
    writer = begin_step(silent, 10, claim.generation, claim.attempt, clock=InstantClock())
    node = write_node(writer, 0, [b"x"])
    (problem,) = writer.abort()
    assert isinstance(problem, Unavailable)
    assert any(key.endswith(node.files[0].name) for key in model.objects)


def test_reading_latest_costs_a_few_requests_however_many_steps_there_are() -> None:
    counts = []
    for steps in (3, 60):
        model = ModelStore()
        claim = claim_generation(model.storage(), "a")
        for step in range(1, steps + 1):
            save_step(model.storage(), claim, step)
        model.log.clear()
        assert latest_ref(model.storage()) == StepRef(steps, 1)
        counts.append(len(model.log))
    assert counts[0] == counts[1] <= 7
