"""Batches of tables that are read several at a time are those that collate makes of the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import loader
from cachefs.errors import FormatError, MissingField
from loader.columnruns import RUN_BYTES, RUN_ROWS, fitting
from loader.columns import ColumnGather
from loader.formats import Npy
from loader.sample import Batch

STRUCT: Any = pa.struct([("a", pa.int64()), ("b", pa.string())])
COLUMNS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "long": lambda rng, n: pa.array(rng.integers(0, 1000, n)),
    "float": lambda rng, n: pa.array(rng.random(n, np.float32)),
    "bool": lambda rng, n: pa.array(rng.random(n) < 0.5),
    "text": lambda rng, n: pa.array(["é" * int(k) for k in rng.integers(0, 9, n)], pa.string()),
    "maybe text": lambda rng, n: pa.array(
        [None if k < 2 else "x" * int(k) for k in rng.integers(0, 9, n)], pa.string()
    ),
    "maybe long": lambda rng, n: pa.array([None if k == 0 else int(k) for k in rng.integers(0, 30, n)], pa.int64()),
    "time": lambda rng, n: pa.array(rng.integers(0, 10**9, n), pa.timestamp("s")),
    "bytes": lambda rng, n: pa.array([bytes(int(k)) for k in rng.integers(0, 4, n)], pa.binary()),
    "vector": lambda rng, n: pa.FixedSizeListArray.from_arrays(pa.array(rng.random(3 * n)), 3),
    "list": lambda rng, n: pa.array([[1.5] * int(k) for k in rng.integers(1, 3, n)], pa.list_(pa.float64())),
    "even list": lambda rng, n: pa.array([[1, 2, int(k)] for k in rng.integers(0, 9, n)], pa.list_(pa.int32())),
    "struct": lambda rng, n: pa.array([{"a": int(k), "b": "y"} for k in rng.integers(0, 9, n)], STRUCT),
    "kind": lambda rng, n: pa.array([f"k{k}" for k in rng.integers(0, 3, n)], pa.string()).dictionary_encode(),
    "code": lambda rng, n: pa.array(rng.integers(0, 3, n)).dictionary_encode(),
}


def write(folder: Path, ending: str, names: list[str], counts: list[int], group: int, *, mixed: bool = False) -> None:
    """Shards of so many rows; with ``mixed`` every other shard has its whole numbers in 32 bits."""
    for number, count in enumerate(counts):
        rng = np.random.default_rng(number)
        columns = {name: COLUMNS[name](rng, count) for name in names}
        if mixed and number % 2 and "long" in columns:
            columns["long"] = columns["long"].cast(pa.int32())
        table = pa.table(columns)
        if ending == "parquet":
            pq.write_table(table, folder / f"{number:03d}.parquet", row_group_size=group)
        else:
            with pa.ipc.new_file(folder / f"{number:03d}.arrow", table.schema) as out:
                out.write_table(table.unify_dictionaries(), max_chunksize=group)


def shown(value: Any) -> Any:
    """What can be compared: kinds, dtypes and values."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, {name: shown(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value).__name__, [shown(part) for part in value]
    return type(value).__name__, value


def from_samples(ds: loader.ShardDataset) -> Iterator[Batch]:
    """The batches, put together from samples one by one."""
    samples: list[Any] = []
    for sample in ds:
        samples.append(sample)
        if len(samples) == sample.stamp.size:
            yield loader.collate(samples)
            samples = []
    assert not samples


def overwrite(batch: Batch) -> None:
    for value in batch.values():
        if isinstance(value, torch.Tensor):
            value.fill_(1)
        elif isinstance(value, list):
            for part in value:
                if isinstance(part, np.ndarray):
                    part.fill(7)
            value.clear()


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(COLUMNS)), min_size=1, max_size=5, unique=True))
    counts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(lambda counts: sum(counts) >= 12))
    shuffle, pad = draw(st.booleans()), draw(st.booleans())
    options = {
        "batch_size": draw(st.integers(1, 12)),
        "shuffle": shuffle,
        "drop_last": not pad and draw(st.booleans()),
        "pad": pad,
        "ids": draw(st.booleans()),
        "fields": draw(st.none() | st.just(names[:1])),
        "decode": draw(st.sampled_from([None, "bytes", "torch"])),
    }
    return {
        "ending": draw(st.sampled_from(["parquet", "arrow"])),
        "names": names,
        "counts": counts,
        "group": draw(st.integers(1, 40)),
        "mixed": draw(st.booleans()),
        "options": options,
        "through": draw(st.sampled_from(["batched", "loader"])),
    }


# to shrink a failure takes minutes: an example says enough
@settings(
    deadline=None,
    max_examples=20,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases())
def test_batches_are_what_collate_makes_of_the_samples(case: dict[str, Any]) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, case["ending"], case["names"], case["counts"], case["group"], mixed=case["mixed"])
        wanted = loader.ShardDataset(folder, **case["options"])
        given = loader.ShardDataset(folder, **case["options"])
        batches = given.batched() if case["through"] == "batched" else loader.Loader(given, threads=2)
        for want, batch in zip(from_samples(wanted), batches, strict=True):
            assert shown(batch) == shown(want)
            assert batch.stamp == want.stamp
            assert given.state_dict() == given.state_after(batch) == wanted.state_after(want)
            overwrite(batch)  # nobody sees it: neither the batches that were made with this one nor a repeat


