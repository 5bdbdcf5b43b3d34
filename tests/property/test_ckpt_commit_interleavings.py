"""Every order in which two attempts and a reader may take turns at one object store (few changes of turn)."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from cachefs.errors import CheckpointConflict, CheckpointError
from ckptstore.claims import Claim, claim_generation
from ckptstore.commit import StepWriter, begin_step
from ckptstore.layout import StepRef
from ckptstore.storage_object import ObjectStorage
from ckptstore.testing.history import History
from ckptstore.testing.interleave import Program, enumerate_runs, run
from ckptstore.testing.model import ModelStore
from ckptstore.testing.saving import InstantClock, root_of, save_step, write_node

Scenario = Callable[[ModelStore, History], dict[str, Program]]


def explore(scenario: Scenario, preemptions: int, check: Callable[[ModelStore, History], None]) -> int:
    runs = 0
    for choose in enumerate_runs(preemptions):
        model = ModelStore()
        history = History(model)
        programs = scenario(model, history)
        errors = run(model, programs, choose)
        assert not any(errors.values()), errors
        check(model, history)
        runs += 1
    return runs


def at_end(model: ModelStore, history: History) -> None:
    history.check(model.storage())


def zombie_and_successor(model: ModelStore, history: History) -> dict[str, Program]:
    """Attempt 1 has step 10 and goes on saving while attempt 2 takes over, and somebody looks."""
    first = history.claim(model.storage(), "one")
    assert history.save(model.storage(), first, 10)

    def old(storage: ObjectStorage) -> None:
        if history.save(storage, first, 20):
            history.save(storage, first, 30)

    def new(storage: ObjectStorage) -> None:
        claim = history.claim(storage, "two")
        assert history.save(storage, claim, (claim.resume_step or 0) + 5)

    return {"old": old, "new": new}


def with_reader(scenario: Scenario) -> Scenario:
    def extended(model: ModelStore, history: History) -> dict[str, Program]:
        programs = scenario(model, history)

        def reader(storage: ObjectStorage) -> None:
            history.read(storage)

        return {**programs, "reader": reader}

    return extended


def test_a_zombie_is_never_acknowledged_nor_picked() -> None:
    assert explore(zombie_and_successor, 2, at_end) > 250


def test_a_reader_in_between_sees_neither_less_than_promised_nor_a_zombie() -> None:
    assert explore(with_reader(zombie_and_successor), 1, at_end) > 100


def test_a_reader_does_not_mistake_a_zombies_late_step_for_the_newest() -> None:
    """The reader looks, a generation starts, a zombie's step comes into place, the reader goes on."""

    def scenario(model: ModelStore, history: History) -> dict[str, Program]:
        first = history.claim(model.storage(), "one")
        assert history.save(model.storage(), first, 10)
        writer = begin_step(model.storage(), 20, first.generation, first.attempt)
        node = write_node(writer, 0, [b"late"])

        def old(storage: ObjectStorage) -> None:
            try:
                StepWriter(storage, writer.ref, "one").commit(root_of(writer, [node]), node.files)
            except CheckpointConflict:
                return
            history.acknowledged.append(writer.ref)

        def new(storage: ObjectStorage) -> None:
            history.claim(storage, "two")

        def reader(storage: ObjectStorage) -> None:
            history.read(storage)

        return {"reader": reader, "old": old, "new": new}

    assert explore(scenario, 2, at_end) > 500


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_zombie_is_never_acknowledged_nor_picked_with_more_changes_of_turn() -> None:
    explore(zombie_and_successor, 3, at_end)
    explore(with_reader(zombie_and_successor), 2, at_end)


def test_two_claims_at_once_get_two_generations_and_one_survives() -> None:
    def scenario(model: ModelStore, history: History) -> dict[str, Program]:
        def attempt(name: str) -> Program:
            def program(storage: ObjectStorage) -> None:
                try:
                    claim = history.claim(storage, name)
                except CheckpointConflict:
                    return  # overtaken before it had begun
                history.save(storage, claim, 10)

            return program

        return {"one": attempt("one"), "two": attempt("two")}

    def check(model: ModelStore, history: History) -> None:
        history.check(model.storage())
        newest = max(history.claims, key=lambda claim: claim.generation)
        assert StepRef(10, newest.generation) in history.acknowledged

    assert explore(scenario, 2, check) > 100


