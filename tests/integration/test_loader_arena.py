"""Batches of real DataLoader workers through their arenas: what arrives, what is used again, what is left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import loader
from loader import ShardDataset, arena, arenaview
from loader.formats import Tokens
from loader.testing import mapped_at, tar_bytes, write_tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="arenas are Linux's"),
]
START_METHODS = ["fork", *(pytest.param(name, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))]
LENGTH = 2048
ROWS = 160


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for number in range(4):
        values = write_tokens(folder / f"{number}.bin", LENGTH * ROWS // 4)
        (values + np.uint16(number)).tofile(folder / f"{number}.bin")
    return folder


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("tars"), np.random.default_rng(1)
    for shard in range(3):
        members = [(f"{k}.bin", rng.bytes(int(rng.integers(100, 20_000)))) for k in range(12)]
        members += [(f"{k}.cls", str(k).encode()) for k in range(12)]
        (folder / f"{shard}.tar").write_bytes(tar_bytes(sorted(members)))
    return folder


def of_tokens(folder: Path, **options: Any) -> ShardDataset:
    return ShardDataset(
        folder, **{"batch_size": 4, "format": Tokens(length=LENGTH, out="int64"), "ids": True, "seed": 1, **options}
    )


def load(ds: Any, workers: int = 2, method: str = "fork", **options: Any) -> DataLoader[Any]:
    return DataLoader(ds, batch_size=None, num_workers=workers, multiprocessing_context=method, **options)


def in_arena(tensor: torch.Tensor) -> bool:
    return mapped_at(tensor.numpy())[0].startswith("/memfd:nearflash-batches")


def arenas_mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:nearflash-batches")


def left(*pids: int) -> tuple[int, int, int, list[str]]:
    """Files, threads, arenas and shared memory of this process, and the shared memory that these made."""
    gc.collect()
    files, own = len(os.listdir("/proc/self/fd")), (os.getpid(), *pids)
    return files, threading.active_count(), arenas_mapped(), segments(*own)


def segments(*pids: int) -> list[str]:
    """Torch's segments of shared memory that these processes made; others may make some meanwhile."""
    return sorted(name for name in os.listdir("/dev/shm") if any(f"_{pid}_" in name for pid in pids))


