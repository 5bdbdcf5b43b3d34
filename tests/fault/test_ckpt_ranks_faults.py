"""One rank fails, is missing, or is out of step: all ranks fail together, the step before stays, the next one works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cachefs.errors import (
    CheckpointConflict,
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    NearflashError,
    RankFailed,
    Unavailable,
)
from ckptstore import CheckpointStore, Timeouts
from ckptstore.ranks import LocalKeys
from ckptstore.testing.job import Raised, run_job, values
from ckptstore.testing.model import Fault, ModelStore, Request

WORLD = 4


def refuse(rank: int, bad: int, *words: str) -> Callable[[Request], Fault] | None:
    """Rank ``bad`` cannot write anything whose key has these words."""
    if rank != bad:
        return None
    return lambda request: Fault.REFUSED if request.writes and all(w in request.key for w in words) else Fault.NONE


def state(step: int, rank: int) -> dict[str, Any]:
    return {"same": torch.full((300,), float(step)), "own": torch.full((3,), float(rank)), "step": step}


def caught(call: Callable[[], Any]) -> NearflashError | None:
    try:
        call()
    except NearflashError as e:
        return e
    return None


def errors(results: list[Any]) -> list[BaseException]:
    """What the ranks of a job raised, all of them."""
    assert all(isinstance(r, Raised) for r in results)
    return [r.error for r in results]


@pytest.mark.parametrize("bad", [0, 2])
@pytest.mark.parametrize("word", ["-r0000", "-p000"])
def test_one_rank_that_cannot_write_fails_the_save_everywhere(bad: int, word: str) -> None:
    model, keys = ModelStore(), LocalKeys()

    def work(store: CheckpointStore, rank: int) -> tuple[Any, ...]:
        store.save(1, state(1, rank), per_rank="own")
        saving = store.save_async(2, state(2, rank), per_rank="own")
        failure = caught(lambda: store.save_async(3, state(3, rank), per_rank="own"))
        during = store.latest()
        store.save(3, state(3, rank), per_rank="own")
        return saving.done(), failure, during, store.latest(), store.load()["own"]

    results = values(
        run_job(
            WORLD,
            work,
            lambda rank: model.storage(f"rank{rank}", refuse(rank, bad, "step-000000000002", word)),
            keys=keys,
        )
    )
    for rank, (done, failure, during, latest, own) in enumerate(results):
        assert done and during == 1 and latest == 3
        assert torch.equal(own, torch.full((3,), float(rank)))
        assert isinstance(failure, (Unavailable, RankFailed))
        if isinstance(failure, RankFailed):
            assert f"rank {bad - bad % 2 if 'p000' in word else bad}:" in str(failure)
    assert not [key for key in model.objects if "step-000000000002" in key]
    assert all(key.startswith("opened/") for key in keys._values)


def test_a_commit_that_fails_fails_everywhere() -> None:
    model = ModelStore()

    def work(store: CheckpointStore, rank: int) -> NearflashError | None:
        return caught(lambda: store.save(1, state(1, 0)))

    results = run_job(3, work, lambda rank: model.storage(f"rank{rank}", refuse(rank, 0, "manifest.json")))
    assert all(isinstance(r, (Unavailable, CheckpointError)) for r in values(results))


def test_the_last_save_of_a_job_fails_at_its_end() -> None:
    model = ModelStore()

    def work(store: CheckpointStore, rank: int) -> None:
        store.save_async(1, state(1, 0))

    results = errors(run_job(3, work, lambda rank: model.storage(f"rank{rank}", refuse(rank, 1, "-r00001"))))
    assert all(isinstance(r, NearflashError) for r in results)
    assert "rank 1" in str(results[0]) and "rank 1" in str(results[2])


def test_a_missing_rank_is_named_and_the_next_save_works() -> None:
    model = ModelStore()

    def work(store: CheckpointStore, rank: int) -> Any:
        store.save(1, state(1, 0))
        failure = None
        if rank != 2:
            failure = caught(lambda: store.save(2, state(2, 0)))
        store.save(3, state(3, 0))
        return failure, store.steps()

    results = values(
        run_job(WORLD, work, lambda rank: model.storage(f"rank{rank}"), timeouts=Timeouts(rank=3.0, save=60))
    )
    for rank, (failure, steps) in enumerate(results):
        assert steps == [1, 3]
        if rank != 2:
            assert isinstance(failure, RankFailed) and "rank 2 of 4 not heard of" in str(failure)


def test_a_rank_that_dies_while_it_writes_is_named() -> None:
    model = ModelStore()

    def hook(rank: int) -> Any:
        if rank != 1:
            return None
        return lambda request: Fault.KILLED if "-r00001" in request.key else Fault.NONE

    def work(store: CheckpointStore, rank: int) -> None:
        store.save(1, state(1, rank), per_rank=True)

    storage = lambda rank: model.storage(f"rank{rank}", hook(rank))  # noqa: E731
    results = errors(run_job(3, work, storage, timeouts=Timeouts(rank=3.0)))
    assert isinstance(results[0], RankFailed) and isinstance(results[2], RankFailed)
    assert "rank 1" in str(results[0])
    assert not [key for key in model.objects if "manifest" in key and b'"kind":"checkpoint"' in model.objects[key]]


def test_a_state_that_one_rank_cannot_save_is_told_to_all_at_once() -> None:
    model = ModelStore()

    def work(store: CheckpointStore, rank: int) -> Any:
        bad: dict[str, Any] = {"x": object()} if rank == 3 else {"x": 1}
        failure = caught(lambda: store.save(1, bad))
        store.save(2, {"x": 1})
        return failure, store.latest()

    results = values(run_job(WORLD, work, lambda rank: model.storage(f"rank{rank}")))
    assert [latest for _, latest in results] == [2] * WORLD
    assert isinstance(results[3][0], CheckpointMismatch) and "'x' is a builtins.object" in str(results[3][0])
    for failure, _ in results[:3]:
        assert isinstance(failure, RankFailed) and "rank 3" in str(failure) and "'x'" in str(failure)


def test_tensors_that_differ_are_refused_by_name_and_rank_on_all_ranks() -> None:
    model = ModelStore()

    def work(store: CheckpointStore, rank: int) -> Any:
        return caught(lambda: store.save(1, {"rng": torch.full((2,), rank % 2), "lr": torch.tensor(0.1)}))

    results = values(run_job(WORLD, work, lambda rank: model.storage(f"rank{rank}")))
    assert {type(r) for r in results} == {CheckpointMismatch}
    assert all("'rng' differs between ranks 0,2 and ranks 1,3" in str(r) for r in results)


def test_per_rank_values_come_back_on_as_many_and_on_fewer_and_more_ranks(caplog: pytest.LogCaptureFixture) -> None:
    model = ModelStore()

    def save(store: CheckpointStore, rank: int) -> None:
        own = {"rng": torch.full((2,), rank), "seed": rank, "lr": torch.tensor(0.1)}
        store.save(1, own, per_rank=["rng", "seed"])

    def load(store: CheckpointStore, rank: int) -> tuple[int, int]:
        found = store.load({"rng": torch.zeros(2, dtype=torch.int64), "lr": torch.tensor(0.0)})
        assert found["lr"].item() == pytest.approx(0.1)
        return int(found["rng"][0]), found["seed"]

    values(run_job(4, save, lambda rank: model.storage(f"rank{rank}")))
    assert values(run_job(4, load, lambda rank: model.storage())) == [(r, r) for r in range(4)]
    assert values(run_job(2, load, lambda rank: model.storage())) == [(r, r) for r in range(2)]
    assert caplog.text == ""
    assert values(run_job(6, load, lambda rank: model.storage())) == [(r % 4, r % 4) for r in range(6)]
    assert "rank 5 takes over from rank 1, of 4 that saved: rng, seed" in caplog.text
    assert sum(len(data) for key, data in model.objects.items() if key.endswith("safetensors")) < 3000


def test_buffers_under_data_parallel_wrappers_come_from_rank_0() -> None:
    from ckptstore.stateful import is_replicated

    class FullyShardedDataParallel(torch.nn.Module):
        """Stands for a wrapper whose real form needs a process group; it is known by its name."""

        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self._fsdp_wrapped_module = module

    model = ModelStore()

    def work(store: CheckpointStore, rank: int) -> Any:
        norm = torch.nn.BatchNorm1d(2)
        norm.running_mean.fill_(float(rank))
        wrapped = FullyShardedDataParallel(norm)
        assert is_replicated(wrapped) and not is_replicated(norm)
        plain = caught(lambda: store.save(1, {"m": norm}))
        store.save(2, {"m": wrapped})
        return str(plain), store.load(step=2)["m"]["running_mean"].tolist()

    for plain, mean in values(run_job(3, work, lambda rank: model.storage(f"rank{rank}"))):
        assert "'m/running_mean' differs between rank 0, rank 1 and rank 2" in plain
        assert mean == [0.0, 0.0]


def test_a_step_that_is_damaged_for_one_rank_is_given_up_by_all() -> None:
    model = ModelStore()

    def save(store: CheckpointStore, rank: int) -> None:
        for step in (1, 2):
            store.save(step, {"x": torch.full((2,), float(rank)), "n": step}, per_rank=True)

    def load(store: CheckpointStore, rank: int) -> tuple[int, float]:
        target = torch.zeros(2)
        found = store.load({"x": target})
        return found["n"], target[0].item()

    values(run_job(3, save, lambda rank: model.storage(f"rank{rank}"), attempt="a"))
    bad = next(key for key in model.objects if "step-000000000002" in key and "-r00002-" in key)
    model.objects[bad] = model.objects[bad][:-1] + bytes([model.objects[bad][-1] ^ 255])
    assert values(run_job(3, load, lambda rank: model.storage())) == [(1, float(r)) for r in range(3)]

    def exactly(store: CheckpointStore, rank: int) -> NearflashError | None:
        return caught(lambda: store.load(step=2))

    results = values(run_job(3, exactly, lambda rank: model.storage()))
    assert all(isinstance(r, CheckpointDamaged) for r in results)


def test_a_template_that_does_not_fit_on_one_rank_fails_on_all() -> None:
    model = ModelStore()
    values(run_job(1, lambda s, r: s.save(1, {"x": torch.ones(2)}), lambda rank: model.storage()))

    def load(store: CheckpointStore, rank: int) -> NearflashError | None:
        return caught(lambda: store.load({"x": torch.ones(3 if rank == 1 else 2)}))

    results = values(run_job(3, load, lambda rank: model.storage()))
    assert isinstance(results[1], CheckpointMismatch)
    for other in (results[0], results[2]):
        assert isinstance(other, RankFailed) and "rank 1" in str(other) and "'x'" in str(other)


def test_two_jobs_at_one_place_one_wins() -> None:
    model = ModelStore()
    values(run_job(2, lambda s, r: s.save(1, state(1, 0)), lambda rank: model.storage()))

    def older(store: CheckpointStore, rank: int) -> Any:
        store.save(2, state(2, 0))
        if rank == 0:  # meanwhile a second job starts and commits
            values(run_job(1, newer, lambda rank: model.storage("newer")))
        return caught(lambda: store.save(3, state(3, 0)))

    def newer(store: CheckpointStore, rank: int) -> None:
        assert store.resume_or_init({"same": torch.zeros(300)}) is not None
        store.save(3, {"same": torch.full((300,), 33.0)})

    results = values(run_job(2, older, lambda rank: model.storage(f"rank{rank}")))
    assert all(isinstance(r, CheckpointConflict) and "lost the store" in str(r) for r in results)
    found = values(run_job(1, lambda s, r: (s.steps(), s.load()["same"][0].item()), lambda rank: model.storage()))
    assert found == [([1, 2, 3], 33.0)]


def test_all_ranks_resume_from_one_step() -> None:
    model = ModelStore()

    def work(store: CheckpointStore, rank: int) -> Any:
        target = torch.zeros(300)
        found = store.resume_or_init({"same": target})
        step = (found["step"] if found else 0) + 1
        store.save(step, {"same": torch.full((300,), float(step)), "step": step})
        return step, target[0].item()

    for run in range(3):
        results = values(run_job(3, work, lambda rank: model.storage(f"rank{rank}")))
        assert results == [(run + 1, float(run))] * 3


def test_a_step_saved_again_by_fewer_ranks_is_refused_and_stays_whole() -> None:
    model = ModelStore()
    values(run_job(4, lambda s, r: s.save(5, state(5, 0)), lambda rank: model.storage()))
    before = dict(model.objects)

    def again(store: CheckpointStore, rank: int) -> Any:
        store.load()
        failure = caught(lambda: store.save(5, state(-5, 0)))
        return failure, store.load(step=5)["same"][0].item(), store.steps()

    for failure, value, steps in values(run_job(2, again, lambda rank: model.storage())):
        assert failure is None and value == -5 and steps == [5]  # a new generation's step 5, whole and its own
    assert {k: v for k, v in model.objects.items() if k in before} == before