def test_of_two_attempts_that_race_for_one_step_exactly_one_is_acknowledged() -> None:
    def scenario(model: ModelStore, history: History) -> dict[str, Program]:
        claims = [history.claim(model.storage(), name) for name in ("one", "two")]

        def racer(claim: Claim) -> Program:
            def program(storage: ObjectStorage) -> None:
                history.save(storage, claim, 10)

            return program

        return {claim.attempt: racer(claim) for claim in claims}

    def check(model: ModelStore, history: History) -> None:
        history.check(model.storage())
        assert history.acknowledged == [StepRef(10, 2)]

    assert explore(scenario, 2, check) > 50


def test_two_runs_that_wrongly_share_one_attempt_id_never_both_get_one_step() -> None:
    """The id is the user's mistake; the checkpoint must still be of one of them, and whole."""

    def scenario(model: ModelStore, history: History) -> dict[str, Program]:
        claim = history.claim(model.storage(), "same")

        def racer(salt: str) -> Program:
            def program(storage: ObjectStorage) -> None:
                try:
                    history.acknowledged.append(save_step(storage, claim, 10, salt=salt, clock=InstantClock()))
                except CheckpointConflict:
                    return

            return program

        return {"one": racer("one"), "two": racer("two")}

    assert explore(scenario, 3, at_end) > 50


def test_an_abort_against_the_commit_of_another_rank_leaves_all_or_nothing() -> None:
    """A rank gives a save up (its coordinator seems dead) while the coordinator commits it."""

    def scenario(model: ModelStore, history: History) -> dict[str, Program]:
        claim = history.claim(model.storage(), "one")
        nodes = [
            write_node(begin_step(model.storage(), 10, claim.generation, claim.attempt), 0, [b"coordinator"]),
        ]

        def follower(storage: ObjectStorage) -> None:
            try:
                writer = begin_step(storage, 10, claim.generation, claim.attempt, clock=InstantClock())
            except CheckpointConflict:  # too late: committed without this rank
                return
            nodes.append(write_node(writer, 1, [b"follower"]))
            assert writer.abort() == []

        def coordinator(storage: ObjectStorage) -> None:
            try:
                writer = begin_step(storage, 10, claim.generation, claim.attempt, clock=InstantClock())
                writer.commit(root_of(writer, nodes), [file for node in nodes for file in node.files])
            except CheckpointError:
                assert len(nodes) == 2, "nothing was in the way before the follower had written"
            else:
                history.acknowledged.append(writer.ref)

        return {"follower": follower, "coordinator": coordinator}

    outcomes = set()

    def check(model: ModelStore, history: History) -> None:
        history.check(model.storage())
        outcomes.add(bool(history.acknowledged))

    explore(scenario, 2, check)
    assert outcomes == {True, False}


def test_the_enumeration_finds_a_commit_that_does_not_look_for_newer_claims() -> None:
    """The exploration is worth something: leave one check out and it finds the order that breaks the promise."""

    def scenario(model: ModelStore, history: History) -> dict[str, Program]:
        first = history.claim(model.storage(), "one")

        def careless(storage: ObjectStorage) -> None:
            try:
                history.acknowledged.append(save_step(storage, first, 20, clock=InstantClock()))
            except CheckpointConflict as e:
                if "lost the store" in str(e) and any("manifest" in key for key in model.objects):
                    history.acknowledged.append(StepRef(20, 1))

        def new(storage: ObjectStorage) -> None:
            history.claim(storage, "two")

        return {"careless": careless, "new": new}

    with pytest.raises(AssertionError, match="was acknowledged"):
        explore(scenario, 2, at_end)


def test_the_enumeration_visits_every_order_of_independent_requests() -> None:
    def scenario(model: ModelStore, history: History) -> dict[str, Program]:
        def program(storage: ObjectStorage) -> None:
            name = storage.store._actor  # type: ignore[attr-defined]
            storage.create(f"{name}/1", b"")
            storage.create(f"{name}/2", b"")

        return {"a": program, "b": program}

    seen: set[tuple[str, ...]] = set()
    explore(scenario, 4, lambda model, history: seen.add(tuple(request.actor for request in model.log)))
    assert seen == set(itertools.permutations("aabb"))


def test_claiming_again_finds_the_same_claim() -> None:
    model = ModelStore()
    claim = claim_generation(model.storage(), "one")
    save_step(model.storage(), claim, 10)
    assert claim_generation(model.storage(), "one") == claim