def eventually(what: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("method", START_METHODS)
def test_what_arrives_is_plain_and_right(tokens: Path, tars: Path, method: str) -> None:
    wanted = list(of_tokens(tokens).batched())
    for found, batch in zip(load(of_tokens(tokens).batched(), method=method), wanted, strict=True):
        assert type(found) is type(batch) and found.stamp == batch.stamp
        assert type(found["tokens"]) is torch.Tensor and in_arena(found["tokens"])
        assert all(torch.equal(found[name], batch[name]) for name in ("tokens", "__id__"))
    ds = ShardDataset(tars, batch_size=6, seed=1)
    batches = DataLoader(ds, batch_size=6, num_workers=2, multiprocessing_context=method, collate_fn=loader.collate)
    for found, batch in zip(batches, ShardDataset(tars, batch_size=6, seed=1).batched(), strict=True):
        assert type(found) is type(batch) and type(found["bin"]) is list
        assert torch.equal(found["cls"], batch["cls"])
        for a, b in zip(found["bin"], batch["bin"], strict=True):
            assert type(a) is np.ndarray and a.flags.writeable and np.array_equal(a, b)
        assert in_arena(torch.from_numpy(found["bin"][0]))
    del found, batches, a, b
    assert arenas_mapped() == 0


@pytest.mark.parametrize("persistent", [False, True])
def test_places_are_used_again(tokens: Path, persistent: bool) -> None:
    batches = load(of_tokens(tokens).batched(), persistent_workers=persistent)
    places = set()
    for _ in range(6 if persistent else 1):
        for batch in batches:
            places.add(mapped_at(batch["tokens"].numpy())[1] if not persistent else batch["tokens"].data_ptr())
        assert arenas_mapped() == (2 if persistent else 1 if "batch" in locals() else 0)
    # the loop holds one batch, two of each worker are ahead and one is being made
    assert len(places) <= (10 if persistent else 5)


def test_what_is_held_stays_though_the_places_are_used_again(tokens: Path) -> None:
    wanted = [batch["tokens"] for batch in of_tokens(tokens).batched()]
    held: list[Any] = []
    for number, batch in enumerate(load(of_tokens(tokens).batched())):
        whole = batch["tokens"]
        held.append([whole, whole[1:3], whole.view(-1).numpy()[5:], whole.T][number % 4] if number % 3 else None)
        del batch, whole
    for number, (part, tensor) in enumerate(zip(held, wanted, strict=True)):
        if part is not None:
            expected = [tensor, tensor[1:3], tensor.view(-1)[5:], tensor.T][number % 4]
            assert torch.equal(torch.as_tensor(part), expected)


def test_where_there_is_no_place_batches_come_as_ever(tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "ARENA_BYTES", 150_000)  # two batches
    held = list(load(of_tokens(tokens).batched()))
    assert {in_arena(batch["tokens"]) for batch in held} == {True, False}
    for found, batch in zip(held, of_tokens(tokens).batched(), strict=True):
        assert torch.equal(found["tokens"], batch["tokens"])


def test_where_there_is_no_arena_batches_come_as_ever(
    tokens: Path, tars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    for found, batch in zip(load(of_tokens(tokens).batched()), of_tokens(tokens).batched(), strict=True):
        assert torch.equal(found["tokens"], batch["tokens"]) and torch.equal(found["__id__"], batch["__id__"])
    ds = ShardDataset(tars, batch_size=6)
    for found, batch in zip(load(ds.batched()), ShardDataset(tars, batch_size=6).batched(), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(found["bin"], batch["bin"], strict=True))


def test_writing_reaches_no_later_batch(tokens: Path) -> None:
    for found, batch in zip(load(of_tokens(tokens).batched()), of_tokens(tokens).batched(), strict=True):
        assert torch.equal(found["tokens"], batch["tokens"])
        found["tokens"].fill_(-1)


class Shapes(IterableDataset[Any]):
    """Batches that a user made something else of."""

    def __init__(self, folder: Path) -> None:
        self.ds = of_tokens(folder)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.ds.batched():
            whole = batch["tokens"]
            yield whole[:, :-1], {"labels": whole[:, 1:], "own": whole.float() * 2, "rows": [*whole, *whole]}


def test_tensors_that_the_user_made_of_a_batch(tokens: Path) -> None:
    for number, ((x, more), batch) in enumerate(zip(load(Shapes(tokens)), of_tokens(tokens).batched(), strict=True)):
        whole = batch["tokens"]
        assert torch.equal(x, whole[:, :-1]) and torch.equal(more["labels"], whole[:, 1:])
        assert torch.equal(more["own"], whole.float() * 2)
        assert torch.equal(torch.stack(more["rows"]), torch.cat([whole, whole]))
        assert in_arena(more["own"]) and (number > 5 or in_arena(x))


def test_samples_one_by_one(tars: Path) -> None:
    found = list(load(ShardDataset(tars, batch_size=6, seed=1), workers=1))
    wanted = list(load(ShardDataset(tars, batch_size=6, seed=1), workers=0, method=None))  # type: ignore[arg-type]
    assert [bytes(sample["bin"]) for sample in found] == [bytes(sample["bin"]) for sample in wanted]
    assert all(in_arena(sample["bin"]) for sample in found if len(sample["bin"]) > 2048)


def test_a_forked_child_keeps_what_it_sees(tokens: Path) -> None:
    context = multiprocessing.get_context("fork")
    batches = load(of_tokens(tokens).batched(), persistent_workers=True)
    go, came = context.Event(), context.SimpleQueue()
    children, wanted = [], []
    for number, batch in enumerate(batches):
        if number < 3:
            wanted.append(batch["tokens"].tolist())
            children.append(context.Process(target=_tell_later, args=(batch, go, came)))
            children[-1].start()
    for _ in range(2):
        for batch in batches:
            assert batch["tokens"].shape == (4, LENGTH)
    go.set()
    assert sorted(came.get() for _ in children) == sorted(wanted)
    for child in children:
        child.join(60)


def test_workers_forked_each_epoch_while_a_batch_is_bound_take_nothing_for_good(
    tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual loop: the last batch of the training data is alive when the validation's workers are forked."""
    monkeypatch.setattr(arena, "ARENA_BYTES", 8 * 4 * LENGTH * 8)  # eight batches; five are in use at most
    train = load(of_tokens(tokens).batched(), workers=1, persistent_workers=True)
    validation = load(of_tokens(tokens, batch_size=ROWS // 2).batched(), workers=1)
    for _ in range(8):
        for batch in train:
            assert in_arena(batch["tokens"])
        for _ in validation:
            pass


def _tell_later(batch: Any, go: Any, came: Any) -> None:
    assert go.wait(60)
    came.put(batch["tokens"].tolist())


def test_a_child_that_reads_on_with_workers_of_its_own(tokens: Path) -> None:
    """Forked while the parent's workers and batches are alive."""
    context = multiprocessing.get_context("fork")
    wanted = [batch["__id__"].tolist() for batch in of_tokens(tokens).batched()]
    ds = of_tokens(tokens)
    iterator = iter(load(ds.batched()))
    held = next(iterator)["tokens"]
    before, came = held.clone(), context.SimpleQueue()
    child = context.Process(target=_read_all, args=(tokens, came))
    child.start()
    assert len(list(iterator)) == len(wanted) - 1
    assert came.get() == wanted
    child.join(60)
    assert child.exitcode == 0 and torch.equal(held, before)


def _read_all(tokens: Path, came: Any) -> None:
    came.put([batch["__id__"].tolist() for batch in load(of_tokens(tokens).batched())])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_early_breaks_leave_nothing(tokens: Path, count: int) -> None:
    batches = load(of_tokens(tokens).batched())
    ahead = load(of_tokens(tokens).batched(), persistent_workers=True)
    next(iter(ahead))
    del ahead
    next(iter(batches))
    before, workers = left(), set()
    assert before[2:] == (0, [])
    for number in range(count):
        for batch in islice(batches, 1 + number % 3):
            assert in_arena(batch["tokens"])
            workers |= {process.pid for process in multiprocessing.active_children() if process.pid}
        del batch
    assert len(workers) >= 2 * count
    assert left(*workers) == before


# torch's handler of SIGCHLD raises wherever the process happens to be, in a callback of a weak reference for example
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_is_killed(tokens: Path) -> None:
    iterator = iter(load(of_tokens(tokens).batched(), persistent_workers=True))
    held = [next(iterator)["tokens"] for _ in range(4)]
    copies = [tensor.clone() for tensor in held]
    for pid in [process.pid for process in multiprocessing.active_children()]:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(iterator)
    assert all(torch.equal(a, b) for a, b in zip(held, copies, strict=True))
    del iterator
    assert arenas_mapped() == 2
    held.clear()
    assert arenas_mapped() == 0 and len(arenaview.VIEWS) == 0


PARENT = """
import sys, time
from torch.utils.data import DataLoader
from loader import ShardDataset, formats
ds = ShardDataset(sys.argv[1], batch_size=4, format=formats.Tokens(length=2048))
iterator = iter(DataLoader(ds.batched(), batch_size=None, num_workers=2))
batch = next(iterator)
print(*(worker.pid for worker in iterator._workers), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_a_parent_that_is_killed(tokens: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tokens)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    eventually(lambda: not any(Path(f"/proc/{pid}/maps").exists() and _maps(pid) for pid in workers))
    assert segments(parent.pid, *workers) == []


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


def test_batches_received_and_dropped_in_other_threads(tokens: Path) -> None:
    """What DataLoader's thread for pinned memory does: it receives, copies and drops; the loop has the copies."""
    wanted = [batch["tokens"] for batch in of_tokens(tokens).batched()]
    copies: list[Any] = []
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        for batch in load(of_tokens(tokens).batched(), persistent_workers=True):
            ready.put(batch)
        ready.put(None)

    thread = threading.Thread(target=receive)
    thread.start()
    while (batch := ready.get()) is not None:
        copies.append(batch["tokens"].clone())
        del batch
    thread.join(60)
    assert all(torch.equal(a, b) for a, b in zip(copies, wanted, strict=True))
    assert arenas_mapped() == 0


def test_a_batch_sent_on_to_another_process(tokens: Path) -> None:
    """The parent shares a tensor that lies in an arena as it would any other."""
    context = multiprocessing.get_context("fork")
    there, back = context.SimpleQueue(), context.SimpleQueue()
    process = context.Process(target=_sum, args=(there, back))
    process.start()
    for batch in load(of_tokens(tokens).batched()):
        there.put(batch["tokens"])
        assert back.get() == int(batch["tokens"].sum())
    there.put(None)
    process.join(60)
    assert process.exitcode == 0


def _sum(there: Any, back: Any) -> None:
    while (tensor := there.get()) is not None:
        back.put(int(tensor.sum()))
