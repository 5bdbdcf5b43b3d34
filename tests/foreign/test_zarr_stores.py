"""zarr stores that zarr wrote: every value, and what zarr itself reads, which is the referee."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import loader
from loader.formats import Zarr
from loader.testing import mapped_at

zarr = pytest.importorskip("zarr")

DATA = Path(__file__).parent / "data"
STORES = sorted(path.name for path in (DATA / "zarr").iterdir())


def expected(name: str) -> list[dict[str, Any]]:
    document = json.loads((DATA / "expect" / f"zarr__{name}.json").read_text())
    samples: list[dict[str, Any]] = document["samples"]
    return samples


def check_all(samples: Any, wanted: list[dict[str, Any]]) -> None:
    samples = list(samples)
    assert len(samples) == len(wanted)
    for sample, want in zip(samples, wanted, strict=True):
        assert set(sample) == set(want["fields"])
        for name, field in want["fields"].items():
            if field["type"] == "int":
                assert sample[name] == field["value"]
            else:
                value = np.asarray(sample[name])
                assert (value.dtype.name, list(value.shape)) == (field["dtype"], field["shape"])
                assert hashlib.sha256(np.ascontiguousarray(value)).hexdigest() == field["sha256"]


def alone(samples: list[Any]) -> Any:
    return samples[0]


@pytest.mark.parametrize("name", STORES)
def test_every_value_of_a_store(name: str) -> None:
    reader = loader.open_shard(DATA / "zarr" / name)
    assert reader.format == Zarr()
    check_all(reader, expected(name))


@pytest.mark.parametrize("name", STORES)
def test_zarr_itself_reads_the_same(name: str) -> None:
    group = zarr.open_group(DATA / "zarr" / name, mode="r")
    wanted = {key: array[:] for key, array in group.arrays()}
    samples = list(loader.open_shard(DATA / "zarr" / name))
    for key, values in wanted.items():
        assert np.array_equal(np.stack([sample[key] for sample in samples]), values)
    [batch] = loader.ShardDataset(
        DATA / "zarr" / name, batch_size=len(samples), shuffle=False, fields=list(wanted)
    ).batched()
    assert all(np.array_equal(np.asarray(batch[key]), values) for key, values in wanted.items())


@pytest.mark.parametrize(
    ("name", "method"),
    [("v2_blosc_consolidated.zarr", "fork"), ("v3_sharded.zarr", "fork"), ("v3_default.zarr", "spawn")],
)
def test_workers_read_after_their_parent_has_used_zarr(name: str, method: str) -> None:
    """zarr runs its codecs on a thread, which a forked process does not have."""
    ds = loader.ShardDataset(DATA / "zarr" / name, batch_size=1, shuffle=False)
    check_all(ds, expected(name))
    assert zarr.core.sync.loop[0] is not None, "the thread runs by now"
    loaded = DataLoader(ds, batch_size=1, num_workers=2, collate_fn=alone, multiprocessing_context=method, timeout=60)
    check_all(loaded, expected(name))


def _read_in_child(reader: loader.ShardReader, wanted: list[dict[str, Any]], queue: Any) -> None:
    check_all(reader, wanted)
    queue.put("read")


def test_an_open_store_reads_on_in_a_forked_process() -> None:
    reader = loader.open_shard(DATA / "zarr" / "v3_default.zarr")
    assert set(reader[0]) == {"inputs", "targets"}
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(reader, expected("v3_default.zarr"), queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and queue.get() == "read"
    check_all(reader, expected("v3_default.zarr"))


@pytest.mark.parametrize("source", [DATA / "zarr", [DATA / "zarr" / name for name in STORES]])
def test_a_folder_of_stores_has_a_shard_for_each(source: Any) -> None:
    ds = loader.ShardDataset(source, batch_size=1, shuffle=False)
    assert [Path(stat.url).name for stat in ds.manifest.shards] == STORES
    check_all(ds, [sample for name in STORES for sample in expected(name)])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc/self/maps")
def test_uncompressed_rows_are_the_chunks_own_bytes() -> None:
    root = DATA / "zarr" / "v3_raw.zarr"
    for i, sample in enumerate(loader.open_shard(root)):
        file, offset = mapped_at(sample["inputs"])
        assert Path(file).samefile(root / "inputs" / "c" / str(i // 10) / "0" / "0") and offset == i % 10 * 64
        sample["inputs"][:] = 1  # private memory
    check_all(loader.open_shard(root), expected("v3_raw.zarr"))
