"""loader.Loader: the data set's batches, made by threads."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loader
from cachefs.errors import ConfigError, FormatError, NearflashError
from loader.formats import Tokens
from loader.sample import Batch
from loader.testing import tar_bytes, write_mds, write_tars
from loader.transfer import SideStream


def plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor | np.ndarray) else batch


def tokens(folder: Path, count: int = 7) -> None:
    folder.mkdir()
    for i in range(count):
        np.arange(1000 * i, 1000 * i + 500 + i, dtype=np.uint16).tofile(folder / f"{i}.bin")


def data_sets(folder: Path) -> dict[str, dict[str, Any]]:
    write_tars(folder / "tar", [5, 0, 13, 8])
    write_mds(folder / "mds", [9, 7, 20])
    tokens(folder / "tokens")
    return {
        "tar": {"source": folder / "tar", "batch_size": 4},
        "tar, all": {"source": folder / "tar", "batch_size": 4, "drop_last": False, "ids": True},
        "mds": {"source": folder / "mds", "batch_size": 5, "pad": True},
        "tokens": {"source": folder / "tokens", "batch_size": 6, "format": Tokens(length=16)},
        "labels": {
            "source": folder / "tokens",
            "batch_size": 3,
            "format": Tokens(length=16, labels=True, out="int64"),
            "ids": True,
            "drop_last": False,
        },
        "transform": {
            "source": folder / "mds",
            "batch_size": 5,
            "transform": lambda sample, rng: {"id": sample["id"], "at": int(rng.integers(1000))},
        },
    }


KINDS = ["tar", "tar, all", "mds", "tokens", "labels", "transform"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_batches_are_the_data_set_s(tmp_path: Path, kind: str, threads: int) -> None:
    options = data_sets(tmp_path)[kind]
    wanted = loader.ShardDataset(**options).batched()
    with loader.Loader(loader.ShardDataset(**options), threads=threads) as batches:
        assert len(batches) == len(wanted)
        for _ in range(3):  # epochs go on by themselves
            assert [plain(batch) for batch in batches] == [plain(batch) for batch in wanted]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_says_where_the_user_is(tmp_path: Path, kind: str) -> None:
    options = data_sets(tmp_path)[kind]
    whole = [plain(batch) for _ in range(2) for batch in [*loader.ShardDataset(**options).batched()]]
    fresh = loader.ShardDataset(**options)
    whole = [plain(batch) for _ in range(2) for batch in fresh.batched()]
    for k in range(len(whole) // 2 + 1):
        first = loader.Loader(loader.ShardDataset(**options))
        got = []
        stream = iter(first)
        for _ in range(k):
            got.append(plain(next(stream)))
        state = first.state_dict()
        first.close()
        second = loader.Loader(loader.ShardDataset(**{**options, "seed": 99}))
        second.load_state_dict(state)
        assert second.state_dict() == state
        while len(got) < len(whole):
            got += [plain(batch) for batch in second]
        assert got == whole, k
        second.close()


def test_a_batch_that_is_kept_keeps_its_values(tmp_path: Path) -> None:
    tokens(tmp_path / "t")
    batches = loader.Loader(loader.ShardDataset(tmp_path / "t", batch_size=4, format=Tokens(length=8)))
    kept = []
    for _ in range(3):
        for batch in batches:
            kept.append((batch, plain(batch)))
    assert all(plain(batch) == values for batch, values in kept)


def test_buffers_are_used_again(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "t" / "a.bin")
    batches = loader.Loader(loader.ShardDataset(tmp_path / "t", batch_size=2, format=Tokens(length=8, stride=1)))
    for _ in range(4):
        for _ in batches:
            pass
    assert batches._slots.made <= 12  # runs grow at first, and a few of the largest are under way at a time


def test_breaking_off_leaves_no_thread_and_counts_what_was_used(tmp_path: Path) -> None:
    write_tars(tmp_path, [40, 40])
    before = set(threading.enumerate())
    batches = loader.Loader(loader.ShardDataset(tmp_path, batch_size=4), threads=2)
    for _ in range(30):
        for _ in batches:
            break
        gc.collect()
        assert set(threading.enumerate()) == before
    stream = iter(batches)
    next(stream)
    del stream
    gc.collect()
    assert set(threading.enumerate()) == before


def test_iterating_anew_ends_the_pass_under_way(tmp_path: Path) -> None:
    write_tars(tmp_path, [40, 40])
    batches = loader.Loader(loader.ShardDataset(tmp_path, batch_size=4, ids=True))
    first = iter(batches)
    next(first)
    second = list(batches)
    assert len(second) == 20
    with pytest.raises(NearflashError, match="ended by"):
        list(first)


@pytest.mark.parametrize("shards", [2, 70])  # counted before the first batch, and while they are read
def test_closing_at_the_last_batch_is_no_error(tmp_path: Path, shards: int) -> None:
    write_tars(tmp_path, [4] * shards)
    for window in (1, 1 << 20):  # with a full window the threads have not come to the end of the pass
        batches = loader.Loader(loader.ShardDataset(tmp_path, batch_size=4), prefetch=window)
        stream = iter(batches)
        for _ in range(shards):
            next(stream)
        batches.close()
        assert list(stream) == []
        assert batches.state_dict()["epoch"] == 1


def test_ending_one_of_two_passes_leaves_the_other_to_close(tmp_path: Path) -> None:
    write_tars(tmp_path, [40, 40])
    before = set(threading.enumerate())
    batches = loader.Loader(loader.ShardDataset(tmp_path, batch_size=4))
    first = iter(batches)
    next(first)
    second = iter(batches)
    next(second)
    del first
    gc.collect()
    batches.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(NearflashError, match="ended by"):
        next(second)


def test_the_interpreter_ends_cleanly_in_the_middle_of_a_pass(tmp_path: Path) -> None:
    write_tars(tmp_path, [400])
    program = f"""
