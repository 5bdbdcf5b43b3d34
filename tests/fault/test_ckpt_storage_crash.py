"""A power cut after every operation of a save on a file system, and what it may leave."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.errors import CheckpointError
from ckptstore.claims import claim_generation
from ckptstore.commit import begin_step
from ckptstore.layout import StepRef
from ckptstore.storage_posix import PosixStorage
from ckptstore.testing.crash import Bytes, Disk, Op, RecordingOps
from ckptstore.testing.saving import require_sound, save_step, write_node
from ckptstore.timeline import latest_ref

Promise = tuple[int, StepRef]
"""After so many operations this step was acknowledged."""

EXTREMES: list[tuple[bool, Bytes]] = [
    (False, "durable"),
    (True, "zeros"),
    (True, "durable"),
    (False, "all"),
    (True, "all"),
]


def record(base: Path, ops: RecordingOps) -> list[Promise]:
    """A first run that claims and saves twice, a save that is given up, and a second run that resumes and saves."""
    storage = PosixStorage(base / "new" / "store", ops=ops)
    promises: list[Promise] = []
    first = claim_generation(storage, "one")
    for step in (10, 20):
        ref = save_step(storage, first, step, nodes=2)
        promises.append((len(ops.ops), ref))
    writer = begin_step(storage, 30, first.generation, first.attempt)
    write_node(writer, 0, [b"given up"])
    assert writer.abort() == []
    second = claim_generation(storage, "Two, with a name\nof its own")
    ref = save_step(storage, second, 30)
    promises.append((len(ops.ops), ref))
    return promises


def check(store: Path, promised: StepRef | None) -> None:
    storage = PosixStorage(store)
    found = latest_ref(storage)
    if promised is not None:
        assert found is not None
        assert (found.generation, found.step) >= (promised.generation, promised.step)
    if found is not None:
        require_sound(storage, found)


def last_promise(promises: Iterable[Promise], count: int) -> StepRef | None:
    return max(
        (ref for after, ref in promises if after <= count),
        key=lambda ref: ref.generation * 100 + ref.step,
        default=None,
    )


def enumerate_crashes(base: Path, ops: list[Op], promises: list[Promise], scratch: Path) -> int:
    """Every prefix of the operations with every extreme of what survives; returns how many states were checked."""
    states = 0
    for count in range(len(ops) + 1):
        disk = Disk(str(base), ops[:count])
        for survives, content in EXTREMES:
            target = scratch / f"{count}-{survives}-{content}"
            disk.crash(target, survives=lambda survives=survives: survives, content=lambda content=content: content)
            check(target / "new" / "store", last_promise(promises, count))
            states += 1
    return states


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Op], list[Promise]]:
    base = tmp_path_factory.mktemp("recorded")
    ops = RecordingOps()
    promises = record(base, ops)
    return base, ops.ops, promises


def test_after_a_power_cut_at_any_operation_the_last_acknowledged_step_is_there(
    recorded: tuple[Path, list[Op], list[Promise]], tmp_path: Path
) -> None:
    base, ops, promises = recorded
    assert enumerate_crashes(base, ops, promises, tmp_path) > 400


@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_a_power_cut_with_any_reordering_of_what_was_not_synced(
    data: st.DataObject, recorded: tuple[Path, list[Op], list[Promise]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    base, ops, promises = recorded
    count = data.draw(st.integers(0, len(ops)), "operations")
    target = tmp_path_factory.mktemp("crash")
    Disk(str(base), ops[:count]).crash(
        target,
        survives=lambda: data.draw(st.booleans()),
        content=lambda: data.draw(st.sampled_from(get_args(Bytes))),
    )
    check(target / "new" / "store", last_promise(promises, count))


class Forgetful(RecordingOps):
    """Leaves one kind of fsync out of the record, as code that forgot it would."""

    def __init__(self, forget: Callable[[Op], bool]) -> None:
        super().__init__()
        self._forget = forget

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self._drop()

    def sync_folder(self, path: str) -> bool:
        done = super().sync_folder(path)
        self._drop()
        return done

    def _drop(self) -> None:
        if self._forget(self.ops[-1]):
            self.ops.pop()


@pytest.mark.parametrize(
    "forget",
    [
        pytest.param(lambda op: op.name == "fsync" and op.path.endswith(".safetensors"), id="segment"),
        pytest.param(lambda op: op.name == "fsync" and op.path.endswith("manifest.json"), id="manifest"),
        pytest.param(lambda op: op.name == "fsync" and "/generations/" in op.path, id="claim"),
        pytest.param(lambda op: op.name == "sync_folder" and "/.tmp-" in op.path, id="step folder"),
        pytest.param(lambda op: op.name == "sync_folder" and op.path.endswith("store"), id="root"),
        pytest.param(lambda op: op.name == "sync_folder" and op.path.endswith("new"), id="above the root"),
    ],
)
def test_the_enumeration_notices_each_fsync_that_is_left_out(forget: Callable[[Op], bool], tmp_path: Path) -> None:
    """The enumeration is worth something: without any one kind of fsync it finds a broken promise."""
    base, scratch = tmp_path / "base", tmp_path / "scratch"
    base.mkdir()
    scratch.mkdir()
    ops = Forgetful(forget)
    promises = record(base, ops)
    with pytest.raises((AssertionError, CheckpointError)):
        enumerate_crashes(base, ops.ops, promises, scratch)
