"""Random orders and random faults (refused, lost replies, late and repeated requests, kills) on the model store."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cachefs.errors import CheckpointConflict, CheckpointError, Unavailable
from ckptstore.commit import begin_step
from ckptstore.storage_object import ObjectStorage
from ckptstore.testing.history import History
from ckptstore.testing.interleave import Program, run
from ckptstore.testing.model import Fault, ModelStore, Request
from ckptstore.testing.saving import InstantClock, root_of, write_node

JOBS = ("one", "two", "three")


@dataclass(frozen=True)
class Plan:
    """``order``: whose turn it is, as far as it waits; ``faults``: at which request of which job; ``deliveries``:
    which of the late requests arrives when the network has its turn."""

    order: list[str]
    faults: dict[tuple[str, int], Fault]
    deliveries: list[int]


plans = st.builds(
    Plan,
    order=st.lists(st.sampled_from((*JOBS, "network")), max_size=120),
    faults=st.dictionaries(
        st.tuples(st.sampled_from(JOBS), st.integers(0, 45)),
        st.sampled_from([fault for fault in Fault if fault is not Fault.NONE]),
        min_size=1,
        max_size=8,
    ),
    deliveries=st.lists(st.integers(0, 5), max_size=6),
)


def job(history: History, attempt: str) -> Program:
    """A run of a training job: claim, resume, save three times; it gives a failed save up and goes on."""

    def program(storage: ObjectStorage) -> None:
        try:
            claim = history.claim(storage, attempt)
        except (CheckpointConflict, Unavailable):
            return
        for step in range((claim.resume_step or 0) + 10, (claim.resume_step or 0) + 40, 10):
            try:
                writer = begin_step(storage, step, claim.generation, attempt, clock=InstantClock())
            except (CheckpointConflict, Unavailable):
                continue
            try:
                nodes = [write_node(writer, node, [f"{attempt} {step} {node}".encode()]) for node in range(2)]
                writer.commit(root_of(writer, nodes, InstantClock()), [f for node in nodes for f in node.files])
            except (CheckpointError, Unavailable):
                writer.abort(manifest_sent=writer.manifest_sent)
            else:
                history.acknowledged.append(writer.ref)

    return program


def act_out(plan: Plan) -> None:
    model = ModelStore()
    history = History(model)
    order, faults, injected = list(plan.order), dict(plan.faults), list[str]()

    def network(storage: ObjectStorage) -> None:
        for choice in plan.deliveries:
            storage.exists()  # waits for a turn
            if model.late:
                model.deliver(choice % len(model.late))

    def choose(waiting: list[str], last: str | None) -> str:
        while order:
            wanted = order.pop(0)
            if wanted in waiting:
                return wanted
        return waiting[0]

    def inject(request: Request, number: int) -> Fault:
        fault = faults.pop((request.actor, number), Fault.NONE)
        if not request.writes:  # a read that is late or comes twice is one that is refused or comes once
            instead = {Fault.LATE: Fault.REFUSED, Fault.TWICE: Fault.NONE, Fault.KILLED_LATE: Fault.KILLED}
            fault = instead.get(fault, fault)
        if fault is not Fault.NONE:
            injected.append(f"{fault.value} {request.op}")
        return fault

    programs = {name: job(history, name) for name in JOBS}
    errors = run(model, {**programs, "network": network}, choose, inject)
    for text in injected:
        event(text)
    assert not any(errors.values()), errors
    history.check(model.storage())
    while model.late:
        model.deliver()
    history.check(model.storage())

    survivor = history.claim(model.storage(), "survivor")
    assert history.save(model.storage(), survivor, (survivor.resume_step or 0) + 10, nodes=2)
    history.check(model.storage())
    assert history.acknowledged[-1] == history.read(model.storage())


@given(plan=plans)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_whatever_happens_to_three_attempts_the_promises_hold(plan: Plan) -> None:
    act_out(plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
@given(plan=plans)
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_whatever_happens_to_three_attempts_the_promises_hold_at_length(plan: Plan) -> None:
    act_out(plan)