import sys, torch, loader
def work(sample, rng):
    torch.ones(200_000).sort()
    return sample
ds = loader.ShardDataset({str(tmp_path)!r}, batch_size=4, transform=work)
batches = iter(loader.Loader(ds, threads=3))
next(batches)
sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 7, done.stderr


def test_every_kind_of_tensor_is_stacked(tmp_path: Path) -> None:
    write_mds(tmp_path, [8])
    kinds: dict[str, Any] = {
        "zero": torch.tensor(1.5),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "tiny": torch.ones(2).to(torch.float8_e4m3fn),
        "grad": torch.ones(2, requires_grad=True),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "long": np.ones(2, np.longdouble),
    }

    def transform(sample: Any, rng: Any) -> dict[str, Any]:
        return dict(kinds)

    ds = loader.ShardDataset(tmp_path, batch_size=4, transform=transform)
    wanted = next(iter(ds.batched()))
    found = next(iter(loader.Loader(ds)))
    assert found.keys() == kinds.keys()
    for name in found:
        if name == "long":
            assert isinstance(found[name], list) and len(found[name]) == 4
            continue
        assert found[name].shape == wanted[name].shape and found[name].dtype == wanted[name].dtype
        ours, theirs = (
            torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.float() for t in (found[name], wanted[name])
        )
        assert torch.equal(ours, theirs)


def test_stand_ins_do_not_see_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(
        tar_bytes([("1.bin", b"1"), ("2.bin", b"2"), ("3.bin", b"3"), ("3.bin", b"again"), ("4.bin", b"4")])
    )

    def values(write: bool) -> list[int]:
        ds = loader.ShardDataset(tmp_path, batch_size=1, shuffle=False, on_error="skip", decode="bytes")
        out = []
        for sample in ds:
            out.append(int(sample["bin"][0]) - 48)
            if write:
                sample["bin"][:] = 99
        return out

    with pytest.warns(loader.DataWarning):
        assert values(False) == values(True) == [1, 2, 2, 4]


def test_an_error_in_a_transform_is_raised_in_its_place(tmp_path: Path) -> None:
    blobs = write_mds(tmp_path, [40])

    def transform(sample: Any, rng: Any) -> Any:
        if sample["id"] == 17:
            raise ZeroDivisionError("seventeen")
        return sample

    ds = loader.ShardDataset(tmp_path, batch_size=4, shuffle=False, transform=transform)
    batches = loader.Loader(ds, threads=3)
    seen = []
    with pytest.raises(ZeroDivisionError, match="seventeen") as caught:
        for batch in batches:
            seen += batch["id"].tolist()
    assert seen == list(range(16)) and len(blobs) == 40
    assert any("in the transform of sample 17" in note for note in caught.value.__notes__)
    assert "in the loader's reading stage" in caught.value.__notes__


