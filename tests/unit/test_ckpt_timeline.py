"""Which checkpoints count: the pure decision, and claims and readers on a model store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import CheckpointConflict, CheckpointDamaged, CheckpointNotFound, CheckpointUnsupported, ConfigError
from ckptstore.claims import (
    Claim,
    claim_generation,
    create_record,
    default_attempt_id,
    find_claim,
    generations,
    read_claim,
    read_start,
)
from ckptstore.layout import StepRef, claim_name, start_name
from ckptstore.manifest import ClaimRecord, StartRecord, Tombstone, encode_sealed
from ckptstore.testing.model import ModelStore
from ckptstore.testing.saving import InstantClock, save_step
from ckptstore.timeline import build_timeline, committed_steps, find_step, latest_ref, read_timeline, walk
from ckptstore.verify import Damage

Starts = dict[int, StepRef | None]


def live(steps: list[StepRef], starts: Starts) -> tuple[StepRef, ...]:
    return build_timeline(steps, starts, lambda g: starts.get(g)).live


# --- the decision ---------------------------------------------------------------------------------------------------


def test_a_generation_goes_on_from_its_parents_step() -> None:
    steps = [StepRef(s, g) for s, g in [(10, 1), (20, 1), (30, 2), (40, 2)]]
    starts: Starts = {1: None, 2: StepRef(20, 1)}
    assert live(steps, starts) == (StepRef(40, 2), StepRef(30, 2), StepRef(20, 1), StepRef(10, 1))


def test_a_generation_that_has_committed_nothing_is_at_the_step_it_started_from() -> None:
    steps = [StepRef(10, 1), StepRef(20, 1)]
    assert live(steps, {1: None, 2: StepRef(20, 1)})[0] == StepRef(20, 1)


def test_a_zombies_step_is_on_another_timeline() -> None:
    steps = [StepRef(70, 2), StepRef(80, 2), StepRef(75, 3)]
    starts: Starts = {2: None, 3: StepRef(70, 2)}
    timeline = build_timeline(steps, starts, starts.__getitem__)
    assert timeline.head == 3
    assert timeline.live == (StepRef(75, 3), StepRef(70, 2))
    assert timeline.others == (StepRef(80, 2),)
    assert live(steps[:2], starts) == (StepRef(70, 2),)


def test_going_back_on_purpose_is_a_generation_with_an_older_start() -> None:
    steps = [StepRef(s, 1) for s in (10, 20, 30)]
    starts: Starts = {1: None, 2: StepRef(10, 1)}
    assert live(steps, starts) == (StepRef(10, 1),)
    assert live([*steps, StepRef(20, 2)], starts) == (StepRef(20, 2), StepRef(10, 1))


def test_a_step_may_repeat_and_the_newer_generations_comes_first() -> None:
    steps = [StepRef(10, 1), StepRef(10, 2)]
    assert live(steps, {1: None, 2: StepRef(10, 1)}) == (StepRef(10, 2), StepRef(10, 1))


def test_a_claim_without_a_start_record_decides_nothing() -> None:
    starts: Starts = {1: None}  # generation 2 is claimed, and that is all
    assert live([StepRef(10, 1)], starts) == (StepRef(10, 1),)


def test_starting_from_nothing_leaves_older_timelines_alone() -> None:
    starts: Starts = {1: None, 2: None}
    timeline = build_timeline([StepRef(10, 1)], starts, starts.__getitem__)
    assert timeline.live == ()
    assert timeline.others == (StepRef(10, 1),)


def test_step_folders_that_were_copied_without_their_generations_still_count() -> None:
    assert live([StepRef(10, 1), StepRef(20, 2)], {}) == (StepRef(20, 2),)


def test_an_empty_store_has_no_head() -> None:
    timeline = build_timeline([], {}, lambda g: None)
    assert (timeline.head, timeline.live, timeline.others) == (None, (), ())


def test_a_start_that_is_not_older_ends_the_timeline() -> None:
    starts: Starts = {1: StepRef(10, 2), 2: StepRef(10, 1)}
    assert list(walk([StepRef(10, 1), StepRef(20, 2)], 2, starts.__getitem__)) == [StepRef(20, 2), StepRef(10, 1)]


def test_only_the_generations_that_are_reached_are_asked_for() -> None:
    asked: list[int] = []

    def start_of(generation: int) -> StepRef | None:
        asked.append(generation)
        return StepRef(10 * (generation - 1), generation - 1) if generation > 1 else None

    steps = [StepRef(10 * g, g) for g in range(1, 100)]
    assert next(walk(steps, 99, start_of)) == StepRef(990, 99)
    assert asked == []


@st.composite
def stores(draw: st.DrawFn) -> tuple[list[StepRef], Starts]:
    """A history as honest attempts make it: each generation starts from a step that is there, or from nothing."""
    steps: list[StepRef] = []
    starts: Starts = {}
    for generation in range(1, draw(st.integers(1, 6)) + 1):
        starts[generation] = draw(st.sampled_from([None, *steps])) if steps else None
        steps += [StepRef(s, generation) for s in draw(st.sets(st.integers(0, 12), max_size=4))]
    return steps, starts


@given(store=stores())
def test_the_timeline_follows_from_its_definition(store: tuple[list[StepRef], Starts]) -> None:
    steps, starts = store
    timeline = build_timeline(steps, starts, starts.__getitem__)

    def belongs(ref: StepRef, generation: int, limit: float) -> bool:
        if ref.generation == generation:
            return ref.step <= limit
        start = starts[generation]
        return start is not None and belongs(ref, start.generation, start.step)

    head = max(starts)
    assert timeline.head == head
    assert set(timeline.live) == {ref for ref in steps if belongs(ref, head, float("inf"))}
    assert set(timeline.live) | set(timeline.others) == set(steps)
    assert not set(timeline.live) & set(timeline.others)
    keys = [(ref.generation, ref.step) for ref in timeline.live]
    assert keys == sorted(keys, reverse=True)
    newest = [ref for ref in steps if ref.generation == head]
    start = starts[head]
    if newest:
        assert timeline.live[0] == max(newest)
    elif start is not None:
        assert timeline.live[0] == start


# --- attempt ids ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({"TORCHELASTIC_RUN_ID": "j7", "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_JOB_ID": "9"}, "torchelastic.j7.2"),
        ({"TORCHELASTIC_RUN_ID": "j7"}, "torchelastic.j7.0"),
        ({"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}, "slurm.9.1"),
        ({"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "4"}, "slurm.9.0.4"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "SLURM_JOB_ID": "9"}, "slurm.9.0"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}, "run.drawn"),
        ({"TORCHELASTIC_RUN_ID": "", "SLURM_JOB_ID": ""}, "run.drawn"),
        ({}, "run.drawn"),
    ],
)
def test_the_attempt_id_comes_from_the_launcher_or_by_chance(environ: dict[str, str], expected: str) -> None:
    assert default_attempt_id(environ, draw=lambda: "drawn") == expected


def test_a_nonce_tells_two_launches_with_one_run_id_apart() -> None:
    environ = {"TORCHELASTIC_RUN_ID": "j7", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert default_attempt_id(environ, nonce="n1") == "torchelastic.j7.0.n1"
    assert default_attempt_id({}, nonce="n1") == "run.n1"


def test_without_a_launcher_each_id_is_another() -> None:
    assert default_attempt_id({}) != default_attempt_id({})


# --- claims ---------------------------------------------------------------------------------------------------------


def claim(model: ModelStore, attempt: str, **options: object) -> Claim:
    return claim_generation(model.storage(), attempt, clock=InstantClock(), **options)  # type: ignore[arg-type]


def test_claims_count_up_and_resume_from_the_newest() -> None:
    model = ModelStore()
    first = claim(model, "one")
    assert first == Claim(1, "one", None, None)
    assert first.resume is None
    save_step(model.storage(), first, 10)
    second = claim(model, "two")
    assert second == Claim(2, "two", 1, 10)
    assert second.resume == StepRef(10, 1)
    assert generations(model.storage()) == [1, 2]


def test_one_attempt_claims_once_whatever_has_happened_since() -> None:
    model = ModelStore()
    first = claim(model, "one")
    save_step(model.storage(), first, 10)
    assert claim(model, "one") == first
    claim(model, "two")
    assert claim(model, "one") == first
    assert generations(model.storage()) == [1, 2]


def test_ranks_find_the_claim_once_it_is_whole() -> None:
    model = ModelStore()
    assert find_claim(model.storage(), "one") is None
    create_record(model.storage(), claim_name(1), encode_sealed(ClaimRecord(generation=1, attempt="one", created=0.0)))
    assert find_claim(model.storage(), "one") is None
    assert claim(model, "one") == find_claim(model.storage(), "one") == Claim(1, "one", None, None)


def test_looking_claims_nothing() -> None:
    model = ModelStore()
    storage = model.storage()
    assert latest_ref(storage) is None
    assert committed_steps(storage) == []
    assert read_claim(storage, 1) is None
    assert read_start(storage, 1) is None
    assert model.objects == {}


def test_a_generation_can_start_from_an_older_step_or_from_nothing() -> None:
    model = ModelStore()
    first = claim(model, "one")
    for step in (10, 20, 30):
        save_step(model.storage(), first, step)
    back = claim(model, "two", start=StepRef(10, 1))
    assert back.resume == StepRef(10, 1)
    assert latest_ref(model.storage()) == StepRef(10, 1)
    save_step(model.storage(), back, 20)
    timeline = read_timeline(model.storage())
    assert timeline.live == (StepRef(20, 2), StepRef(10, 1))
    assert timeline.others == (StepRef(30, 1), StepRef(20, 1))
    fresh = claim(model, "three", start="nothing")
    assert fresh.resume is None
    assert latest_ref(model.storage()) is None


def test_a_start_that_is_not_there_is_refused_before_a_generation_is_spent() -> None:
    model = ModelStore()
    save_step(model.storage(), claim(model, "one"), 10)
    with pytest.raises(CheckpointNotFound, match=r"no step 20 of generation 1 \(there are 10\)"):
        claim(model, "two", start=StepRef(20, 1))
    assert generations(model.storage()) == [1]


def test_a_claim_that_is_overtaken_before_it_has_begun_is_told_so() -> None:
    model = ModelStore()
    storage = model.storage()
    create_record(storage, claim_name(1), encode_sealed(ClaimRecord(generation=1, attempt="slow", created=0.0)))
    claim(model, "fast")
    with pytest.raises(CheckpointConflict, match="generation 1 has lost the store to generation 2"):
        claim(model, "slow")


def test_a_claim_that_cannot_be_read_still_counts() -> None:
    model = ModelStore()
    model.objects["run/generations/000001.json"] = b"torn"
    assert claim(model, "one").generation == 2


def test_names_of_others_beside_the_claims_are_ignored() -> None:
    model = ModelStore()
    for name in ("generations/README", "generations/000007.json.bak", "step-12/manifest.json", "notes.txt"):
        model.objects[f"run/{name}"] = b"mine"
    first = claim(model, "one")
    save_step(model.storage(), first, 10)
    assert first.generation == 1
    assert committed_steps(model.storage()) == [StepRef(10, 1)]


def test_an_empty_attempt_id_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty attempt id"):
        claim(ModelStore(), "")


# --- readers --------------------------------------------------------------------------------------------------------


def three_steps() -> ModelStore:
    model = ModelStore()
    first = claim(model, "one")
    for step in (10, 20, 30):
        save_step(model.storage(), first, step)
    return model


def key_of(model: ModelStore, ref: StepRef, ending: str) -> str:
    (key,) = (key for key in model.objects if ref.folder in key and key.endswith(ending))
    return key


@pytest.mark.parametrize("ending", ["manifest.json", "-p0000.json", ".safetensors"])
@pytest.mark.parametrize("cut", [0, 5])
def test_a_damaged_step_is_reported_and_the_one_before_it_is_taken(ending: str, cut: int) -> None:
    model = three_steps()
    key = key_of(model, StepRef(30, 1), ending)
    model.objects[key] = model.objects[key][:cut]
    reports: list[tuple[StepRef, list[Damage]]] = []
    found = latest_ref(model.storage(), on_damage=lambda ref, damages: reports.append((ref, damages)))
    assert found == StepRef(20, 1)
    ((ref, (damage,)),) = reports
    assert ref == StepRef(30, 1)
    assert damage.file == key.removeprefix("run/")
    assert latest_ref(model.storage(), verify=False) == StepRef(30, 1)
    assert claim(model, "two").resume == StepRef(20, 1)


def test_when_no_step_is_sound_a_run_does_not_quietly_start_from_nothing() -> None:
    model = three_steps()
    for key in [key for key in model.objects if key.endswith(".safetensors")]:
        del model.objects[key]
    with pytest.raises(CheckpointDamaged, match=r"no checkpoint is sound; the newest, step 30 .*missing"):
        latest_ref(model.storage())
    with pytest.raises(CheckpointDamaged):
        claim(model, "two")


def test_a_step_of_a_newer_version_is_not_passed_over() -> None:
    model = three_steps()
    key = key_of(model, StepRef(30, 1), "manifest.json")
    from cachefs.hashing import tensor_digest

    body = b'"kind":"checkpoint","format":99,"step":30,"generation":1}'
    model.objects[key] = b'{"digest":"%b",%b' % (tensor_digest(body).encode(), body)
    with pytest.raises(CheckpointUnsupported, match="use a newer nearflash"):
        latest_ref(model.storage())
    assert StepRef(30, 1) in committed_steps(model.storage())


def test_a_tombstone_in_the_manifests_place_or_beside_it_means_no_checkpoint() -> None:
    model = three_steps()
    tombstone = encode_sealed(Tombstone(step=30, generation=1, attempt="one", created=0.0, reason="retention"))
    model.objects[key_of(model, StepRef(30, 1), "manifest.json")] = tombstone
    model.objects[f"run/{StepRef(20, 1).tombstone}"] = tombstone
    assert latest_ref(model.storage()) == StepRef(10, 1)
    assert latest_ref(model.storage(), verify=False) == StepRef(10, 1)
    assert committed_steps(model.storage()) == [StepRef(10, 1)]
    for step in (20, 30):
        with pytest.raises(CheckpointNotFound):
            find_step(model.storage(), step)


def test_a_step_is_found_by_number_and_other_timelines_by_generation() -> None:
    model = three_steps()
    save_step(model.storage(), claim(model, "two", start=StepRef(10, 1)), 30)
    storage = model.storage()
    assert find_step(storage, 30) == StepRef(30, 2)
    assert find_step(storage, 30, 1) == StepRef(30, 1)
    with pytest.raises(CheckpointNotFound, match=r"there is no step 20 \(there are 30, 10, 30@g1, 20@g1\)"):
        find_step(storage, 20)
    with pytest.raises(CheckpointNotFound, match="of generation 9"):
        find_step(storage, 30, 9)


def test_a_lost_or_torn_start_record_is_an_error_only_where_it_is_needed() -> None:
    model = three_steps()
    save_step(model.storage(), claim(model, "two"), 40)
    model.objects[f"run/{start_name(2)}"] = b"torn"
    storage = model.storage()
    assert latest_ref(storage) == StepRef(40, 2)
    assert find_step(storage, 20, 1) == StepRef(20, 1)
    with pytest.raises(CheckpointDamaged, match=r"000002\.start\.json"):
        committed_steps(storage)


def test_start_records_of_a_model_are_what_the_claims_say() -> None:
    model = three_steps()
    second = claim(model, "two")
    record = read_start(model.storage(), 2)
    assert record == StartRecord(generation=2, attempt="two", parent=1, step=30)
    assert record.ref == second.resume
