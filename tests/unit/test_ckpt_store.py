"""The store as a training script uses it, in one process: save, load, refuse, fail, close."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cachefs.errors import (
    CheckpointConflict,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    DeadlineExceeded,
    Unavailable,
)
from ckptstore import Backing, CheckpointStore, RngState, SaveOptions, Sharded, StepRef, Timeouts
from ckptstore.ranks import alone
from ckptstore.testing.model import Fault, ModelStore, Request

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    with CheckpointStore(tmp_path / "run") as opened:
        yield opened


def on(model: ModelStore, hook: Any = None, **timeouts: float) -> CheckpointStore:
    backing = Backing(storage=model.storage("run", hook), meeting=alone())
    return CheckpointStore("unused", backing=backing, timeouts=Timeouts(**timeouts) if timeouts else None)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def trained(seed: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def same_training(a: tuple[nn.Module, torch.optim.Optimizer], b: tuple[nn.Module, torch.optim.Optimizer]) -> bool:
    left, right = a[0].state_dict(), b[0].state_dict()
    if not all(torch.equal(left[k], right[k]) for k in left):
        return False
    ours, theirs = a[1].state_dict(), b[1].state_dict()
    if ours["param_groups"] != theirs["param_groups"] or ours["state"].keys() != theirs["state"].keys():
        return False
    return all(torch.equal(v, theirs["state"][i][k]) for i, s in ours["state"].items() for k, v in s.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_every_type_comes_back_bit_for_bit(store: CheckpointStore, dtype: torch.dtype) -> None:
    raw = torch.arange(12 * dtype.itemsize, dtype=torch.uint8) * 37
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(3, 4)
    store.save(1, {"x": tensor, "t": tensor.t(), "scalar": tensor[0, 1]})
    found = store.load()
    for name, wanted in (("x", tensor), ("t", tensor.t()), ("scalar", tensor[0, 1])):
        assert found[name].dtype == dtype and found[name].shape == wanted.shape
        assert bits(found[name]) == bits(wanted)
    target = torch.zeros_like(tensor.view(torch.uint8)).view(dtype)
    store.load({"x": target})
    assert bits(target) == bits(tensor)


def without_run_id(folder: Path) -> dict[str, bytes]:
    """A step's segments and parts, with the attempt's own id, which no two runs share, taken out."""
    token = next(folder.glob("*.safetensors")).name.rpartition("-r")[0]
    run = json.loads(next(folder.glob(f"{token}-p*.json")).read_bytes())["attempt"]
    plain = {}
    for path in folder.glob(f"{token}-*"):
        plain[path.name[len(token) :]] = path.read_bytes().replace(token.encode(), b"T").replace(run.encode(), b"A")
    return plain


def test_sync_and_async_write_the_same(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    state = {
        "w": torch.ones(2, 2),
        "step": torch.tensor(3.5),
        "n": 2**70,
        "b": torch.zeros(2, dtype=torch.bfloat16),
        "model": model,
        "optimizer": optimizer,
    }
    for name in ("sync", "async"):
        with CheckpointStore(tmp_path / name, attempt="a") as store:
            if name == "sync":
                store.save(1, state)
            else:
                assert store.save_async(1, state).result() == StepRef(1, 1)
    written = [without_run_id(tmp_path / name / "step-000000000001-g000001") for name in ("sync", "async")]
    assert written[0] == written[1] and len(written[0]) == 2
    with CheckpointStore(tmp_path / "async") as store:
        found = store.load()
        assert found["step"].shape == () and found["n"] == 2**70
        assert found["optimizer"]["state"][0]["step"].shape == ()


def test_modules_and_optimizers_are_filled_in_place(store: CheckpointStore) -> None:
    saved = trained(0)
    store.save(7, {"model": saved[0], "optimizer": saved[1], "step": 7, "rng": RngState()})
    fresh = trained(1)
    addresses = [p.data_ptr() for p in fresh[0].parameters()]
    moments = fresh[1].state_dict()["state"][0]["exp_avg"].data_ptr()
    result = store.load({"model": fresh[0], "optimizer": fresh[1]})
    assert same_training(saved, fresh)
    assert [p.data_ptr() for p in fresh[0].parameters()] == addresses
    assert fresh[1].state_dict()["state"][0]["exp_avg"].data_ptr() == moments
    assert result["model"] is fresh[0] and result["optimizer"] is fresh[1] and result["step"] == 7


def test_an_optimizer_without_state_gets_it_and_goes_on_the_same(store: CheckpointStore) -> None:
    saved = trained(0)
    store.save(7, {"model": saved[0], "optimizer": saved[1]})
    fresh = trained(1, steps=0)
    store.load({"model": fresh[0], "optimizer": fresh[1]})
    assert same_training(saved, fresh)
    for model, optimizer in (saved, fresh):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    assert same_training(saved, fresh)


def test_an_optimizer_that_had_no_state_leaves_none(store: CheckpointStore) -> None:
    store.save(1, {"optimizer": trained(0, steps=0)[1]})
    optimizer = trained(1)[1]
    store.load({"optimizer": optimizer})
    assert optimizer.state_dict()["state"] == {}


def test_saving_changes_nothing(store: CheckpointStore) -> None:
    model, optimizer = trained(0, steps=0)
    store.save(1, {"model": model, "optimizer": optimizer})
    assert optimizer.state_dict()["state"] == {} and all(p.grad is None for p in model.parameters())


def test_a_scheduler_and_any_object_with_state(store: CheckpointStore) -> None:
    class Counter:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "table": torch.full((2,), self.value)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"] + int(state["table"].sum())

    _, optimizer = trained(0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.step()
    scheduler.step()
    store.save(1, {"scheduler": scheduler, "counter": Counter(5)})
    other, counter = torch.optim.lr_scheduler.StepLR(trained(0)[1], 2), Counter(0)
    store.load({"scheduler": other, "counter": counter})
    assert other.last_epoch == scheduler.last_epoch and counter.value == 15


def test_extra_state_of_a_module(store: CheckpointStore) -> None:
    class Extra(nn.Linear):
        note: Any = None

        def get_extra_state(self) -> Any:
            return self.note

        def set_extra_state(self, state: Any) -> None:
            self.note = state

    saved, fresh = Extra(2, 2), Extra(2, 2)
    saved.note = {"seen": [1, 2]}
    store.save(1, {"m": saved})
    store.load({"m": fresh})
    assert fresh.note == {"seen": [1, 2]} and torch.equal(saved.weight, fresh.weight)


def test_a_module_loads_under_other_wrappers(store: CheckpointStore) -> None:
    saved = nn.Sequential(nn.Linear(2, 2))
    store.save(1, {"m": torch.compile(saved)})
    fresh = nn.Sequential(nn.Linear(2, 2))
    store.load({"m": nn.DataParallel(fresh)})
    assert torch.equal(saved[0].weight, fresh[0].weight)
    store.save(2, {"m": saved.state_dict()})
    store.load({"m": nn.Sequential(nn.Linear(2, 2))})


def test_tied_weights_stay_tied_and_are_stored_once(store: CheckpointStore, tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    store.save(1, {"embed": weight, "head": weight, "part": weight[:10]})
    found = store.load()
    assert found["embed"] is found["head"] and torch.equal(found["head"], weight)
    assert torch.equal(found["part"], weight[:10])
    size = sum(p.stat().st_size for p in (tmp_path / "run").rglob("*.safetensors"))
    assert 44_000 < size < 45_000
    head = torch.zeros(100, 100)
    store.load({"head": head}, only="head")
    assert torch.equal(head, weight)


def test_a_small_view_is_a_small_file(store: CheckpointStore, tmp_path: Path) -> None:
    store.save(1, {"v": torch.zeros(10**6)[:10], "e": torch.ones(1).expand(1000), "r": torch.eye(10)[::2]})
    assert sum(p.stat().st_size for p in (tmp_path / "run").rglob("*.safetensors")) < 6000
    found = store.load()
    assert torch.equal(found["e"], torch.ones(1000)) and torch.equal(found["r"], torch.eye(10)[::2])


def test_views_and_shapes_that_are_loaded_into(store: CheckpointStore) -> None:
    matrix = torch.randn(6, 8)
    store.save(1, {"m": matrix, "n": matrix.numpy(), "c": torch.view_as_complex(matrix.reshape(6, 4, 2))})
    turned, holes = torch.zeros(8, 6).t(), torch.zeros(12, 8)[::2]
    array = np.zeros((8, 6), np.float32).T
    store.load({"m": turned, "n": array})
    assert torch.equal(turned, matrix) and np.array_equal(array, matrix.numpy())
    store.load({"m": holes})
    assert torch.equal(holes, matrix)
    conjugate = torch.zeros(6, 4, dtype=torch.complex64).conj()
    store.load({"c": conjugate})
    assert torch.equal(conjugate.resolve_conj(), torch.view_as_complex(matrix.reshape(6, 4, 2)))
    parameter = nn.Parameter(torch.zeros(6, 8))
    store.load({"m": parameter})
    assert torch.equal(parameter.detach(), matrix) and parameter.requires_grad


def test_parts_are_cut_out_and_put_together(tmp_path: Path) -> None:
    matrix = torch.arange(70.0).reshape(10, 7)
    with CheckpointStore(tmp_path, save_options=SaveOptions(chunk_bytes=60, segment_bytes=100)) as store:
        store.save(1, {"m": matrix, "n": matrix * 2})
        rows, columns, inner = torch.zeros(4, 7), torch.zeros(10, 2), torch.zeros(3, 3)
        store.load({"m": Sharded(rows, (10, 7), (3, 0)), "n": Sharded(columns, (10, 7), (0, 5))})
        assert torch.equal(rows, matrix[3:7]) and torch.equal(columns, matrix[:, 5:] * 2)
        store.load({"m": Sharded(inner, (10, 7), (6, 2))})
        assert torch.equal(inner, matrix[6:9, 2:5])
        assert torch.equal(store.load()["m"], matrix)


class Misfit:
    """What is loaded into, and the words that the error has."""

    def __init__(self, template: Any, words: str) -> None:
        self.template = template
        self.words = words


READ_ONLY = np.zeros((2, 3), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "case",
    [
        Misfit({"x": torch.zeros(3, 2)}, r"'x' was saved as float32 \[2, 3\], not float32 \[3, 2\]"),
        Misfit({"x": torch.zeros(2, 3, dtype=torch.float64)}, "not float64"),
        Misfit({"y": torch.zeros(1)}, "'y' is not in the checkpoint"),
        Misfit({"d": {"z": 1}}, "'d/z' is not in the checkpoint"),
        Misfit({"v": torch.zeros(1)}, "'v' was saved as a value"),
        Misfit({"x": {"a": torch.zeros(1)}}, "'x' was saved as a tensor, not as dict"),
        Misfit({"d": torch.zeros(1)}, "'d' was saved as a dict"),
        Misfit({"l": [torch.zeros(2)]}, "'l' was saved as 2 elements"),
        Misfit({"x": torch.zeros(1, 3).expand(2, 3)}, "'x' cannot be filled"),
        Misfit({"x": READ_ONLY}, "'x' cannot be filled"),
        Misfit({"x": torch.zeros(2, 3, device="meta")}, "'x' cannot be loaded into a tensor on the meta device"),
        Misfit({"d": nn.Linear(2, 2)}, "'d/weight' is not in the checkpoint.*'d/a' is not in the module"),
        Misfit({"v": nn.Linear(2, 2)}, "'v' was not saved as a module"),
        Misfit({"o": trained(0)[1]}, "param"),
        Misfit([1], "a dict, not list"),
    ],
    ids=lambda c: c.words[:30],
)
def test_what_does_not_fit_is_named_and_nothing_is_touched(store: CheckpointStore, case: Misfit) -> None:
    good = torch.zeros(3)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    state = {"good": torch.ones(3), "x": torch.ones(2, 3), "v": 1, "d": {"a": torch.ones(1)}, "l": [torch.ones(2), 2]}
    store.save(1, {**state, "o": optimizer})
    template = {"good": good, **case.template} if isinstance(case.template, dict) else case.template
    with pytest.raises(CheckpointMismatch, match=case.words):
        store.load(template)
    if "o" not in case.template:
        assert torch.equal(good, torch.zeros(3))


def test_not_strict_leaves_alone_what_is_not_in_both(store: CheckpointStore) -> None:
    saved = nn.Linear(2, 2)
    store.save(1, {"m": saved.state_dict() | {"old": torch.ones(1)}, "x": torch.ones(1)})
    grown = nn.Sequential()
    grown.register_parameter("weight", nn.Parameter(torch.zeros(2, 2)))
    grown.register_parameter("new", nn.Parameter(torch.full((1,), 5.0)))
    found = store.load({"m": grown, "y": 3}, strict=False)
    assert torch.equal(grown.weight, saved.weight) and grown.new.item() == 5.0 and found["y"] == 3
    with pytest.raises(CheckpointMismatch):
        store.load({"m": grown})


def test_only_reads_a_part(store: CheckpointStore, tmp_path: Path) -> None:
    model, optimizer = trained(0)
    store.save(1, {"model": model, "optimizer": optimizer, "step": 3, "list": [torch.ones(1), torch.zeros(1)]})
    assert store.load(only=["model", "step"]).keys() == {"model", "step"}
    assert list(store.load(only="*/0.*")["model"]) == ["0.weight", "0.bias"]
    assert store.load(only="list/#1")["list"] == [None, torch.zeros(1)]
    untouched = trained(1)
    before = untouched[1].state_dict()["state"][0]["exp_avg"].clone()
    part = {"model": untouched[0], "optimizer": untouched[1], "step": -1, "mine": 9}
    found = store.load(part, only="model/0.*")
    assert torch.equal(untouched[0][0].weight, model[0].weight)  # type: ignore[index]
    assert not torch.equal(untouched[0][2].weight, model[2].weight)  # type: ignore[index]
    assert torch.equal(untouched[1].state_dict()["state"][0]["exp_avg"], before)
    assert found["step"] == -1 and found["mine"] == 9
    with pytest.raises(CheckpointMismatch, match=r"names nothing.*there are model, optimizer, step, list"):
        store.load(only="modle")
    with pytest.raises(CheckpointMismatch, match="'optimizer' is loaded as a whole"):
        store.load({"optimizer": untouched[1]}, only="optimizer/state/*")


def test_a_state_is_saved_as_it_was_at_the_call() -> None:
    model, gate = ModelStore(), threading.Event()

    def slow(request: Request) -> Fault:
        if request.writes and "step-" in request.key:
            assert gate.wait(20)
        return Fault.NONE

    with on(model, slow) as store:
        tensor, scalar, array, numbers = torch.ones(4), torch.tensor(1.0), np.ones(4), [1, 2]
        rng = {"bytes": bytearray(b"a"), "deep": {"x": [tensor]}}
        first = store.save_async(1, {"t": tensor, "s": scalar, "a": array, "l": numbers, "d": rng})
        assert first.staged and first.staged.wait(0) and not first.done()
        tensor.add_(1)
        scalar.fill_(9)
        array += 1
        numbers.append(3)
        rng["deep"]["x"].append(tensor)  # type: ignore[index]
        rng["bytes"][0] = 0  # type: ignore[index]
        state2 = {"t": tensor, "s": scalar, "a": array, "l": numbers}
        threading.Timer(0.05, gate.set).start()
        second = store.save_async(2, state2)  # waits for the first
        assert first.done()
        del tensor, state2
        gc.collect()
        second.result(20)
        old, new = store.load(step=1), store.load(step=2)
    assert torch.equal(old["t"], torch.ones(4)) and old["s"].item() == 1.0 and old["l"] == [1, 2]
    assert np.array_equal(old["a"], np.ones(4)) and old["d"]["bytes"] == b"a" and len(old["d"]["deep"]["x"]) == 1
    assert torch.equal(new["t"], torch.full((4,), 2.0)) and new["s"].item() == 9.0 and new["l"] == [1, 2, 3]
    assert np.array_equal(new["a"], np.full(4, 2.0))


def test_a_save_that_is_not_done_in_time_stops_the_next_call() -> None:
    gate = threading.Event()

    def slow(request: Request) -> Fault:
        assert not request.writes or gate.wait(20)
        return Fault.NONE

    store = on(ModelStore(), slow, save=0.05)
    saving = store.save_async(1, {"x": torch.ones(1)})
    with pytest.raises(DeadlineExceeded, match="step 1"):
        saving.result(0.01)
    for call in (lambda: store.save_async(2, {}), store.wait, store.close):
        with pytest.raises(DeadlineExceeded, match="step 1"):
            call()
    gate.set()
    assert saving.result(20) == StepRef(1, 1)
    store.close()


def failing(*keys: str) -> Any:
    """A hook that refuses writes whose key has one of these words, for ever."""

    def hook(request: Request) -> Fault:
        return Fault.REFUSED if request.writes and any(k in request.key for k in keys) else Fault.NONE

    return hook


@pytest.mark.parametrize("where", ["safetensors", "-p0000.json", "manifest.json"])
def test_a_failure_is_raised_at_the_next_call_and_the_next_save_works(where: str) -> None:
    store = on(ModelStore(), lambda r: failing("step-000000000002")(r) if where in r.key else Fault.NONE)
    store.save(1, {"x": torch.ones(1)})
    assert store.save_async(2, {"x": torch.ones(2)}).staged
    with pytest.raises((Unavailable, CheckpointError)):
        store.save_async(3, {"x": torch.ones(3)})
    assert store.latest() == 1 and store.steps() == [1]
    store.save(3, {"x": torch.ones(3)})
    assert store.latest() == 3 and store.steps() == [1, 3]
    store.close()


def test_a_failure_is_raised_once_by_wait_by_close_or_by_result() -> None:
    for call in ("wait", "close", "result"):
        store = on(ModelStore(), failing("step-"))
        saving = store.save_async(1, {"x": torch.ones(1)})
        with pytest.raises(Unavailable):
            saving.result(20) if call == "result" else getattr(store, call)()
        if call != "close":
            store.wait()
        store.close()
        store.close()


def test_closing_after_an_error_does_not_hide_it() -> None:
    with pytest.raises(ZeroDivisionError), on(ModelStore(), failing("step-")) as store:
        store.save_async(1, {"x": torch.ones(1)})
        raise ZeroDivisionError


def test_after_closing_nothing_works() -> None:
    store = on(ModelStore())
    store.save(1, {"x": torch.ones(1)})
    store.close()
    for call in (lambda: store.save(2, {}), store.load, store.latest, store.steps, store.verify):
        with pytest.raises(CheckpointError, match="closed"):
            call()


def test_a_step_is_never_overwritten(store: CheckpointStore) -> None:
    store.save(5, {"x": torch.ones(2)})
    with pytest.raises(CheckpointConflict, match=r"step 5 .* committed already"):
        store.save(5, {"x": torch.zeros(2)})
    assert torch.equal(store.load()["x"], torch.ones(2)) and store.verify(5) == []


def test_an_older_run_can_commit_nothing_that_counts(tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path)
    old.save(1, {"x": torch.zeros(1)})
    with CheckpointStore(tmp_path) as new:
        target = torch.ones(1)
        assert new.resume_or_init({"x": target}) is not None and target.item() == 0
        with pytest.raises(CheckpointConflict, match="lost the store"):
            old.save(2, {"x": torch.full((1,), 2.0)})
        assert new.latest() == 1
        new.save(2, {"x": torch.full((1,), 3.0)})
        assert new.load()["x"].item() == 3
    old.close()


def test_resume_or_init_after_a_save_is_an_error_and_not_a_fresh_start(store: CheckpointStore) -> None:
    store.save(1, {"x": torch.ones(1)})
    with pytest.raises(ConfigError, match="before the first save"):
        store.resume_or_init({"x": torch.zeros(1)})
    assert store.load()["x"].item() == 1


def test_a_step_back_without_loading_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def start(*steps: int, load: bool = False) -> list[str]:
        caplog.clear()
        with CheckpointStore(tmp_path) as store:
            if load:
                store.load()
            for step in steps:
                store.save(step, {"n": step})
            assert store.latest() == steps[-1]
        return caplog.messages

    assert start(3, 4) == []
    (said,) = start(2, 3)
    assert "the newest step here is 4 and was not loaded; step 2 becomes the latest" in said
    assert start(4) == [] and start(3, load=True) == []


def test_resume_or_init_begins_from_nothing(store: CheckpointStore) -> None:
    assert store.resume_or_init({"x": torch.ones(1)}) is None
    assert store.latest() is None and store.steps() == []


def test_going_back_on_purpose(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, {"n": step})
    with CheckpointStore(tmp_path) as store:
        assert store.load(step=1)["n"] == 1
        assert store.steps() == [1, 2, 3]
        store.save(2, {"n": -2})
        assert store.steps() == [1, 2] and store.load()["n"] == -2
        assert store.load(step=StepRef(2, 1))["n"] == 2


def test_a_look_at_an_older_step_is_no_going_back(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(10, {"ema": torch.ones(2), "n": 10})
        store.save(100, {"ema": torch.zeros(2), "n": 100})
    with CheckpointStore(tmp_path) as store:
        store.load()
        store.load(step=10, only="ema")
        store._ownership.claim()  # as a save does first; a kill after it must leave step 100 the newest
        assert store.latest() == 100 and store.steps() == [10, 100]


def test_a_run_that_is_started_again_under_its_old_name_goes_on(tmp_path: Path) -> None:
    old = CheckpointStore(tmp_path, attempt="job-7")
    assert old.resume_or_init({"n": 0}) is None
    old.save(100, {"n": 100})
    with CheckpointStore(tmp_path, attempt="job-7") as new:
        found = new.resume_or_init({"n": 0})
        assert found is not None and found["n"] == 100
        with pytest.raises(CheckpointConflict, match="lost the store"):
            old.save(300, {"n": 300})
        new.save(200, {"n": 200})
        assert new.latest() == 200
    old.close()


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointStore(tmp_path) as store:
        for step in (1, 2, 3):
            store.save(step, {"weights": torch.full((1000,), float(step))})
        segment = next((tmp_path / "step-000000000003-g000001").glob("*.safetensors"))
        data = bytearray(segment.read_bytes())
        data[-5] ^= 1
        segment.write_bytes(data)
        damages = store.verify(3)
        assert [d.tensor for d in damages] == ["weights"] and segment.name in damages[0].file
        assert store.latest() == 3  # sizes are right; the bytes are not read
        with pytest.raises(CheckpointError, match=r"digest of tensor 'weights' is wrong") as caught:
            store.load(step=3)
        assert segment.name in str(caught.value) and "at byte" in str(caught.value)
        assert store.load()["weights"][0].item() == 2.0
        assert "digest of tensor 'weights'" in caplog.text
        segment.unlink()
        assert store.latest() == 2 and store.load()["weights"][0].item() == 2.0


def test_nothing_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path / "empty") as store:
        template = torch.ones(1)
        with pytest.raises(CheckpointNotFound, match="no such folder"):
            store.load({"x": template})
        os.mkdir(tmp_path / "empty")
        with pytest.raises(CheckpointNotFound, match="empty"):
            store.load({"x": template})
        store.save(4, {"x": template})
        store.save(6, {"x": template})
        with pytest.raises(CheckpointNotFound, match=r"no step 5.*6, 4"):
            store.load(step=5)
        for step in ("newest", True, 1.5):
            with pytest.raises(ConfigError, match="neither a number"):
                store.load(step=step)  # type: ignore[arg-type]


def test_a_relative_path_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointStore("run") as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.save(1, {"x": torch.ones(1)})
        assert store.latest() == 1
    assert (tmp_path / "run" / "step-000000000001-g000001").is_dir()


@pytest.mark.parametrize("step", [-1, 1.0, True, "1", None])
def test_a_step_is_a_whole_number(store: CheckpointStore, step: Any) -> None:
    with pytest.raises(ConfigError, match="step"):
        store.save(step, {})


def test_stale_rank_variables_do_not_make_it_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with CheckpointStore(tmp_path) as store:
        assert (store.meeting.rank, store.meeting.world) == (0, 1)
        store.save(1, {"x": torch.ones(1)})
        assert store.load()["x"].item() == 1


def test_a_reserved_name_and_odd_names(store: CheckpointStore, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = {"__metadata__": torch.ones(1), "nul\0": torch.ones(2), "😀": torch.ones(3), "a/b": torch.ones(4)}
    store.save(1, state)
    found = load_file(next((tmp_path / "run").rglob("*.safetensors")))
    assert sorted(found) == ["%5F_metadata__", "a%2Fb", "nul%00", "😀"]
    assert all(torch.equal(v, state[k]) for k, v in store.load().items())


def test_segments_are_plain_safetensors_files(store: CheckpointStore, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model, _ = trained(0)
    store.save(1, {"model": model})
    found = load_file(next((tmp_path / "run").rglob("*.safetensors")))
    assert all(torch.equal(found[f"model/{k}"], v) for k, v in model.state_dict().items())


def test_an_empty_state(store: CheckpointStore) -> None:
    store.save(1, {})
    assert store.load() == {} and store.load({}) == {} and store.verify() == []


def test_a_save_says_how_it_is(store: CheckpointStore) -> None:
    saving = store.save_async(3, {"x": torch.ones(1)})
    saving.result()
    assert repr(saving) == "<Save of step 3: durable>" and saving.done()