def test_damage_is_skipped_or_raised_as_everywhere(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(
        tar_bytes([("0.txt", b"0"), ("1.txt", b"1"), ("1.txt", b"again"), ("2.txt", b"2"), ("3.txt", b"3")])
    )
    options: dict[str, Any] = {"batch_size": 2, "shuffle": False}
    with pytest.raises(FormatError, match="repeats a field"):
        list(loader.Loader(loader.ShardDataset(tmp_path, **options)))
    ds = loader.ShardDataset(tmp_path, on_error="skip", **options)
    with pytest.warns(loader.DataWarning):
        assert [batch["txt"] for batch in loader.Loader(ds)] == [["0", "0"], ["2", "3"]]
    assert ds.skipped == 1


def test_states_of_batches_hold_here_too(tmp_path: Path) -> None:
    write_tars(tmp_path, [20, 21])
    ds = loader.ShardDataset(tmp_path, batch_size=4, ids=True)
    batches = loader.Loader(ds)
    seen = []
    for number, batch in enumerate(batches, 1):
        assert ds.state_after(batch) == batches.state_dict() == ds.state_at(number)
        seen.append(batch["__id__"].tolist())
        if number == 4:
            break
    assert len(seen) == 4


def test_bad_arguments_are_told(tmp_path: Path) -> None:
    ds = loader.ShardDataset(tmp_path, batch_size=4)
    for bad in ({"threads": 0}, {"prefetch": -1}, {"threads": True}, {"device": "meta"}):
        with pytest.raises(ConfigError, match=r"Loader\((threads|prefetch|device)="):
            loader.Loader(ds, **bad)  # type: ignore[arg-type]


class FakeCuda:
    """What SideStream needs of ``torch.cuda``; copies are done when :meth:`finish` says so."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.finished = False
        self.current = "main"

    def Stream(self, device: Any) -> FakeCuda.Side:
        return FakeCuda.Side(self)

    class Side:
        def __init__(self, cuda: FakeCuda) -> None:
            self.cuda = cuda

        def record_event(self) -> FakeCuda.Event:
            self.cuda.log.append(f"event on {self.cuda.current}")
            return FakeCuda.Event(self.cuda)

        def wait_event(self, event: Any) -> None:
            self.cuda.log.append("main waits")

    class Event:
        def __init__(self, cuda: FakeCuda) -> None:
            self.cuda = cuda

        def query(self) -> bool:
            return self.cuda.finished

        def synchronize(self) -> None:
            self.cuda.log.append("synchronised")

    class _Within:
        def __init__(self, cuda: FakeCuda, name: str) -> None:
            self.cuda, self.name = cuda, name

        def __enter__(self) -> None:
            self.before, self.cuda.current = self.cuda.current, self.name

        def __exit__(self, *_: Any) -> None:
            self.cuda.current = self.before

    def device(self, device: Any) -> FakeCuda._Within:
        return FakeCuda._Within(self, self.current)

    def stream(self, stream: Any) -> FakeCuda._Within:
        return FakeCuda._Within(self, "side")

    def current_stream(self, device: Any) -> FakeCuda.Side:
        return FakeCuda.Side(self)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    streams: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: streams.append(stream))
    return streams


def test_a_copy_is_waited_for_and_its_source_is_kept(recorded: list[Any]) -> None:
    cuda = FakeCuda()
    side = SideStream(torch.device("cpu"), cuda)
    batch = Batch({"x": torch.ones(3), "list": [torch.zeros(2), "text"]})
    sent = side.send(batch)
    assert cuda.log == ["event on side"]
    received = side.receive(sent)
    assert cuda.log == ["event on side", "main waits"] and len(recorded) == 2
    assert isinstance(received, Batch) and received["list"][1] == "text"
    del batch, sent
    gc.collect()
    assert len(side._guarded) == 1  # the copy may still be reading the source
    cuda.finished = True
    side.receive(side.send(Batch({"x": torch.ones(1)})))
    assert len(side._guarded) == 0
    side.close()


def test_batches_go_through_the_transfer_in_order(tmp_path: Path, recorded: list[Any]) -> None:
    for kind, options in data_sets(tmp_path).items():
        cuda = FakeCuda()
        wanted = [plain(batch) for batch in loader.ShardDataset(**options).batched()]
        ds = loader.ShardDataset(**options)
        batches = loader.Loader(ds, transfer=SideStream(torch.device("cpu"), cuda))
        got = []
        for number, batch in enumerate(batches, 1):
            got.append(plain(batch))
            assert ds.state_after(batch) == ds.state_at(number) or kind == "transform"
        assert got == wanted


def test_images_decode_in_threads(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    members = []
    for i in range(24):
        raw = io.BytesIO()
        image.new("RGB", (16, 16), (i, 0, 0)).save(raw, "PNG")
        members += [(f"{i:02d}.png", raw.getvalue()), (f"{i:02d}.cls", str(i).encode())]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    ds = loader.ShardDataset(tmp_path, batch_size=8, decode="torch", shuffle=False)
    for batch in loader.Loader(ds, threads=3):
        assert batch["png"].shape == (8, 3, 16, 16)
        assert batch["png"][:, 0, 0, 0].tolist() == batch["cls"].tolist()


def test_a_transform_that_stops_the_iteration_ends_no_epoch(tmp_path: Path) -> None:
    write_mds(tmp_path, [12])

    def transform(sample: Any, rng: Any) -> Any:
        return next(iter([])) if sample["id"] == 5 else sample

    options: dict[str, Any] = {"batch_size": 4, "shuffle": False}
    ds = loader.ShardDataset(tmp_path, transform=transform, **options)
    for read in (ds, ds.batched(), loader.Loader(ds)):
        ds.set_epoch(ds.epoch)
        with pytest.raises(RuntimeError, match="StopIteration in the transform of sample 5"):
            list(read)
    ends = loader.Loader(loader.ShardDataset(tmp_path, **options), collate_fn=lambda samples: next(iter([])))
    with pytest.raises(RuntimeError, match="reading stage"):
        list(ends)