@given(st.integers(1, 500), st.integers(0, 10**5), st.integers(0, 10**9))
def test_runs_are_bounded(batches: int, samples: int, nbytes: int) -> None:
    size = fitting(batches, samples, nbytes)
    assert 1 <= size <= 2 * batches
    if size > 1:
        assert size * samples <= RUN_ROWS * batches and size * nbytes <= RUN_BYTES * batches


class Counted:
    """Counts what is read in one call; a run that is refused as too large is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        gather = ColumnGather.gather

        def counted(own: Any, places: Any, allocate: Any, most: int) -> Any:
            gathered = gather(own, places, allocate, most)
            if not isinstance(gathered, int):
                self.rows.append(len(places.row))
            return gathered

        monkeypatch.setattr(ColumnGather, "gather", counted)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_light_rows_are_read_in_long_runs_and_heavy_ones_are_not(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, ending, ["long", "text"], [4000], 4000)
    counted = Counted(monkeypatch)
    assert sum(len(batch["text"]) for batch in loader.ShardDataset(tmp_path, batch_size=10).batched()) == 4000
    assert counted.rows[:4] == [10, 20, 40, 80] and max(counted.rows) > 1000

    heavy = tmp_path / "heavy"
    heavy.mkdir()
    for number, size in enumerate([1, RUN_BYTES // 20]):
        table = pa.table({"n": np.arange(100), "text": ["x" * size] * 100})
        if ending == "parquet":
            pq.write_table(table, heavy / f"{number}.parquet")
        else:
            with pa.ipc.new_file(heavy / f"{number}.arrow", table.schema) as out:
                out.write_table(table)
    counted.rows.clear()
    batches = [
        (batch["n"].tolist(), set(map(len, batch["text"])))
        for batch in loader.ShardDataset(heavy, batch_size=4, shuffle=False).batched()
    ]
    assert batches == [([4 * k % 100 + i for i in range(4)], {1 if k < 25 else RUN_BYTES // 20}) for k in range(50)]
    assert counted.rows[:4] == [4, 8, 16, 32]
    assert 4 < max(counted.rows[4:]) <= 20  # what twenty rows take is all that is read at a time


def test_an_error_is_raised_in_its_place(tmp_path: Path) -> None:
    write(tmp_path, "arrow", ["long"], [100], 100)
    with pa.ipc.new_file(tmp_path / "100.arrow", pa.schema([("other", pa.int64())])) as out:
        out.write_table(pa.table({"other": [1] * 10}))
    ds = loader.ShardDataset(tmp_path, batch_size=4, fields=["long"], shuffle=False)
    for batches in (ds.batched(), loader.Loader(ds)):
        seen = 0
        with pytest.raises(MissingField, match="long"):
            for batch in batches:
                seen += len(batch["long"])
        assert seen == 100
        ds.load_state_dict(loader.ShardDataset(tmp_path, batch_size=4, fields=["long"], shuffle=False).state_dict())


def test_a_text_that_is_no_utf8_harms_its_own_batch_only(tmp_path: Path) -> None:
    stored = [b"text %d" % number for number in range(100)]
    stored[57] = b"\xff\xfe"
    batch = pa.record_batch({"text": pa.array(stored, pa.binary()).view(pa.string())})
    with pa.ipc.new_file(tmp_path / "0.arrow", batch.schema) as out:
        out.write_batch(batch)
    for through in (loader.ShardDataset.batched, loader.Loader):
        ds = loader.ShardDataset(tmp_path, batch_size=4, shuffle=False)
        texts: list[str] = []
        with pytest.raises(FormatError, match=r"column 'text' of samples 56 to 59.*invalid start byte"):
            for read in through(ds):
                texts += read["text"]
        assert texts == [f"text {number}" for number in range(56)]


def test_workers_send_each_batch_by_itself(tmp_path: Path) -> None:
    write(tmp_path, "arrow", ["long", "float", "text", "maybe long"], [900, 300], 256)
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "ids": True}
    wanted = list(map(shown, loader.ShardDataset(tmp_path, **options).batched()))
    batches = loader.ShardDataset(tmp_path, **options).batched()
    kept = list(DataLoader(batches, batch_size=None, num_workers=2, collate_fn=loader.collate))
    assert list(map(shown, kept)) == wanted
    for batch in kept[::2]:
        overwrite(batch)
    assert list(map(shown, kept))[1::2] == wanted[1::2]


def test_arrays_are_read_in_runs_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        np.save(tmp_path / f"{number}.npy", np.arange(300 * 4, dtype=np.int16).reshape(300, 4) + number)
    counted = Counted(monkeypatch)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "format": Npy()}
    want = list(map(shown, from_samples(loader.ShardDataset(tmp_path, **options))))
    assert list(map(shown, loader.ShardDataset(tmp_path, **options).batched())) == want
    assert max(counted.rows) > 100
